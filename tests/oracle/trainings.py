"""Train every preset for 12 steps, uninterrupted and stopped in mid-epoch, and sketch what each training leaves.

    python tests/oracle/trainings.py FOLDER RANK WORLD_SIZE PORT    # trains into FOLDER, one process of WORLD_SIZE
    python tests/oracle/trainings.py --record                       # writes golden.json, by one and by two processes

It uses nothing but the public command and OpenCLIP, so that a change within the package cannot change it.
"""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import open_clip
import torch
from PIL import Image
from torch import Tensor

from open_clip_ext.errors import Stopped
from open_clip_ext.main import train
from open_clip_ext.metrics_file import read_metrics

HERE = Path(__file__).parent
GOLDEN = HERE / "golden.json"
PAIRS, GLOBAL_BATCH, EPOCHS, STOPPED_AFTER = 48, 8, 2, 8
COLOURS = ("red", "green", "blue", "yellow", "black", "white")
MODEL = "--model ViT-oracle --precision fp32 --device cpu --workers 0"
# With AdamW's usual eps, rounding decides the step of parameters whose gradient is zero, and so the golden numbers.
COMMON = f"{MODEL} --warmup 3 --lr 1e-3 --eps 1e-3 --epochs {EPOCHS} --log-every-n-steps 1"
TRAININGS = {
    "clip": "",
    "siglip": "",
    "cyclip": "",
    "sogclr": "",
    "isogclr": "--tau-lr 1e-3",
    "fastclip-v0": "",
    "fastclip-v1": "",
    "fastclip-v2": "--tau-lr 1e-3",
    "fastclip-v3": "--rho 5",
    "scent": "--rho 5",
    "tempnet": "",
    "drrho-clip": "--distill-model ViT-oracle --distill-pretrained {reference}",
    "neuclip": "--npn-prototypes 20 --npn-updates 2 --npn-restart-every 5 --rho 5",
    "amorlip": "--amor-online-every 2",
    "amorlip-released": "",
    "amorlip-paper": "",
    "tuneclip": "--osr-epochs 1 --lr 1e-3 --epochs 2",
    "queue": "--queue-size 20 --rho 5",
    "fastclip-v3 --accum-freq 2": "--rho 5",
    "neuclip --normalizer mlp --npn-joint": "--rho 5",
    "sogclr --normalizer prototypes --temperature individual --surrogate hinge": "--npn-prototypes 20 --tau-lr 1e-3",
}
RESUMABLE = [name for name in TRAININGS if name not in ("clip", "siglip")]  # OpenCLIP's order of the data is not


def main(folder: Path, rank: int = 0, world_size: int = 1, port: int = 0) -> None:
    prepare(folder)
    if world_size > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    data, reference = folder / "train.csv", folder / "reference.pt"
    for number, (name, flags) in enumerate(TRAININGS.items()):
        batch = GLOBAL_BATCH // world_size // (2 if "accum" in name else 1)
        command = f"--loss {name} {COMMON} --batch-size {batch} {flags} --train-data {data} --logs {folder}"
        command = f"{command} --name {folder_of(name)}".format(reference=reference).split()
        os.environ["MASTER_PORT"] = str(port + 3 * number)
        _train(command)
        if name in RESUMABLE:
            os.environ["MASTER_PORT"] = str(port + 3 * number + 1)
            stopped = [*command, "--name", f"{folder_of(name)}-stopped"]
            _stop(stopped)
            os.environ["MASTER_PORT"] = str(port + 3 * number + 2)
            _train([*stopped, "--resume", "latest"])


def prepare(folder: Path) -> None:
    torch.set_num_threads(1)
    open_clip.add_model_config(HERE / "model_configs")
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")


def folder_of(name: str) -> str:
    return name.replace(" --", ".").replace(" ", "-")


def _train(command: list[str]) -> None:
    try:
        train(command)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _stop(command: list[str]) -> None:
    """Train until SIGTERM arrives in an optimizer step of the second epoch (of tuneclip, of the first)."""
    step, taken = torch.optim.AdamW.step, 0

    def counted(optimizer: torch.optim.AdamW, *args: Any, **kwargs: Any) -> Any:
        nonlocal taken
        taken += 1
        if taken == STOPPED_AFTER:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(optimizer, *args, **kwargs)

    counted.hooked = True  # or torch would run the optimizer's hooks once more
    torch.optim.AdamW.step = counted
    try:
        _train(command)
    except Stopped:
        return
    finally:
        torch.optim.AdamW.step = step
    raise AssertionError(f"SIGTERM did not stop {command}")


