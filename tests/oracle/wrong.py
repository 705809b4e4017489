"""Run the command lines of wrong.json, each in a fork of a process that has imported what they need.

    python tests/oracle/wrong.py FOLDER    # makes their data in FOLDER, and ended.json: how each of them ended

In a command line {data} is FOLDER, {shapes}, {csv} and {shards} are the flags of good data in it, and {neuclip},
{fastclip-v3} and {clip} are checkpoints of trainings by {csv}.
"""

import contextlib
import importlib
import io
import json
import os
import resource
import sys
import tarfile
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import trainings

CASES = json.loads((trainings.HERE / "wrong.json").read_text())
COMMON = f"{trainings.MODEL} --batch-size {trainings.GLOBAL_BATCH} --epochs 1 --warmup 2 --logs logs"
TRAINED = {
    "neuclip": "--loss neuclip --npn-prototypes 20",
    "fastclip-v3": "--loss fastclip-v3",
    "clip": "--loss clip",
}
SECONDS, MEMORY = 120, 1 << 35  # of CPU time, and of address space: a wrong number must not take the machine's


def main(folder: Path) -> None:
    trainings.prepare(folder)
    warm()
    # A process that has run a backward pass cannot be forked to run another.
    assert in_child(lambda: make_data(folder), folder / "data.txt") == 0, (folder / "data.txt").read_text()[-3000:]
    ended = [run(case, folder) for case in CASES]
    (folder / "ended.json").write_text(json.dumps(ended))


def warm() -> None:
    """Import what the commands do, so that no fork of this process has to."""
    importlib.import_module("timm.optim")
    importlib.import_module("torch.utils.tensorboard")
    torch.optim.AdamW([torch.zeros(1)])
    for command in ("main", "evaluate", "normalizers_report"):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            importlib.import_module(f"open_clip_ext.{command}").main(["--help"])


def make_data(folder: Path) -> int:
    trainings.make_data(folder)
    lines = (folder / "train.csv").read_text().splitlines()
    csv = {
        "fewer": lines[:-1],
        "comma": [line.replace("\t", ",", 1) for line in lines],
        "no-caption": [lines[0], *(line.partition("\t")[0] + "\t" for line in lines[1:])],
        "no-image": [lines[0], *(line.replace(".png", ".gone") for line in lines[1:])],
    }
    for name, changed in csv.items():
        (folder / f"{name}.csv").write_text("\n".join(changed))
    for row, line in enumerate(lines[1:9]):
        (folder / f"{row}.txt").write_text(line.partition("\t")[2])
        (folder / f"{row}.json").write_text(json.dumps({"caption": line.partition("\t")[2]}))
    (folder / "shards").mkdir()
    for name, suffix in (("shards/0", "txt"), ("shards/1", "txt"), ("json", "json")):
        with tarfile.open(folder / f"{name}.tar", "w") as tar:
            for row in range(8):
                tar.add(folder / f"{row}.png", f"{row}.png")
                tar.add(folder / f"{row}.{suffix}", f"{row}.{suffix}")
    (folder / "torn.tar").write_bytes((folder / "shards/0.tar").read_bytes()[:700])
    (folder / "text.pt").write_text("not a checkpoint")
    for name in ("red", "green"):
        (folder / "classes" / name).mkdir(parents=True)
        (folder / "classes" / name / "0.png").write_bytes((folder / "0.png").read_bytes())
    (folder / "list.yaml").write_text("[1, 2]")
    (folder / "flag.yaml").write_text("flags: {loss: neuclip, npn_prototyps: 20}")
    (folder / "value.yaml").write_text("flags: {loss: neuclip, rho: -1}")
    for name, loss in TRAINED.items():
        trainings._train(f"{COMMON} --train-data {folder}/train.csv {loss} --logs {folder} --name {name}".split())
    whole = (folder / "neuclip/checkpoints/epoch_1.pt").read_bytes()
    (folder / "torn.pt").write_bytes(whole[: len(whole) // 2])
    content = torch.load(folder / "neuclip/checkpoints/epoch_1.pt", weights_only=True)
    torch.save({"state_dict": content["state_dict"]}, folder / "weights.pt")
    del content["open_clip_ext"]
    torch.save(content, folder / "no-state.pt")
    return 0


def run(case: dict[str, Any], data: Path) -> dict[str, Any]:
    """How a command line ended: exit code, output, and the files that it left."""
    folder = Path(tempfile.mkdtemp(dir=data))
    output = folder.with_suffix(".txt")
    code = in_child(lambda: in_folder(folder, case, data), output)
    written = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    return {"code": code, "output": output.read_text(errors="replace"), "written": written}


def in_folder(folder: Path, case: dict[str, Any], data: Path) -> int:
    os.chdir(folder)
    module = importlib.import_module(f"open_clip_ext.{case['command']}")
    return module.main(command_line(case, data))


def command_line(case: dict[str, Any], data: Path) -> list[str]:
    known = {
        "shapes": "--dataset-type shapes --train-num-samples 16",
        "csv": "--train-data {data}/train.csv",
        "shards": "--dataset-type webdataset --train-data {data}/shards/{0..1}.tar --workers 1",
        **{name: f"{{data}}/{name}/checkpoints/epoch_1.pt" for name in TRAINED},
        "data": str(data),
    }
    text = f"{COMMON} {case['arguments']}" if case["command"] == "main" else case["arguments"]
    for name, value in known.items():
        text = text.replace(f"{{{name}}}", value)
    return text.split()


def in_child(function: Callable[[], int], output: Path) -> int:
    """Call a function in a fork, its output in a file, and return its exit code; a traceback has 1."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        for stream in (1, 2):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        code = function()
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
