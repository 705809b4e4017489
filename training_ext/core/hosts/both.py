"""The names that are replaced in the loops of OpenCLIP 2.26 to 3.3 and of 4.2 alike."""

from functools import partial
from types import ModuleType
from typing import Any

from training_ext.core.seam import DATA, MAIN, TRAIN_DATA, Seam


def main() -> ModuleType:
    """The module of OpenCLIP's command.

    Raises:
        ImportError: it or something that it needs is not there.
    """
    import open_clip_train.main as module

    return module


def data_parallel(original: Any, run: Any) -> type:
    """DistributedDataParallel that leaves out `device_ids` for a model on the CPU."""

    class DistributedDataParallel(original):
        def __init__(self, module: Any, device_ids: list | None = None, **kwargs: Any):
            on_cpu = next(module.parameters()).device.type == "cpu"
            super().__init__(module, device_ids=None if on_cpu else device_ids, **kwargs)

    return DistributedDataParallel


def map_style(user: str, name: str) -> Seam:
    """The seam of a class of data sets that the function `user` builds."""
    return Seam(
        DATA, name,
        why="a sample's tokens end in its row",
        contract=f"{user} builds {name}(...), whose items are images and tokens by number",
        replacement=lambda original, run: partial(run.data.map_style, original),
        used_by=f"{DATA}:{user}",
        scopes=(TRAIN_DATA,),
    )


GET_DATASET_FN = Seam(
    DATA, "get_dataset_fn",
    why="the train data set is built with the rows of its samples, and tells when an epoch begins and ends",
    contract="get_data builds each data set by get_dataset_fn(path, type)(args, transform, is_train=, tokenizer=), "
    "a DataInfo; the loop calls its set_epoch(epoch) and then goes through its dataloader to the end",
    replacement=lambda original, run: lambda path, kind: partial(run.data.build, original(path, kind)),
    used_by=f"{DATA}:get_data",
    parameters=("data_path", "dataset_type"),
)
SHARD_READER = Seam(
    DATA, "tarfile_to_samples_nothrow",
    why="a sample's place in its shard is known only where the tar is read",
    contract="get_wds_dataset uses it for train data as the stage from shards, dicts with url, to raw samples, dicts "
    "with txt; the caption then goes through the tokenizer that get_data was given",
    replacement=lambda original, run: run.data.shards(original),
    used_by=f"{DATA}:get_wds_dataset",
    scopes=(TRAIN_DATA,),
)
SEAMS = (
    Seam(
        MAIN, "parse_args",
        why="our flags are parsed together with OpenCLIP's, before anything is written",
        contract="main(args) calls parse_args(args) once, first",
        replacement=lambda original, run: lambda argv: run.args,
    ),
    Seam(
        MAIN, "create_model_and_transforms",
        why="components change the model; what the loss does not train must not wait for a gradient",
        contract="main gets the model from it before wrapping it, and the first call is the trained model",
        replacement=lambda original, run: partial(run.create_model, original),
    ),
    Seam(
        MAIN, "torch.save",
        why="our state is one more key of a checkpoint; OpenCLIP writes in place, where a kill leaves a torn file",
        contract="main writes a checkpoint by torch.save(dict, path) on process 0 after the epoch",
        replacement=lambda original, run: partial(run.state.save, original),
    ),
    Seam(
        "open_clip_train.scheduler", "assign_learning_rate",
        why="the temperature has a learning rate of its own, and groups of components a factor",
        contract="every schedule calls assign_learning_rate(optimizer, lr), before each batch",
        replacement=lambda original, run: partial(run.assign_learning_rate, original),
        used_by="open_clip_train.scheduler:cosine_lr",
        parameters=("optimizer", "new_lr"),
    ),
    GET_DATASET_FN,
    map_style("get_csv_dataset", "CsvDataset"),
    map_style("get_synthetic_dataset", "SyntheticDataset"),
    SHARD_READER,
)
