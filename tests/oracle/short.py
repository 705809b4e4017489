"""Train twelve steps with evaluations: NeuCLIP, OpenCLIP's loss by this package's command, and by OpenCLIP's own.

    python tests/oracle/short.py FOLDER
"""

import shutil
import sys
from pathlib import Path

import trainings
from open_clip_train.main import main as open_clips_main

STEPS = trainings.EPOCHS * trainings.PAIRS // trainings.GLOBAL_BATCH
LOSSES = {"neuclip": f"--loss neuclip {trainings.TRAININGS['neuclip']}", "clip": "--loss clip"}


def main(folder: Path) -> None:
    trainings.prepare(folder)
    trainings.make_data(folder)
    # The pairs of the training, in a file of their own, since validation data that are trained on are refused.
    shutil.copy(folder / "train.csv", folder / "val.csv")
    data = f"--train-data {folder}/train.csv --val-data {folder}/val.csv --logs {folder}"
    common = f"{trainings.COMMON} --batch-size {trainings.GLOBAL_BATCH} {data}"
    for name, loss in LOSSES.items():
        trainings._train(f"{common} {loss} --name {name}".split())
    open_clips_main(f"{common} --name theirs".split())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
