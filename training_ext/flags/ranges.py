"""The range of each of OpenCLIP's flags, one row per flag; OpenCLIP itself checks few of them.

Whether a value fits the other flags, this machine or the model is checked in `preflight`, `machine` and `rehearsal`.
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from open_clip_ext.errors import InputError
from open_clip_ext.options import flag_of
from training_ext.flags.params import MOST_EPOCHS
from training_ext.openclip.hosts import TASKS, host

MAX_INT = 2**31 - 1  # C code below Python counts in int32
MAX_SAMPLES = 1 << 50
MAX_FLOAT = 1e30  # so that products with usual values stay within float32


@dataclass(frozen=True)
class Range:
    """The values that a flag may have.

    Args:
        holds: tells whether a value is in range.
        expected: the range in words, to follow "it must be".
    """

    holds: Callable[[Any], bool]
    expected: str


def whole(least: int, most: int = MAX_INT) -> Range:
    return Range(lambda value: least <= value <= most, f"a whole number from {least} to {most}")


def all_of(one: Range, counts: tuple[int, ...], expected: str) -> Range:
    """For a flag that takes several numbers: each in range `one`, and their number in `counts`."""
    return Range(lambda values: len(values) in counts and all(map(one.holds, values)), expected)


POSITIVE = Range(lambda value: 0 < value <= MAX_FLOAT, f"a number > 0, at most {MAX_FLOAT:g}")
NOT_NEGATIVE = Range(lambda value: 0 <= value <= MAX_FLOAT, f"a number >= 0, at most {MAX_FLOAT:g}")
FINITE = Range(lambda value: abs(value) <= MAX_FLOAT, "a number")
BELOW_ONE = Range(lambda value: 0 <= value < 1, "in [0, 1)")
UP_TO_ONE = Range(lambda value: 0 < value <= 1, "in (0, 1]")
GIVEN = Range(bool, "not empty")
SCHEDULES = ("cosine", "const", "const-cooldown")
DIST_IMPLS = ("bidir", "shift", "reduce", "gather")
LOGGERS = ("", "none", "wandb", "tensorboard", "all")

RANGES: dict[str, Range] = {
    # Data
    "imagenet_val": GIVEN,
    "imagenet_v2": GIVEN,
    "train_data_upsampling_factors": GIVEN,
    "train_num_samples": whole(1, MAX_SAMPLES),
    "val_num_samples": whole(1, MAX_SAMPLES),
    "csv_separator": GIVEN,
    "csv_img_key": GIVEN,
    "csv_caption_key": GIVEN,
    "workers": whole(0, 1024),  # each is a process
    "batch_size": whole(1),
    "accum_freq": whole(1),
    # Length and schedule
    "epochs": whole(0, MOST_EPOCHS),
    "warmup": whole(0),
    "lr_scheduler": Range(lambda value: value in SCHEDULES, f"one of {', '.join(SCHEDULES)}"),
    "epochs_cooldown": whole(0),
    "lr_cooldown_end": NOT_NEGATIVE,
    "lr_cooldown_power": POSITIVE,
    # Optimizer
    "opt": Range(lambda value: value.lower() == "adamw" or value.lower().startswith("timm/"), "adamw or timm/NAME"),
    "lr": NOT_NEGATIVE,
    "beta1": BELOW_ONE,
    "beta2": BELOW_ONE,
    "eps": POSITIVE,
    "wd": NOT_NEGATIVE,
    "momentum": BELOW_ONE,
    "grad_clip_norm": Range(POSITIVE.holds, "a number > 0: at 0 every gradient is 0; leave it out not to clip"),
    # Model
    "model": GIVEN,
    "lock_image_unlocked_groups": whole(0),
    "lock_text_unlocked_layers": whole(0),
    "image_mean": all_of(FINITE, (1, 3), "1 or 3 numbers"),
    "image_std": all_of(POSITIVE, (1, 3), "1 or 3 numbers > 0"),
    "force_context_length": whole(2, 2**16),  # room for the tokens of a caption's start and end
    "force_image_size": all_of(whole(1, 2**14), (1, 2), "1 or 2 whole numbers from 1 to 16384"),
    "force_patch_dropout": BELOW_ONE,
    "coca_caption_loss_weight": NOT_NEGATIVE,
    "coca_contrastive_loss_weight": NOT_NEGATIVE,
    # Logs and checkpoints
    "logs": GIVEN,
    "resume": GIVEN,
    "log_every_n_steps": whole(1),
    "save_frequency": whole(0),
    "zeroshot_frequency": whole(0),
    "val_frequency": whole(0),
    "cache_dir": GIVEN,
    "report_to": Range(
        lambda value: all(logger.strip() in LOGGERS for logger in value.split(",")),
        "wandb, tensorboard, wandb,tensorboard or all",
    ),
    "remote_sync": GIVEN,
    "remote_sync_frequency": whole(1),
    # Processes
    "device": GIVEN,
    "dist_url": Range(
        lambda value: value.startswith(("env://", "tcp://", "file://")), "env://, tcp://HOST:PORT or file://PATH"
    ),
    "dist_backend": GIVEN,
    "distill_model": GIVEN,
    "distill_pretrained": GIVEN,
    "use_bnb_linear": GIVEN,
    "loss_dist_impl": Range(lambda value: value in DIST_IMPLS, f"one of {', '.join(DIST_IMPLS)}"),
    # This package's flags that belong to no part of a loss
    "osr_transfer": GIVEN,
    "osr_surrogate": GIVEN,
    "osr_save": GIVEN,
    "osr_load": GIVEN,
    "shard_sizes": GIVEN,
    "same_key": GIVEN,
    "split_rows_above": NOT_NEGATIVE,
    "captions_field": GIVEN,
}
# What OpenCLIP 4.x's task loop takes, instead of the rows above or in addition.
TASK_RANGES: dict[str, Range] = {
    "opt": Range(
        lambda value: value.lower() in ("adamw", "nadamw") or value.lower().startswith("timm/"),
        "adamw, nadamw or timm/NAME",
    ),
    "text_layer_decay": UP_TO_ONE,
    "image_layer_decay": UP_TO_ONE,
}
# For all other numbers, also those of the losses, which have ranges of their own.
FITS = {
    int: Range(lambda value: -(2**63) <= value < 2**63, "of 64 bits"),
    float: Range(lambda value: abs(value) <= MAX_FLOAT, f"a number, at most {MAX_FLOAT:g}"),
}


def check_ranges(args: Namespace) -> None:
    """Raise InputError for the first flag whose value is out of range; None means that it is not given."""
    ranges = RANGES | TASK_RANGES if host().loop == TASKS else RANGES
    for name, value in vars(args).items():
        range_ = ranges.get(name) or FITS.get(type(value))
        if value is not None and range_ is not None and not range_.holds(value):
            shown = " ".join(map(str, value)) if isinstance(value, list) else repr(value)
            raise InputError(f"{shown} is out of range; it must be {range_.expected}", flag_of(name))


# Usual values of the flags that can make numbers overflow; when one overflows, the first flag outside is named.
USUAL: dict[str, Range] = {
    "tau_init": Range(lambda value: value >= 1e-3, "0.01 to 0.1"),
    "tau_start": Range(lambda value: value >= 1e-3, "0.01 to 0.1"),
    "tau_min": Range(lambda value: value >= 1e-3, "0.005 to 0.05"),
    "lr": Range(lambda value: value <= 1e-2, "1e-5 to 1e-3"),
    "wd": Range(lambda value: value <= 1, "0 to 0.2"),
    "lr_tau": Range(lambda value: value <= 1e-2, "1e-5 to 1e-3"),
    "tau_lr": Range(lambda value: value <= 1, "0.01 to 0.05"),
    "npn_lr": Range(lambda value: value <= 10, "0.001 to 1"),
    "amor_lr": Range(lambda value: value <= 0.1, "1e-4 to 1e-2"),
    "rho": Range(lambda value: value <= 100, "5 to 15"),
    "rho_annealed": Range(lambda value: abs(value) <= 100, "-10 to 10"),
    "margin": Range(lambda value: value <= 2, "0 to 1"),
    "consistency": Range(lambda value: value <= 100, "0 to 1"),
    "cyclip_inmodal": Range(lambda value: value <= 100, "0 to 1"),
    "cyclip_crossmodal": Range(lambda value: value <= 100, "0 to 1"),
    "amor_positive_weight": Range(lambda value: value <= 100, "0 to 1"),
    "npn_wd": Range(lambda value: value <= 1, "0"),
    "image_std": Range(lambda values: min(values) >= 1e-2, "0.2 to 0.5"),
    "image_mean": Range(lambda values: max(map(abs, values)) <= 10, "0 to 1"),
    "beta2": Range(lambda value: value >= 0.5, "0.95 to 0.999"),
    "eps": Range(lambda value: value >= 1e-12, "1e-8 to 1e-6"),
    "precision": Range(lambda value: value not in ("fp16", "pure_fp16"), "amp, amp_bf16 or fp32"),
}


def likely_cause(args: Namespace) -> str:
    """What to change after a number was not finite: the end of the error message."""
    for name, usual in USUAL.items():
        value = getattr(args, name)
        if value is not None and not usual.holds(value):
            shown = " ".join(map(str, value)) if isinstance(value, list) else value
            return f"the likely cause is {flag_of(name)} {shown}; usual is {usual.expected}"
    clips = args.grad_clip_norm is not None and args.grad_clip_norm <= 1
    return f"lower --lr ({args.lr:g})" + ("" if clips else ", or give --grad-clip-norm 1.0")
