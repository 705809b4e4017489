"""The summary at the end of a training: best and last metrics, duration, and the next commands."""

import logging
import os
import shlex
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from open_clip_ext import factory
from open_clip_ext.losses import AmorLIPLoss
from open_clip_ext.metrics_file import EVAL, read_metrics
from open_clip_ext.options import flag_of
from training_ext.core.component import Component
from training_ext.data.keys import has_keys
from training_ext.data.metrics import COUNTS, duration, smaller_is_better, uncertainty

CSV_FLAGS = ("csv_separator", "csv_img_key", "csv_caption_key")
SHOWN = ("R@1", "top1", "clip_val_loss", "balanced")  # metrics whose names end so


class Summary(Component):
    """Logs the summary on process 0."""

    name = "summary"
    layer = 20  # after what others say at the end

    def __init__(self, args: Namespace):
        super().__init__(args)
        self._began = time.monotonic()
        self._trained = False

    def begin(self, resumed: bool) -> None:
        self._trained = True

    def end(self, completed: bool) -> None:
        if completed and self._trained and self.args.loss is not None and self.args.save_logs:
            for line in summary(self.args, time.monotonic() - self._began):
                logging.info(line)


def summary(args: Namespace, seconds: float) -> Iterator[str]:
    """Lines of the summary, for the log of process 0.

    Args:
        args: the command line, completed by OpenCLIP.
        seconds: duration of this run.
    """
    folder = os.path.join(args.logs, args.name)
    yield f"Done: {args.epochs} epoch(s) of {args.loss}; this run took {duration(seconds)}"
    yield from _metrics(read_metrics(folder, EVAL))
    yield "Next:"
    module, given = "  python -m open_clip_ext", shlex.quote(f"{folder}/checkpoints/epoch_{args.epochs}.pt")
    yield f"{module}.evaluate --checkpoint {given} {_data(args)} --out scores.jsonl"
    is_installed = factory.is_installed(args.loss)
    if is_installed and has_report(args):
        yield f"{module}.normalizers_report --checkpoint {given}"
    recipe = shlex.quote(os.path.join(folder, "recipe.yaml"))
    command = f"{module}.main --recipe {recipe}" if is_installed else "  the command of this run, with"
    where = f"--logs {shlex.quote(args.logs)} --name {shlex.quote(args.name)}"
    yield f"{command} {where} --resume latest --epochs N  (to train on, N > {args.epochs})"
    if not args.skip_scheduler:
        yield "  (--lr then follows its schedule over all N epochs and rises again; lengths in the recipe stay)"


def _data(args: Namespace) -> str:
    """The evaluation's flags for the data that the training was evaluated on; a placeholder if there are none."""
    names = ["zeroshot_data"]
    if args.dataset_type != "shapes" and args.val_data:
        names += ["val_data", *(name for name in CSV_FLAGS if name in args.given_flags)]
    given = {name: getattr(args, name, None) for name in names}
    flags = [f"{flag_of(name)} {shlex.quote(value)}" for name, value in given.items() if value]
    return " ".join(flags) or "--data FOLDER"


def has_report(args: Namespace) -> bool:
    """Whether `normalizers_report` accepts checkpoints of this training."""
    is_amorlip = issubclass(factory.find_preset(args.loss).loss or object, AmorLIPLoss)
    return not (is_amorlip or has_keys(args) or getattr(args, "reference_gap", None))


def _metrics(lines: list[dict[str, Any]]) -> Iterator[str]:
    names = [name for name in (lines[-1] if lines else {}) if name.endswith(SHOWN) and name not in COUNTS]
    if names:
        yield f"{'':24}{'last':>10}{'best':>10}  after epoch  std. error    chance"
    for name in names:
        last = "not finite" if lines[-1][name] is None else f"{lines[-1][name]:.4f}"
        sign = 1 if smaller_is_better(name) else -1
        more = ""
        if found := [(sign * line[name], line["epoch"]) for line in lines if line.get(name) is not None]:
            best, epoch = min(found)  # the earliest of equal ones
            errors = uncertainty(name, lines[-1]) or ()
            more = f"{sign * best:>10.4f}{epoch:>13}"
            more += "".join(f"{value:>{width}.4f}" for value, width in zip(errors, (12, 10), strict=False))
        yield f"{name:24}{last:>10}{more}"
