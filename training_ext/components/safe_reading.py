"""Read what others may have written without executing anything in it: weights, tokenizers, members of shards."""

import os
from typing import Any

from open_clip_ext.errors import InputError
from training_ext.core.component import Component
from training_ext.core.hosts import release
from training_ext.core.seam import TRAIN_DATA, VAL_DATA, Seam
from training_ext.data.tars import decode_pairs
from training_ext.openclip.loading import load_checkpoint, load_plain, one_line, verify, without_remote_code

DECODE = Seam(
    "open_clip_train.data", "wds.decode",
    why="webdataset unpickles members named .pyd, .pickle or .pth, for which OpenCLIP has no use",
    contract="get_wds_dataset decodes samples by wds.decode(..., handler=), then takes image and caption by name",
    replacement=lambda original, component: decode_pairs(original),
    used_by="open_clip_train.data:get_wds_dataset",
    scopes=(TRAIN_DATA, VAL_DATA),
)  # fmt: skip

HAS_TASKS = release() >= (4, 0)


class SafeReading(Component):
    name = "safe_reading"
    may_be_off = False
    seams = (
        Seam(
            "open_clip.factory", "torch.load",
            why="where reading fails by a TypeError, OpenCLIP leaves it to torch's default whether the file's pickles "
            "are run; and weights that cannot be read end in one line",
            contract="load_state_dict reads every file of weights but .safetensors by torch.load(path, ...)",
            replacement=lambda original, component: load_weights,
            used_by="open_clip.factory:load_state_dict",
        ),
        Seam(
            "open_clip.factory", "HFTokenizer",
            why="a hub folder's configuration may ask for a tokenizer with code of its own, and one that cannot be "
            "loaded ends in one line",
            contract="get_tokenizer passes tokenizer_kwargs of the configuration to HFTokenizer(source, ...)",
            replacement=lambda original, component: without_remote_code(original),
            used_by="open_clip.factory:get_tokenizer",
        ),
        Seam(
            "open_clip_train.file_utils" if HAS_TASKS else "open_clip_train.main", "pt_load",
            why="OpenCLIP leaves it to torch's default whether the pickles of --resume are run, and no changed bit is "
            "seen",
            contract="main, or the load_checkpoint that it calls, loads --resume by pt_load(path, map_location=)",
            replacement=lambda original, component: load_checkpoint,
            used_by="open_clip.task.checkpoint:load_checkpoint" if HAS_TASKS else "open_clip_train.main:main",
            layer=-1,
        ),
        *(() if HAS_TASKS else (DECODE,)),  # later, OpenCLIP itself decodes images alone
    )  # fmt: skip


def load_weights(path: Any, **options: Any) -> Any:
    """Replaces `torch.load` where OpenCLIP loads pretrained weights.

    Raises:
        InputError: the file cannot be read, or has more than tensors, numbers and strings.
    """
    try:
        verify(path)
        return load_plain(path, **options)
    except Exception as error:
        raise InputError(f"pretrained weights: {os.fspath(path)!r} cannot be read: {one_line(error)}") from None
