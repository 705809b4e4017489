"""The line of a failure before the first optimizer step, on which all processes agree.

Most failures are found by `flags.trial`; here are those of data, weights, devices and processes.
"""

import traceback
from argparse import Namespace
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from open_clip_ext.errors import InputError, fault_of_machine, last_line
from open_clip_ext.losses import NonFiniteError
from open_clip_ext.options import flag_of
from training_ext.openclip.loading import one_line

LINE, SEEN = "open_clip_ext/failure", "open_clip_ext/failure_seen"  # keys of the process group's store
PATIENCE = timedelta(seconds=10)  # for process 0, which may be building a large model


@dataclass(frozen=True)
class Phase:
    """What OpenCLIP does before the first step, and the flags that it reads for that.

    Args:
        called: functions that are called for it, as ends of "module.function".
        what: in words, to follow "could not".
        flags: names of the flags; those that were given are in the message.
        hint: a flag that helps with a failed assertion, if it was not given.
    """

    called: str | tuple[str, ...]
    what: str
    flags: tuple[str, ...]
    hint: str | None = None


# The first that is in the traceback counts, so a part stands before the whole.
PHASES = (
    Phase(".init_distributed_device", "start the processes", ("dist_backend", "dist_url", "horovod")),
    Phase(".lock_image_tower", "lock the image tower", ("lock_image", "lock_image_unlocked_groups")),
    Phase(
        ".lock_text_tower", "lock the text tower", ("lock_text", "lock_text_unlocked_layers"),
        hint="lock_text_freeze_layer_norm",
    ),
    Phase(".set_grad_checkpointing", "checkpoint gradients", ("grad_checkpointing",)),
    Phase(
        "open_clip.transform.image_transform", "make the transforms of images",
        ("aug_cfg", "image_mean", "image_std", "image_interpolation", "image_resize_mode", "force_image_size"),
    ),
    Phase(
        ("open_clip.factory.load_checkpoint", "open_clip.factory.load_state_dict"), "load weights",
        ("pretrained", "distill_pretrained"),
    ),
    Phase(".get_tokenizer", "load the tokenizer", ("model", "force_context_length", "cache_dir")),
    Phase(
        ".create_model_and_transforms", "build the model",
        ("model", "pretrained", "distill_model", "distill_pretrained", "precision", "force_image_size",
         "force_context_length", "force_patch_dropout", "force_quick_gelu", "force_custom_text", "pretrained_image",
         "torchscript", "cache_dir"),
    ),  # fmt: skip
    Phase(".trace_model", "trace the model", ("trace",)),
    Phase(
        (".create_optimizer", ".create_optimizer_v2", "torch.optim.adamw.__init__"), "build the optimizer",
        ("opt", "lr", "beta1", "beta2", "eps", "wd", "momentum", "opt_kwargs", "opt_fallback_list", "text_layer_decay",
         "image_layer_decay"),
    ),  # fmt: skip
    Phase((".load_checkpoint", ".load_sharded", ".load_state_dict"), "load the checkpoint", ("resume",)),
    Phase(
        ".get_data", "read the data",
        ("train_data", "val_data", "dataset_type", "train_num_samples", "val_num_samples", "workers",
         "train_data_upsampling_factors", "dataset_resampled", "imagenet_val", "imagenet_v2", "csv_separator"),
    ),  # fmt: skip
    Phase(
        ".train_one_epoch", "make a step",
        ("batch_size", "accum_freq", "precision", "resume", "opt", "opt_kwargs", "lock_image", "lock_text",
         "grad_checkpointing", "lr_scheduler", "torchcompile", "image_mean", "image_std", "force_image_size",
         "force_context_length", "aug_cfg"),
    ),  # fmt: skip
    Phase(".evaluate", "evaluate", ("val_data", "imagenet_val", "imagenet_v2", "zeroshot_data", "precision")),
)

START = Phase("", "start", ())


def in_words(error: BaseException, args: Namespace, flag: str | None = None) -> InputError | NonFiniteError:
    """The line for an error: the flags behind it as they were given, what failed, and the exception.

    Args:
        flag: name of the flag that causes it, if that is known.
    """
    if isinstance(error, InputError | NonFiniteError):
        return error
    if isinstance(error, SystemExit):
        return InputError("OpenCLIP ended before it trained; the reason is in its own output above")
    if (fault := fault_of_machine(error)) is not None:
        return InputError(fault)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    called = [f".{frame.f_globals.get('__name__')}.{frame.f_code.co_name}" for frame in frames]
    phase = next((phase for phase in PHASES if any(name.endswith(phase.called) for name in called)), START)
    ours = frames and frames[-1].f_globals.get("__name__", "").startswith(("training_ext", "open_clip_ext"))
    who = "open_clip_ext" if ours else "OpenCLIP"
    assert isinstance(error, Exception)
    # An assertion often has no text but its own line.
    reason = one_line(error).rstrip(".") or traceback.extract_tb(error.__traceback__)[-1].line
    advice = "" if args.traceback else "; --traceback shows where"
    if phase.hint is not None and isinstance(error, AssertionError) and not getattr(args, phase.hint):
        advice = f"; add {flag_of(phase.hint)}"
    names = phase.flags if flag is None else (flag,)
    flag_values = {flag_of(name): _flag_value(getattr(args, name)) for name in names if name in args.given_flags}
    failed = f"{type(error).__name__}: {reason}{advice}"
    if len(flag_values) == 1:
        ((argument, value),) = flag_values.items()
        return InputError(f"{value}{': ' if value else ''}{who} could not {phase.what}: {failed}", argument)
    flags = " ".join(f"{flag} {value}".rstrip() for flag, value in flag_values.items())
    return InputError(f"{who} could not {phase.what}{f' ({flags})' if flags else ''}: {failed}")


def _flag_value(value: Any) -> str:
    """The value of a flag as it was given; "" for a flag without one."""
    if isinstance(value, dict):
        value = [f"{key}={item}" for key, item in value.items()]
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else "" if value is True else str(value)


def agreed(process_error: InputError | NonFiniteError | None) -> InputError | NonFiniteError | None:
    """The error of the first process that failed; without a group `process_error`, None if another process was lost."""
    if not dist.is_initialized():
        return process_error
    own = None if process_error is None else last_line(process_error)  # a loader worker's has its whole traceback
    try:
        store = _get_default_store()
        if process_error is None and not store.check([LINE]):
            return None
        record = store.compare_set(LINE, "", f"{dist.get_rank()} {own}")
    except Exception:  # process 0, which may keep the store, has ended
        return process_error
    rank, _, line = record.decode().partition(" ")
    return process_error if line == own else InputError(f"{line} (process {rank})")


def acknowledge() -> None:
    """Let no process end before process 0 has removed its files: a launcher then ends all others."""
    if not dist.is_initialized():
        return
    with suppress(Exception):
        if dist.get_rank() == 0:
            _get_default_store().set(SEEN, "")
        else:
            _get_default_store().wait([SEEN], PATIENCE)
