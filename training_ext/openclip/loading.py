"""Read files that others may have written, without executing anything in them."""

import logging
import os
import pickle
import re
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

import fsspec
import numpy as np
import open_clip
import torch

from open_clip_ext.errors import InputError, one_line
from training_ext.core.patching import replaced
from training_ext.core.plan import world_info
from training_ext.openclip.hosts import taken

PAIR_MEMBERS = ("jpg", "png", "jpeg", "webp", "txt")
"""Suffixes of the members of a sample from which OpenCLIP reads image and caption."""
CAPTIONING = "multimodal_cfg"
"""The key of a captioning part, as of CoCa, in a model's configuration."""


def suffixes_of(sample: dict) -> str:
    """The suffixes of a sample, a dict by suffix, for messages."""
    names = [f".{name}" for name in sample if not name.startswith("__")]
    if len(names) <= MOST_NAMED:
        return ", ".join(names)
    num_unnamed = len(names) - MOST_NAMED
    return f"{', '.join(names[:MOST_NAMED])} and {num_unnamed} others, as a sample's key ends at its first dot"


def missing_of(sample: dict, no_caption: str = "no caption .txt") -> str | None:
    """What a sample, a dict by suffix, lacks to be a pair, and what it has instead, for messages; None if it is one.

    `no_caption` is what it lacks if it has no "txt".
    """
    *images, text = PAIR_MEMBERS
    has_image = any(name in sample for name in images)
    if text in sample and has_image:
        return None
    lacks = f"no image .{', .'.join(images)}" if text in sample else no_caption
    suffixes = suffixes_of(sample)
    if has_image and "json" in sample:
        advice = "" if "(--" in lacks else "; name the field of captions in it by --captions-field"
        return f"{lacks} but {suffixes}{advice}"
    return (
        f"{lacks} but {suffixes}; the files of a pair must stand next to each other in a shard, and not as links "
        "(tar --sort=name --hard-dereference)"
    )


MOST_NAMED = 10  # suffixes in a message
CHUNK = 2**20  # bytes
UNPICKLER, UNKNOWN = "WeightsUnpickler error: ", re.compile(r"Unsupported global: GLOBAL (\S+)")  # in torch's messages


class NumberType:
    """Stands for `numpy.dtype` in a checkpoint's pickle."""

    order = "<"

    def __init__(self, code: str, *_: Any):
        self.code = code

    def __setstate__(self, state: tuple) -> None:
        self.order = state[1]


def number(kind: NumberType, data: bytes) -> bool | int | float:
    """Stands for the function `scalar` of NumPy's, and gives a number of Python's."""
    if not re.fullmatch(r"[<>|][fiub][1248]", kind.order + kind.code):
        raise pickle.UnpicklingError(f"it contains a NumPy scalar of type {kind.code!r}, which is not a number")
    return np.frombuffer(data, kind.order + kind.code, 1)[0].item()


# OpenCLIP before 2.30 saved learning rates that NumPy had computed.
NUMBERS: list[Any] = [
    (NumberType, "numpy.dtype"), (number, "numpy.core.multiarray.scalar"), (number, "numpy._core.multiarray.scalar"),
]


def load_plain(file: Any, **options: Any) -> Any:
    """`torch.load` of plain tensors, numbers and strings, on the CPU; a file with anything else is refused."""
    try:
        with torch.serialization.safe_globals(NUMBERS):
            # Explicit, since TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD in the environment changes the default.
            return torch.load(file, **{"map_location": "cpu", **options, "weights_only": True})
    except pickle.UnpicklingError as error:
        reason = str(error).rpartition(UNPICKLER)[2].strip().partition("\n")[0]
        if unknown := UNKNOWN.match(reason):
            reason = f"it contains {unknown[1]}, which is neither a tensor, a number nor a string"
        raise pickle.UnpicklingError(reason) from None


def load_mapped(path: str, **options: Any) -> Any:
    """`load_plain` from a local file, whose tensors stay on disk until they are used."""
    # Files from before torch 1.6, which OpenCLIP loads, too, are not zip archives and cannot be mapped.
    return load_plain(path, mmap=zipfile.is_zipfile(path), **options)


def load_verified(path: str, **options: Any) -> Any:
    """`load_mapped`, once the file's checksums are verified: one changed bit would be trained on in silence."""
    verify(path)
    return load_mapped(path, **options)


def verify(path: str) -> None:
    """Raise ValueError that names a damaged record of a local checkpoint; the first process of each machine looks."""
    if world_info()[0] == 0:
        stat = os.stat(path)
        _verify(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=16)
def _verify(path: str, mtime_ns: int, size: int) -> None:
    """Verify a file, again when it changes."""
    with open(path, "rb") as file:
        verify_records(file)


