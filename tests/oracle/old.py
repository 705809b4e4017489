"""What version 0.1 left on users' disks goes on: checkpoints within an epoch, a recipe, a plug-in.

    python tests/oracle/old.py FOLDER      # resumes each of old/ in FOLDER and trains by the recipe and the plug-in
    python tests/oracle/old.py --record    # makes old/ and old.json anew; only ever with the version that old/ is of
"""

import json
import lzma
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import trainings

OLD = trainings.HERE / "old"
GOLDEN = trainings.HERE / "old.json"
# Prototypes; rows in a folder beside the file; a recovery of the optimizer's statistics before.
STOPPED = {
    "neuclip": trainings.TRAININGS["neuclip"],
    "fastclip-v2": "--tau-lr 1e-3 --split-rows-above 0",
    "tuneclip": trainings.TRAININGS["tuneclip"],
}
STARTED = {
    "shared": "--loss shared --shared-keep 0.8",
    "pairwise": "--loss pairwise",
    "recipe": f"--recipe {OLD}/recipe.yaml",
}


def command(folder: Path, name: str, flags: str) -> list[str]:
    data = f"--train-data {folder}/train.csv --logs {folder} --name {name}"
    return f"{flags} {data} --batch-size {trainings.GLOBAL_BATCH}".split()


def go_on(folder: Path) -> None:
    """Resume what was stopped, and start what is started, each to its end."""
    trainings.prepare(folder)
    for name, flags in STOPPED.items():
        trainings._train(command(folder, name, f"--loss {name} {trainings.COMMON} {flags} --resume latest"))
    for name, flags in STARTED.items():
        trainings._train(command(folder, name, flags if name == "recipe" else f"{flags} {trainings.COMMON}"))


def unpack(folder: Path) -> None:
    """Lay old/ out as runs in `folder`, with the data that they were trained on."""
    trainings.make_data(folder)
    for packed in OLD.glob("*/**/*.xz"):
        path = folder / packed.relative_to(OLD).with_suffix("")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(lzma.decompress(packed.read_bytes()))


def run(folder: Path, *arguments: str) -> None:
    path = os.pathsep.join([str(OLD / "plugin"), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, __file__, *arguments, str(folder)], check=True, env=environment)


def sketches(folder: Path) -> dict[str, Any]:
    return {name: trainings.sketch(folder, name) for name in (*STOPPED, *STARTED)}


def stop_all(folder: Path) -> None:
    trainings.prepare(folder)
    for name, flags in STOPPED.items():
        trainings._stop(command(folder, name, f"--loss {name} {trainings.COMMON} {flags}"))


def record() -> None:
    folder = Path(tempfile.mkdtemp())
    trainings.make_data(folder)
    run(folder, "--stop")
    for name in STOPPED:
        shutil.rmtree(OLD / name, ignore_errors=True)
        for file in (folder / name / "checkpoints").rglob("*"):
            if file.is_file():
                if file.suffix == ".pt":
                    _without_unused_tokens(file)
                packed = OLD / file.relative_to(folder).parent / f"{file.name}.xz"
                packed.parent.mkdir(parents=True, exist_ok=True)
                packed.write_bytes(lzma.compress(file.read_bytes()))
    shutil.copy(folder / "neuclip" / "recipe.yaml", OLD)
    shutil.rmtree(folder)
    folder = Path(tempfile.mkdtemp())
    unpack(folder)
    run(folder)
    GOLDEN.write_text(json.dumps(sketches(folder)).replace('}, "', '},\n"') + "\n")
    shutil.rmtree(folder)


def _without_unused_tokens(file: Path) -> None:
    """Set the embeddings of tokens that no caption has to 0, so that the file packs well."""
    content = torch.load(file, weights_only=True)
    moments = next(
        state["exp_avg_sq"] for state in content["optimizer"]["state"].values() if len(state["exp_avg_sq"]) > 10000
    )
    content["state_dict"]["token_embedding.weight"][(moments == 0).all(dim=1)] = 0
    torch.save(content, file)


if __name__ == "__main__":
    if sys.argv[1] == "--record":
        record()
    elif sys.argv[1] == "--stop":
        stop_all(Path(sys.argv[2]))
    else:
        go_on(Path(sys.argv[1]))