def make_data(folder: Path) -> None:
    """Pictures with captions in train.csv, and the weights of a reference model."""
    open_clip.add_model_config(HERE / "model_configs")
    chosen = random.Random(0)
    lines = ["filepath\ttitle"]
    for i in range(PAIRS):
        colours = chosen.sample(COLOURS, 2)
        image = Image.new("RGB", (48, 48), colours[0])
        image.paste(Image.new("RGB", (20 + i % 9, 20), colours[1]), (i % 20, i % 13))
        image.save(folder / f"{i}.png")
        lines.append(f"{folder}/{i}.png\t{colours[1]} on {colours[0]}, {i}")
    (folder / "train.csv").write_text("\n".join(lines))
    torch.manual_seed(0)
    torch.save(open_clip.create_model("ViT-oracle").state_dict(), folder / "reference.pt")


def run_processes(folder: Path, world_size: int) -> None:
    """Make the data and train all of TRAININGS in `folder`, in `world_size` processes."""
    make_data(folder)
    port = 15000 + os.getpid() % 15000  # below those that the system gives to outgoing connections
    arguments = [[str(folder), str(rank), str(world_size), str(port)] for rank in range(world_size)]
    with open(folder / "output.txt", "wb") as output:
        running = [
            subprocess.Popen([sys.executable, __file__, *args], stdout=output, stderr=subprocess.STDOUT)
            for args in arguments
        ]
        while any(process.poll() is None for process in running):
            time.sleep(0.1)
            if any(process.poll() for process in running):  # the others would wait for it for half an hour
                for process in running:
                    process.kill()
    assert not any(process.returncode for process in running), (folder / "output.txt").read_text()[-5000:]


def sketch(folder: Path, name: str) -> dict[str, Any]:
    """Norm and one projection of every tensor of the final weights and of the loss's state; every logged objective."""
    run = folder / folder_of(name)
    content = torch.load(run / "checkpoints" / f"epoch_{EPOCHS}.pt", weights_only=True)
    sketched: dict[str, Any] = {}
    for key, tensor in content["state_dict"].items():
        sketched[f"model.{key.removeprefix('module.')}"] = _numbers(tensor)
    _collect(sketched, "loss", content.get("open_clip_ext", {}).get("state", {}))
    lines = read_metrics(run, "train")
    for key in sorted({key for line in lines for key in line if key.startswith("objective_") or key in ("lr", "tau")}):
        sketched[f"log.{key}"] = [float(f"{line[key]:.6g}") for line in lines if key in line]
    return sketched


def _collect(sketched: dict[str, Any], path: str, value: Any) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _collect(sketched, f"{path}.{key}", inner)
    elif isinstance(value, Tensor):
        sketched[path] = _numbers(value)


def assert_same(one: Any, other: Any, path: str = "") -> None:
    """Assert that two checkpoints hold the same, to the last bit."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for i, (first, second) in enumerate(zip(one, other, strict=True)):
            assert_same(first, second, f"{path}.{i}")
    elif isinstance(one, Tensor):
        assert one.dtype == other.dtype and torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)), path
    else:
        assert one == other, path


def _numbers(tensor: Tensor) -> list[float]:
    values = tensor.double().flatten().nan_to_num(0.0, 1e6, -1e6)  # an unvisited row's log u is -inf
    signs = torch.tensor([random.Random(i).choice((-1.0, 1.0)) for i in range(min(997, len(values)))]).double()
    repeated = signs.repeat(math.ceil(len(values) / max(1, len(signs))))[: len(values)] if len(values) else values
    return [float(f"{values.norm():.7g}"), float(f"{values @ repeated:.7g}")]


def record() -> None:
    golden = {}
    for world_size in (1, 2):
        folder = Path(tempfile.mkdtemp())
        run_processes(folder, world_size)
        golden[str(world_size)] = {name: sketch(folder, name) for name in TRAININGS}
        shutil.rmtree(folder)
    GOLDEN.write_text(json.dumps(golden).replace('}, "', '},\n"') + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "--record":
        record()
    else:
        main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
