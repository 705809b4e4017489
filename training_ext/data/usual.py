"""Usual values of the flags that can make numbers overflow or keep a model from learning, to name a likely cause."""

from argparse import Namespace
from collections.abc import Iterator
from math import inf
from typing import Any

from open_clip_ext.options import flag_of

USUAL: dict[str, tuple[float, float, str]] = {  # the least and largest, and the usual in words
    "tau_init": (1e-3, inf, "0.01 to 0.1"),
    "tau_start": (1e-3, inf, "0.01 to 0.1"),
    "tau_min": (1e-3, inf, "0.005 to 0.05"),
    "lr": (0, 1e-2, "1e-5 to 1e-3"),
    "wd": (0, 1, "0 to 0.2"),
    "lr_tau": (0, 1e-2, "1e-5 to 1e-3"),
    "tau_lr": (0, 1, "0.01 to 0.05"),
    "npn_lr": (0, 10, "0.001 to 1"),
    "amor_lr": (0, 0.1, "1e-4 to 1e-2"),
    "rho": (0, 100, "5 to 15"),
    "margin": (0, 2, "0 to 1"),
    "image_std": (1e-2, inf, "0.2 to 0.5"),
    "image_mean": (-10, 10, "0 to 1"),
    "beta2": (0.5, 1, "0.95 to 0.999"),
    "eps": (1e-12, inf, "1e-8 to 1e-6"),
}


def unusual(args: Namespace, steps: int | None = None) -> Iterator[str]:
    """The flags whose values are far from the usual, each with its value and the usual.

    Args:
        steps: of the training, if known: a short one needs a high rate of the temperature.
    """
    for name, (low, high, usual) in USUAL.items():
        if name == "lr_tau" and steps:
            high = max(high, 2 / steps)
        value: Any = getattr(args, name)
        if name == "lr" and getattr(args, "opt", "adamw") != "adamw":  # another optimizer's has another scale
            continue
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(low <= value <= high for value in values):
            yield f"{flag_of(name)} {' '.join(map(str, values))}; usual is {usual}"


def likely_cause(args: Namespace) -> str:
    """What to change after a number was not finite: the end of the error message."""
    for flag in unusual(args):
        return f"the likely cause is {flag}"
    if args.precision in ("fp16", "pure_fp16"):
        return f"the likely cause is --precision {args.precision}; usual is amp, amp_bf16 or fp32"
    clips = args.grad_clip_norm is not None and args.grad_clip_norm <= 1
    return f"lower --lr ({args.lr:g})" + ("" if clips else ", or give --grad-clip-norm 1.0")
