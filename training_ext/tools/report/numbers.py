"""Errors of a checkpoint's estimated log-normalizers, against the true ones over all train data.

The measure is that of NeuCLIP, Eq. 9 and Appendix B.6. For a random sample of anchors the true log-normalizers over all
embedded rows are compared with the checkpoint's estimates for the same embeddings and with minibatch estimates, all at
the checkpoint's temperature, eps and surrogate. `mixing` is part of the loss, not of the estimator, and is not applied.
"""

import math
import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from open_clip_ext.diagnostics import exact
from open_clip_ext.distributed import all_gather_object
from open_clip_ext.losses import GlobalContrastiveLoss
from open_clip_ext.normalizers import BatchNormalizer
from training_ext.core.plan import global_batch
from training_ext.tools.report.embeddings import Embedded
from training_ext.tools.report.inputs import Saved, batch_sizes
from training_ext.tools.report.objective import Objective
from training_ext.tools.report.verdict import verdict

STEP = 0.01  # half of the relative difference of two temperatures for a derivative
SIDES = ("image", "text")
SEED = 0  # of anchors and batches


@dataclass
class Result:
    """The numbers of a report.

    Args:
        summary: the contents of the JSON file.
        values: by name, each anchor's row (k,), true log-normalizer and estimates, (2, k) float64; NaN where an
            estimator has none.
    """

    summary: dict[str, Any]
    values: dict[str, Tensor]


@torch.no_grad()
def compare(
    options: Namespace, args: Namespace, num_rows: int, saved: Saved, loss: GlobalContrastiveLoss | None,
    embedded: Embedded,
) -> Result:
    """True and estimated log-normalizers of a random sample of anchors; the same on every process.

    Args:
        num_rows: rows of the data set, of which `embedded` has those that could be read.
    """
    num_read = len(embedded.rows)
    sizes = batch_sizes(options, args, num_read)
    draw_anchors = torch.Generator().manual_seed(SEED)
    places = torch.randperm(num_read, generator=draw_anchors)[: options.anchors].sort().values
    objective = Objective(loss, embedded, torch.tensor(saved.tau, dtype=torch.float32, device=args.device))
    true = in_parts(objective.exact, places, args, "Exact")
    trained_with = min(max(global_batch(args), 2), num_read)
    global_loss = None if loss is None or isinstance(loss.normalizer, BatchNormalizer) else loss
    minibatch = {
        size: in_parts(
            partial(objective.minibatch, batch_size=size, seed=SEED), places, args, f"Batches of {size}",
            unit=exact.group_size(size),
        )
        for size in sorted({*sizes, *([] if global_loss is None else [trained_with])})
    }
    estimates = {f"batch of {size}": minibatch[size] for size in sizes}
    if global_loss is not None:
        alpha = objective.estimates(global_loss, places, minibatch[trained_with], trained_with)
        estimates = {global_loss.normalizer.name: alpha, **estimates}
    tau, surrogate = objective.tau_of(places).cpu(), objective.surrogate
    summary = {
        "checkpoint": os.path.abspath(options.checkpoint),
        "epoch": saved.epoch,
        "model": args.model,
        "rows": num_rows,
        "rows_left_out": num_rows - num_read,
        "first_problem": embedded.problem,
        "anchors": len(places),
        "loss": args.loss or ("siglip" if args.siglip else "clip"),
        "normalizer": None if loss is None else loss.normalizer.name,
        "temperature": None if loss is None else loss.temperature.name,
        "tau": {side: mean_and_std(tau[i]) for i, side in enumerate(SIDES)} if tau.dim() else tau.item(),
        "eps": objective.eps,
        "surrogate": surrogate.name,
        **{option.name: getattr(args, option.name) for option in surrogate.options},
        "negatives": "cross" if loss is None else loss.negatives,
        "mixing": 0.0 if loss is None else loss.mixing,
        "estimators": [{"name": name, **errors(value, true)} for name, value in estimates.items()],
    }
    summary["verdict"] = verdict(summary)
    if options.taus:
        exact_at = partial(in_parts, objective.exact, places, args, "Exact, other tau")
        summary["rho_of_tau"] = [{"tau": tau, "rho": resting_rho(exact_at, tau)} for tau in options.taus]
    return Result(summary, {"anchors": embedded.rows[places], "exact": true, **estimates})


def resting_rho(exact_at: Callable[..., Tensor], tau: float) -> float:
    """The rho at which `LearnableTemperature` rests at tau: - d/dtau of tau * log(eps + g), mean over the anchors.

    Args:
        exact_at: true log-normalizers of the anchors, (2, k), by temperature, 0-d.
    """
    low, high = ((1 - STEP) * tau, (1 + STEP) * tau)
    below, above = (one * exact_at(tau=torch.tensor(one)).mean().item() for one in (low, high))
    return (below - above) / (high - low)


def in_parts(
    function: Callable, places: Tensor, args: Namespace, label: str, unit: int = 1, **more: Any
) -> Tensor:
    """Apply a function of `Objective` to all anchors, divided over processes; (2, k) float64 on the CPU.

    Args:
        label: label of the progress bar.
        unit: number of consecutive anchors that one process must compute together.
    """
    units = math.ceil(len(places) / unit)
    start, stop = (unit * (units * rank // args.world_size) for rank in (args.rank, args.rank + 1))
    local_places, values = places[start:stop], torch.empty(2, 0, dtype=torch.float64)
    if len(local_places):
        with tqdm(total=len(local_places), desc=label, unit=" anchors", unit_scale=True, disable=args.rank != 0) as bar:
            values = function(local_places, progress=bar.update, **more).cpu()
    return torch.cat(all_gather_object(values), dim=1)


def mean_and_std(values: Tensor) -> dict[str, float]:
    values = values.double()
    return {"mean": values.mean().item(), "std": values.std(correction=0).item()}


def errors(estimate: Tensor, true: Tensor) -> dict[str, Any]:
    """Errors for images, texts and both as anchors.

    `mse`; `bias` and `spread`, the mean and standard deviation of estimate - true, so that mse = bias^2 + spread^2; the
    number of `anchors` with an estimate and of those `without_estimate`. None if no anchor has one.

    Args:
        estimate, true: (2, k) float64.
    """
    image, text = estimate - true
    return {"image": error_of(image), "text": error_of(text), "both": error_of(torch.cat([image, text]))}


def error_of(difference: Tensor) -> dict[str, Any]:
    estimated = difference[~difference.isnan()]
    counts = {"anchors": len(estimated), "without_estimate": len(difference) - len(estimated)}
    if len(estimated) == 0:
        return {**counts, "mse": None, "bias": None, "spread": None}
    shape = mean_and_std(estimated)
    return {**counts, "mse": estimated.square().mean().item(), "bias": shape["mean"], "spread": shape["std"]}
