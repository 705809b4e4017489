"""Errors of a checkpoint's estimated log-normalizers, against the true ones over all train data.

The measure is that of NeuCLIP, Eq. 9 and Appendix B.6. The train data are embedded once with the checkpoint's weights,
without augmentation. For a random sample of anchors the true log-normalizers are computed over all rows and compared
with the checkpoint's estimates for the same embeddings and with minibatch estimates, all at the checkpoint's
temperature, eps and surrogate. `mixing` is part of the loss, not of the estimator, and is not applied. `gradients`
compares the resulting gradients.
"""

import math
import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from open_clip_ext.diagnostics import exact
from open_clip_ext.diagnostics.embeddings import full_precision
from open_clip_ext.errors import InputError
from open_clip_ext.losses import GlobalContrastiveLoss
from open_clip_ext.normalizers import BatchNormalizer, Queue
from training_ext.report.embeddings import Embedded
from training_ext.report.gradients import compare_gradients
from training_ext.report.inputs import Job, Saved
from training_ext.report.objective import Objective
from training_ext.report.queues import nearest_places, queue_without
from training_ext.report.verdict import verdict

QUANTILES = (5, 50, 95)
STEP = 0.01  # half of the relative difference of two temperatures for a derivative
SIDES = ("image", "text")
ESTIMATED_AT_ONCE = 1024  # anchors


@dataclass
class Result:
    """The numbers of a report.

    Args:
        summary: the contents of the JSON file.
        anchors: rows of the anchors, (k,).
        exact: true log-normalizers, (2, k) float64.
        estimates: by estimator, (2, k) float64; NaN where it has no estimate.
    """

    summary: dict[str, Any]
    anchors: Tensor
    exact: Tensor
    estimates: dict[str, Tensor]


@torch.no_grad()
def compare(
    options: Namespace, args: Namespace, job: Job, saved: Saved, loss: GlobalContrastiveLoss | None, embedded: Embedded
) -> Result:
    """True and estimated log-normalizers of a random sample of anchors; the same on every process."""
    num_read = len(embedded.rows)
    sizes = [size for size in job.sizes if size <= num_read]
    if len(sizes) < len(job.sizes) and options.batch_sizes is not None:
        raise InputError(f"{job.sizes[-1]} is more than the {num_read} rows that can be read", "--batch-sizes")
    draw_anchors = torch.Generator().manual_seed(options.report_seed)
    places = torch.randperm(num_read, generator=draw_anchors)[: options.anchors].sort().values
    saved_tau = torch.tensor(saved.tau, dtype=torch.float32, device=args.device)
    objective = Objective.of(loss, embedded, saved_tau)
    true_of = partial(objective.exact, chunk_mib=options.chunk_mib)
    true = in_parts(true_of, places, args, "Exact")
    trained_with = min(max(job.trained_with, 2), num_read)
    has_estimator = loss is not None and not isinstance(loss.normalizer, BatchNormalizer)
    minibatch = {
        size: in_parts(
            partial(objective.minibatch, batch_size=size, seed=options.report_seed), places, args,
            f"Batches of {size}", unit=exact.group_size(size),
        )
        for size in sorted({*sizes, *([trained_with] if has_estimator else [])})
    }
    estimates = {f"batch of {size}": minibatch[size] for size in sizes}
    if loss is not None and has_estimator:
        own = checkpoint_estimate(loss, objective, places, minibatch[trained_with], trained_with)
        estimates = {loss.normalizer.name: own, **estimates}
    summary = {
        "checkpoint": os.path.abspath(options.checkpoint),
        "epoch": saved.epoch,
        "model": args.model,
        "rows": embedded.num_rows,
        "rows_left_out": embedded.num_rows - num_read,
        "first_problem": embedded.problem,
        "anchors": len(places),
        "seed": options.report_seed,
        **settings(args, loss, objective, places),
        "exact": {side: spread_of(true[i]) for i, side in enumerate(SIDES)},
        "estimators": [{"name": name, **errors(value, true)} for name, value in estimates.items()],
    }
    summary["verdict"] = verdict(summary)
    if options.taus:
        summary["rho_of_tau"] = [
            {"tau": tau, "rho": resting_rho(partial(in_parts, true_of, places, args, f"Exact, tau {tau:g}"), tau)}
            for tau in options.taus
        ]
    if options.gradient_batches > 0:
        all_true = in_parts(true_of, torch.arange(num_read), args, "Exact, all")
        summary["gradients"] = compare_gradients(options, args, sizes, loss, objective, all_true)
    return Result(summary, embedded.rows[places], true, estimates)


def resting_rho(exact_at: Callable[..., Tensor], tau: float) -> float:
    """The rho at which `LearnableTemperature` rests at tau: - d/dtau of tau * log(eps + g), mean over the anchors.

    Args:
        exact_at: true log-normalizers of the anchors, (2, k), by temperature, 0-d.
    """
    low, high = ((1 - STEP) * tau, (1 + STEP) * tau)
    below, above = (one * exact_at(tau=torch.tensor(one)).mean().item() for one in (low, high))
    return (below - above) / (high - low)


