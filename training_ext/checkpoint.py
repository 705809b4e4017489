"""Our state inside OpenCLIP's own checkpoint file.

It is one extra key of the optimizer's state, made of plain tensors, numbers and strings. The model's part of the file
stays as OpenCLIP writes it, so that `open_clip.create_model_and_transforms(..., pretrained=path)` loads it.
"""

import os
from typing import Any, Callable

import torch

from open_clip_ext.errors import InputError
from training_ext.data import DataRows

KEY = "open_clip_ext"
FORMAT = 1


def atomic_save(save: Callable, content: Any, path: Any, *args: Any, **kwargs: Any) -> None:
    """`torch.save` that leaves a complete file or none: a kill while it writes does not touch an older `path`."""
    if not isinstance(path, (str, os.PathLike)):
        return save(content, path, *args, **kwargs)
    partial = f"{os.fspath(path)}.partial"  # not *.pt, which `--resume latest` would pick
    with open(partial, "wb") as file:
        save(content, file, *args, **kwargs)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def make_entry(args, rows: DataRows, loss_state: dict[str, Any]) -> dict[str, Any]:
    """What goes under `KEY`."""
    return {
        "format": FORMAT,
        "loss": args.loss,
        "normalizer": args.normalizer,
        "num_rows": rows.num_rows,
        "data_digest": rows.digest,
        "npn_prototypes": args.npn_prototypes,
        "state": loss_state,
    }


def saves_after(args, completed_epoch: int) -> bool:
    """Whether OpenCLIP writes a checkpoint once `completed_epoch` epochs are done."""
    regular = args.save_frequency > 0 and completed_epoch % args.save_frequency == 0
    kept = bool(args.logs) and args.logs.lower() != "none"
    return kept and (completed_epoch == args.epochs or regular or args.save_most_recent)


def take_entry(checkpoint: Any) -> dict[str, Any] | None:
    """Remove our entry from a loaded checkpoint and return it; None if there is none."""
    optimizer = checkpoint.get("optimizer") if isinstance(checkpoint, dict) else None
    return optimizer.pop(KEY, None) if isinstance(optimizer, dict) else None


def read_entry(path: str) -> tuple[bool, dict[str, Any] | None]:
    """Whether the checkpoint holds a training state, and our entry. Tensors stay on disk.

    Raises:
        InputError: the file is missing or not a complete checkpoint.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise InputError(f"--resume: {path!r} does not exist") from None
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"--resume: {path!r} is not a complete checkpoint: {reason}") from None
    return isinstance(checkpoint, dict) and "epoch" in checkpoint, take_entry(checkpoint)


def check_entry(entry: dict[str, Any] | None, path: str, args, rows: DataRows | None) -> None:
    """Raise InputError unless training with `args` can go on from a checkpoint with this entry."""
    instead = "give --pretrained PATH to start from its weights only"
    if entry is None:
        if args.uses_ext_loss:
            raise InputError(f"--resume: {path!r} was not trained with --loss {args.loss}; {instead}")
        return
    if entry["format"] > FORMAT:
        raise InputError(f"--resume: {path!r} was written by a newer open_clip_ext (format {entry['format']})")
    if entry["loss"] != args.loss or entry["normalizer"] != args.normalizer:
        saved = f"--loss {entry['loss']} --normalizer {entry['normalizer']}"
        raise InputError(f"--resume: {path!r} was trained with {saved}, not --loss {args.loss}; {instead}")
    if entry["npn_prototypes"] != args.npn_prototypes:
        raise InputError(
            f"--npn-prototypes: {args.npn_prototypes} where {path!r} has {entry['npn_prototypes']}; give that number"
        )
    if rows is not None and (entry["num_rows"], entry["data_digest"]) != (rows.num_rows, rows.digest):
        raise InputError(
            f"--resume: {path!r} was trained on other data ({entry['num_rows']} rows; --train-data has "
            f"{rows.num_rows}, or the same number of other samples); {instead}"
        )