def verify_records(file: Any) -> None:
    """Compare the checksums of an open checkpoint's records with their bytes, which are read in pieces.

    Raises:
        ValueError: a record is damaged.
    """
    if not zipfile.is_zipfile(file):  # from before torch 1.6, without checksums
        return
    with zipfile.ZipFile(file) as archive:
        for record in archive.infolist():
            if record.CRC == 0:  # torch can be told to compute none
                continue
            try:
                with archive.open(record) as content:
                    while content.read(CHUNK):
                        pass
            except Exception as error:  # where a bit of a header has changed, it may be anything
                raise ValueError(f"its record {record.filename!r} is damaged: {one_line(error)}") from None


def load_checkpoint(path: str, flag: str = "--resume", map_location: Any = "cpu") -> Any:
    """Load a checkpoint from a path or a URL for fsspec.

    A local file is memory-mapped, since each process needs only its own rows of a table.

    Raises:
        InputError: it does not exist, is not complete, or has more than tensors, numbers and strings.
    """
    try:
        if os.path.isfile(path):
            return load_verified(path, map_location=map_location)
        with fsspec.open(path, "rb") as file:
            if world_info()[0] == 0:
                verify_records(file)
                file.seek(0)
            return load_plain(file, map_location=map_location)
    except FileNotFoundError:
        raise InputError(f"{path!r} does not exist", flag) from None
    except Exception as error:  # file systems and archives may raise anything
        raise InputError(f"{path!r} is not a complete checkpoint: {one_line(error)}", flag) from None


@contextmanager
def without_warnings() -> Iterator[None]:
    """No log lines up to warnings within the block: OpenCLIP warns of settings that do not matter there."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(level)


warn_once = cache(logging.warning)  # of data, which a run may look at several times


@contextmanager
def collected_warnings() -> Iterator[None]:
    """Keep the warnings of a block where a run begins until OpenCLIP has set up the log, see `take_warnings`."""
    warn_once.cache_clear()
    with logged(logging.WARNING) as messages:
        yield
    _collected[:] = messages


_collected: list[str] = []


def take_warnings() -> list[str]:
    """The warnings of `collected_warnings`, once."""
    messages = list(_collected)
    _collected.clear()
    return messages


@contextmanager
def logged(level: int) -> Iterator[list[str]]:
    """The messages of at least this level that are logged within the block; all are shown nowhere else."""
    messages: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    before, logging.root.handlers = logging.root.handlers, [handler]
    try:
        yield messages
    finally:
        logging.root.handlers = before


def known_config(model: str) -> dict[str, Any] | None:
    """OpenCLIP's configuration of a model by name, also with a slash; None if it is unknown or must be downloaded."""
    return None if ":" in model else _config(model.replace("/", "-"))


def _config(model: str) -> Any:
    """A configuration whose tokenizer is in text_cfg; MaMMUT's, of OpenCLIP's main, is in multimodal_cfg."""
    config = open_clip.get_model_config(model)
    return config and {"text_cfg": config.get(CAPTIONING, {}), **config}


def beyond_towers(model: str) -> str | None:
    """The key in a model's configuration of what it has beside, or for, an image and a text tower; None: nothing."""
    config = known_config(model) or ([CAPTIONING] if "coca" in model.lower() else [])
    return next((key for key in (CAPTIONING, "genlip_cfg", "genlap_cfg", "audio_cfg") if key in config), None)


def load_tokenizer(args: Namespace) -> Any:
    """The model's tokenizer; None if that needs a download."""
    if args.model.startswith("hf-hub:"):
        return None
    config = _config(args.model if ":" in args.model else args.model.replace("/", "-"))
    name = config["text_cfg"].get("hf_tokenizer_name")
    if name and not args.model.startswith("local-dir:") and not os.path.exists(name):
        return None
    options = taken(open_clip.get_tokenizer, cache_dir=args.cache_dir, context_length=args.force_context_length)
    with replaced({("open_clip.factory", "HFTokenizer"): without_remote_code(open_clip.factory.HFTokenizer)}):
        return open_clip.get_tokenizer(args.model, **options)


def without_remote_code(tokenizer: Callable) -> Callable:
    """OpenCLIP's `HFTokenizer` for configurations from others, which may ask to run Python code of their own.

    The function returned raises InputError for such a configuration, and if the tokenizer cannot be loaded.
    """
    def build(source: Any, *args: Any, trust_remote_code: bool = False, **kwargs: Any) -> Any:
        if trust_remote_code:
            raise InputError(
                f"the tokenizer of {str(source)!r} needs code of its own (trust_remote_code), which is "
                "refused; give a model with a tokenizer of transformers",
                "--model",
            )
        try:
            return tokenizer(source, *args, trust_remote_code=False, **kwargs)
        except Exception as error:  # transformers may raise anything
            reason = one_line(error).rstrip(".") or repr(error)
            raise InputError(
                f"the tokenizer {str(source)!r} (hf_tokenizer_name) cannot be loaded: {reason}; give a folder "
                "or a model of the hub that has one",
                "--model",
            ) from None

    return build