def in_parts(
    function: Callable, places: Tensor, args: Namespace, what: str, unit: int = 1, **more: Any
) -> Tensor:
    """Apply a function of `Objective` to all anchors, divided over processes; (2, k) float64 on the CPU.

    Args:
        what: label of the progress bar.
        unit: number of consecutive anchors that one process must compute together.
    """
    units = math.ceil(len(places) / unit)
    start, stop = (unit * (units * rank // args.world_size) for rank in (args.rank, args.rank + 1))
    own, values = places[start:stop], torch.empty(2, 0, dtype=torch.float64)
    if len(own):
        with tqdm(total=len(own), desc=what, unit=" anchors", unit_scale=True, disable=args.rank != 0) as bar:
            values = function(own, progress=bar.update, **more).cpu()
    if not args.distributed:
        return values
    parts: list[Any] = [None] * args.world_size
    dist.all_gather_object(parts, values)
    return torch.cat(parts, dim=1)


def checkpoint_estimate(
    loss: GlobalContrastiveLoss, objective: Objective, places: Tensor, minibatch: Tensor, batch_size: int
) -> Tensor:
    """alpha of all anchors from the checkpoint's normalizer, (2, k) float64; NaN where it has no estimate.

    Every process computes all of them in the same order, since a normalizer may communicate.

    Args:
        minibatch: the anchors' L in batches of `batch_size`, the training's, (2, k), for normalizers that make use of
            it.
    """
    step, queued = ESTIMATED_AT_ONCE, nearest_places(loss.normalizer, objective)
    if queued is not None:
        step = min(step, batch_size)
    parts = []
    with full_precision():
        for some, own in zip(places.split(step), minibatch.split(step, dim=1), strict=True):
            normalizer = loss.normalizer
            if queued is not None and isinstance(normalizer, Queue):
                normalizer = queue_without(normalizer, torch.isin(queued, some))
            own = own.to(objective.tau)
            batch = objective.at(some).batch(own.new_full(own.shape, math.nan))
            alone = normalizer(batch)  # NaN where it uses the batch's own estimate: beside one of its own, or for none
            batch.all_log_batch = own
            alpha = normalizer(batch)
            parts.append(alpha.where((alpha != own) | ~alone.isnan(), math.nan).double().cpu())
    return torch.cat(parts, dim=1)


def settings(
    args: Namespace, loss: GlobalContrastiveLoss | None, objective: Objective, places: Tensor
) -> dict[str, Any]:
    """The settings that the normalizers depend on, for the JSON file."""
    tau, surrogate = objective.tau_of(places).cpu(), objective.surrogate
    shown = {
        "loss": args.loss or ("siglip" if args.siglip else "clip"),
        "normalizer": None if loss is None else loss.normalizer.name,
        "temperature": None if loss is None else loss.temperature.name,
        "tau": {side: spread_of(tau[i]) for i, side in enumerate(SIDES)} if tau.dim() else tau.item(),
        "eps": objective.eps,
        "surrogate": surrogate.name,
        "negatives": "cross" if loss is None else loss.negatives,
        "mixing": 0.0 if loss is None else loss.mixing,
        "mixing_applied": False,
    }
    return shown | {option.name: getattr(args, option.name) for option in surrogate.options}


def spread_of(values: Tensor) -> dict[str, Any]:
    """Mean, standard deviation and quantiles of values (k,)."""
    values = values.double()
    found = values.quantile(torch.tensor(QUANTILES, dtype=torch.float64) / 100).tolist()
    quantiles = {str(name): value for name, value in zip(QUANTILES, found, strict=True)}
    return {"mean": values.mean().item(), "std": values.std(correction=0).item(), "quantiles": quantiles}


def errors(estimate: Tensor, true: Tensor) -> dict[str, Any]:
    """Errors for images, texts and both as anchors.

    `mse`; `bias` and `spread`, the mean and standard deviation of estimate - true, so that mse = bias^2 + spread^2; its
    `quantiles`; the number of `anchors` with an estimate and of those `without_estimate`. None if no anchor has one.

    Args:
        estimate, true: (2, k) float64.
    """
    image, text = estimate - true
    return {"image": error_of(image), "text": error_of(text), "both": error_of(torch.cat([image, text]))}


def error_of(difference: Tensor) -> dict[str, Any]:
    known = difference[~difference.isnan()]
    counts = {"anchors": len(known), "without_estimate": len(difference) - len(known)}
    if len(known) == 0:
        return {**counts, "mse": None, "bias": None, "spread": None, "quantiles": None}
    shape = spread_of(known)
    mse = known.square().mean().item()
    return {**counts, "mse": mse, "bias": shape["mean"], "spread": shape["std"], "quantiles": shape["quantiles"]}
