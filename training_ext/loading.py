"""Reading what others may have written: nothing in a file is executed."""

import os
import zipfile
from collections.abc import Callable
from functools import partial
from typing import Any

import fsspec
import torch

from open_clip_ext.errors import InputError

PAIR_MEMBERS = ("jpg", "png", "jpeg", "webp", "txt")
"""What OpenCLIP takes images and captions from."""


def load_plain(file: Any, **options: Any) -> Any:
    """`torch.load` of plain tensors, numbers and strings, on the CPU; whatever else is in the file is refused.

    Args:
        file: a path or an open file.
        options: of `torch.load`.
    """
    # Said here and not left to the default, which TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD in the environment changes.
    return torch.load(file, **{"map_location": "cpu", **options, "weights_only": True})


def load_mapped(path: str, **options: Any) -> Any:
    """`load_plain` from a local file, whose tensors stay on disk until they are used."""
    # Files of before torch 1.6, which OpenCLIP loads as well, are no zip archives and cannot be mapped.
    return load_plain(path, mmap=zipfile.is_zipfile(path), **options)


def load_resumed(path: str, map_location: Any = "cpu") -> Any:
    """The checkpoint of `--resume`, a path or a URL of fsspec's.

    A local file is mapped: each process of a machine needs its own rows of a table alone, and they share the pages.

    Raises:
        InputError: it cannot be read, or holds more than tensors, numbers and strings.
    """
    try:
        if os.path.isfile(path):
            return load_mapped(path, map_location=map_location)
        with fsspec.open(path, "rb") as file:
            return load_plain(file, map_location=map_location)
    except Exception as error:  # file systems and archives raise whatever they like
        raise InputError(f"--resume: {path!r} is not a complete checkpoint: {one_line(error)}") from None


def load_weights(path: Any, **options: Any) -> Any:
    """In place of `torch.load` where OpenCLIP loads pretrained weights.

    Raises:
        InputError: they cannot be read, or the file holds more than tensors, numbers and strings.
    """
    try:
        return load_plain(path, **options)
    except Exception as error:
        raise InputError(f"pretrained weights: {os.fspath(path)!r} cannot be read: {one_line(error)}") from None


def one_line(error: Exception) -> str:
    """An exception's message on one line."""
    return " ".join(str(error).split())[:200]


def decode_pairs(decode: Callable) -> Callable:
    """webdataset's `decode`, kept to the members that OpenCLIP makes a pair of.

    webdataset decodes every member of a sample by the end of its name, and unpickles `.pyd`, `.pickle` and `.pth`,
    compressed or not. All other members stay the bytes they are.
    """
    return partial(decode, only=PAIR_MEMBERS)


def without_remote_code(tokenizer: Callable) -> Callable:
    """OpenCLIP's `HFTokenizer` for configurations from others, which may name a Python file to import.

    Raises:
        InputError: the configuration asks for that.
    """

    def build(source: Any, *args: Any, trust_remote_code: bool = False, **kwargs: Any) -> Any:
        if trust_remote_code:
            raise InputError(
                f"--model: the tokenizer of {str(source)!r} wants code of its own to be run (trust_remote_code), which "
                "is refused; give a model with a tokenizer of transformers'"
            )
        return tokenizer(source, *args, trust_remote_code=False, **kwargs)

    return build
