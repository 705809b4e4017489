"""Usual values of the flags that can make numbers overflow; when one overflows, the first flag outside is named."""

from argparse import Namespace
from collections.abc import Callable
from typing import Any, NamedTuple

from open_clip_ext.options import flag_of


class Usual(NamedTuple):
    """Whether a value is usual, and the usual ones in words."""

    holds: Callable[[Any], bool]
    expected: str


USUAL: dict[str, Usual] = {
    "tau_init": Usual(lambda value: value >= 1e-3, "0.01 to 0.1"),
    "tau_start": Usual(lambda value: value >= 1e-3, "0.01 to 0.1"),
    "tau_min": Usual(lambda value: value >= 1e-3, "0.005 to 0.05"),
    "lr": Usual(lambda value: value <= 1e-2, "1e-5 to 1e-3"),
    "wd": Usual(lambda value: value <= 1, "0 to 0.2"),
    "lr_tau": Usual(lambda value: value <= 1e-2, "1e-5 to 1e-3"),
    "tau_lr": Usual(lambda value: value <= 1, "0.01 to 0.05"),
    "npn_lr": Usual(lambda value: value <= 10, "0.001 to 1"),
    "amor_lr": Usual(lambda value: value <= 0.1, "1e-4 to 1e-2"),
    "rho": Usual(lambda value: value <= 100, "5 to 15"),
    "rho_annealed": Usual(lambda value: abs(value) <= 100, "-10 to 10"),
    "margin": Usual(lambda value: value <= 2, "0 to 1"),
    "consistency": Usual(lambda value: value <= 100, "0 to 1"),
    "cyclip_inmodal": Usual(lambda value: value <= 100, "0 to 1"),
    "cyclip_crossmodal": Usual(lambda value: value <= 100, "0 to 1"),
    "amor_positive_weight": Usual(lambda value: value <= 100, "0 to 1"),
    "npn_wd": Usual(lambda value: value <= 1, "0"),
    "image_std": Usual(lambda values: min(values) >= 1e-2, "0.2 to 0.5"),
    "image_mean": Usual(lambda values: max(map(abs, values)) <= 10, "0 to 1"),
    "beta2": Usual(lambda value: value >= 0.5, "0.95 to 0.999"),
    "eps": Usual(lambda value: value >= 1e-12, "1e-8 to 1e-6"),
    "precision": Usual(lambda value: value not in ("fp16", "pure_fp16"), "amp, amp_bf16 or fp32"),
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
