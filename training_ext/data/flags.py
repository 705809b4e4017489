"""The core's own flags: on the samples of the train data and the files of their state, and on generated scenes."""

from typing import ClassVar

from open_clip_ext.options import AT_LEAST_0, WithOptions, option
from training_ext.data.row_folders import SPLIT_ABOVE


class RowFlags(WithOptions):
    needs_loss: ClassVar[bool] = True
    topic: ClassVar[str] = "data"

    shard_sizes: str | None = option(
        None, "JSON file of samples per shard, by file name or URL, if there is no sizes.json beside the shards",
        metavar="FILE",
    )  # fmt: skip
    split_rows_above: float | None = option(
        None, "if the loss's state per sample is larger than this, each process saves its own part, in a folder beside "
        f"the checkpoint (default: {SPLIT_ABOVE:g})",
        metavar="MIB", **AT_LEAST_0,
    )  # fmt: skip
    same_key: str | None = option(
        None, "column of the csv, or field of the samples' .json in shards: samples with the same entry are not used "
        "as each other's negatives",
        metavar="NAME",
    )  # fmt: skip
    same_caption: bool = option(False, "samples with the same caption are not used as each other's negatives")
    positives: str | None = option(
        None, "column of the csv, or field of the samples' .json in shards: samples with the same entry are one "
        "another's positives; caption: those with the same caption",
        metavar="NAME",
    )  # fmt: skip
    several_captions: bool = option(
        False, "lines of the csv with the same image, or of one .txt in a folder, are one sample, and one of their "
        "captions is drawn each epoch"
    )
    captions_field: str | None = option(
        None, "field of the samples' .json in shards with a list of captions, of which one is drawn each epoch",
        metavar="NAME",
    )  # fmt: skip


class SceneFlags(WithOptions):
    needs_loss: ClassVar[bool] = False
    topic: ClassVar[str] = "data"

    shapes_seed: int | None = option(
        None, "seed of the scenes of --dataset-type shapes (default: 0)",
        valid=lambda seed: 0 <= seed < 2**63, expected="at least 0 and below 2**63",
    )  # fmt: skip
    shapes_shifted: bool = option(
        False, "train on scenes in other colours and with noisy captions; the validation scenes are the same"
    )
