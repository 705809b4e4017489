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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from open_clip_ext.batch import Batch, log_mean_of_directions
from open_clip_ext.diagnostics import exact
from open_clip_ext.errors import InputError
from open_clip_ext.losses import GlobalContrastiveLoss
from open_clip_ext.normalizers import BatchNormalizer, Queue
from open_clip_ext.surrogates import Identity
from training_ext.features.advice import global_batch
from training_ext.report.embeddings import Embedded
from training_ext.report.gradients import Objective, compare_gradients
from training_ext.report.inputs import Job, Saved
from training_ext.report.queues import nearest_places, queue_without
from training_ext.report.verdict import verdict

EPS = 1e-14  # for losses that have none
QUANTILES = (5, 50, 95)
STEP = 0.01  # half of the relative difference of two temperatures for a derivative
SIDES = ("image", "text")
ESTIMATED_AT_ONCE, EXACT_AT_ONCE = 1024, 4096  # anchors


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
    options: Namespace, args: Namespace, job: Job, saved: Saved, loss: GlobalContrastiveLoss | None, embedded: Embedded,
    taus: list[float],
) -> Result:
    """True and estimated log-normalizers of a random sample of anchors; the same on every process.

    Args:
        taus: temperatures for which to compute the rho that holds them.
    """
    num_read = len(embedded.rows)
    sizes = [size for size in job.sizes if size <= num_read]
    if len(sizes) < len(job.sizes) and options.batch_sizes is not None:
        raise InputError(f"{job.sizes[-1]} is more than the {num_read} rows that can be read", "--batch-sizes")
    draw_anchors = torch.Generator().manual_seed(options.report_seed)
    places = torch.randperm(num_read, generator=draw_anchors)[: options.anchors].sort().values
    index = embedded.rows[places]
    saved_tau = torch.tensor(saved.tau, dtype=torch.float32, device=args.device)
    tau = saved_tau if loss is None else temperatures(loss, saved_tau, embedded, places, args.device)
    common = {
        "surrogate": Identity() if loss is None else loss.surrogate,
        "eps": EPS if loss is None else loss.eps,
        "intra_modal": loss is not None and loss.intra_modal,
        "device": args.device,
    }

    def as_estimated(log_values: Tensor) -> Tensor:
        # A loss with one estimate for both views of an image estimates their mean.
        if loss is None or not loss.one_per_pair:
            return log_values
        return log_mean_of_directions(log_values)

    def exact_at(tau: Tensor, what: str = "Exact") -> Tensor:
        return as_estimated(in_parts(
            exact.exact_log_normalizers, embedded, places, tau, args, unit=1, what=what, total=num_read,
            chunk_mib=options.chunk_mib, **common,
        ))

    true = exact_at(tau)
    trained_with = min(max(global_batch(args), 2), num_read)
    has_estimator = loss is not None and not isinstance(loss.normalizer, BatchNormalizer)
    minibatch = {
        size: as_estimated(in_parts(
            exact.minibatch_log_normalizers, embedded, places, tau, args, unit=exact.group_size(size),
            what=f"Batches of {size}", batch_size=size, seed=options.report_seed, **common,
        ))
        for size in sorted({*sizes, *([trained_with] if has_estimator else [])})
    }
    estimates = {f"batch of {size}": minibatch[size] for size in sizes}
    if loss is not None and has_estimator:
        own = checkpoint_estimate(loss, embedded, places, tau, args, minibatch[trained_with])
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
        **settings(args, loss, tau, common),
        "exact": {side: spread_of(true[i]) for i, side in enumerate(SIDES)},
        "estimators": [{"name": name, **errors(value, true)} for name, value in estimates.items()],
    }
    summary["verdict"] = verdict(summary)
    if taus:
        summary["rho_of_tau"] = [{"tau": one, "rho": resting_rho(exact_at, one)} for one in taus]
    if options.gradient_batches > 0:
        objective = objective_of(loss, embedded, saved_tau, common)
        all_true = in_parts(
            all_log_normalizers, embedded, torch.arange(num_read), objective.tau, args, unit=1, what="Exact, all",
            chunk_mib=options.chunk_mib, **common,
        )
        summary["gradients"] = compare_gradients(options, args, sizes, loss, objective, all_true, embedded)
    return Result(summary, index, true, estimates)


def resting_rho(exact_at: Callable[[Tensor, str], Tensor], tau: float) -> float:
    """The rho at which `LearnableTemperature` rests at tau: - d/dtau of tau * log(eps + g), mean over the anchors.

    Args:
        exact_at: true log-normalizers of the anchors, (2, k), by temperature and label of the progress bar.
    """
    low, high = ((1 - STEP) * tau, (1 + STEP) * tau)
    below, above = (one * exact_at(torch.tensor(one), f"Exact, tau {tau:g}").mean().item() for one in (low, high))
    return (below - above) / (high - low)


def in_parts(function: Callable, embedded: Embedded, places: Tensor, tau: Tensor, args: Namespace, unit: int, what: str,
             total: int | None = None, **settings: Any) -> Tensor:
    """Apply a function of `exact` to all anchors, divided over processes; (2, k) float64 on the CPU.

    Args:
        unit: number of consecutive anchors that one process must compute together.
        what: label of the progress bar.
        total: its length; by default the process's number of anchors.
    """
    units = math.ceil(len(places) / unit)
    start, stop = (unit * (units * rank // args.world_size) for rank in (args.rank, args.rank + 1))
    own, own_tau = places[start:stop], tau[:, start:stop] if tau.dim() else tau
    values = torch.empty(2, 0, dtype=torch.float64)
    if len(own):
        counted = " anchors" if total is None else " pairs"
        with tqdm(total=total or len(own), desc=what, unit=counted, unit_scale=True, disable=args.rank != 0) as bar:
            values = function(embedded.image, embedded.text, own, own_tau, progress=bar.update, **settings).cpu()
    if not args.distributed:
        return values
    parts: list[Any] = [None] * args.world_size
    dist.all_gather_object(parts, values)
    return torch.cat(parts, dim=1)


def objective_of(
    loss: GlobalContrastiveLoss | None, embedded: Embedded, saved_tau: Tensor, common: dict[str, Any]
) -> Objective:
    """The global objective over all rows; for losses without parts (`loss` is None) that of NeuCLIP's Eq. 1."""
    tau = scale = saved_tau
    if loss is not None:
        tau = temperatures(loss, saved_tau, embedded, torch.arange(len(embedded.rows)), saved_tau.device)
        scale = loss.temperature.scale(tau)
    return Objective(
        embedded.image, embedded.text, embedded.rows, tau, scale, common["surrogate"], common["eps"],
        common["intra_modal"], loss is not None and loss.one_per_pair,
    )


def temperatures(
    loss: GlobalContrastiveLoss, saved_tau: Tensor, embedded: Embedded, places: Tensor, device: torch.device | str
) -> Tensor:
    """Temperatures of the anchors at `places` (k,) among the embedded rows: (2, k), or 0-d if there is only one."""
    image, text = (exact.Rows(side, device) for side in (embedded.image, embedded.text))
    parts = []
    for some in places.split(EXACT_AT_ONCE):
        index = embedded.rows[some].to(device)
        batch = Batch.of_process(image.take(some), text.take(some), saved_tau, index)
        parts.append(loss.temperature.taus(saved_tau, loss.temperature.lookup(batch)))
        if parts[0].dim() == 0:
            return parts[0]
    return torch.cat(parts, dim=1)


def all_log_normalizers(
    image: exact.Embeddings, text: exact.Embeddings, anchors: Tensor, tau: Tensor,
    progress: Callable[[int], object], **settings: Any,
) -> Tensor:
    """`exact.exact_log_normalizers` in parts, for more anchors than fit in memory at once."""
    parts = []
    for start in range(0, len(anchors), EXACT_AT_ONCE):
        part = slice(start, start + EXACT_AT_ONCE)
        own_tau = tau[:, part] if tau.dim() else tau
        parts.append(exact.exact_log_normalizers(image, text, anchors[part], own_tau, **settings))
        progress(len(anchors[part]))
    return torch.cat(parts, dim=1)


def checkpoint_estimate(
    loss: GlobalContrastiveLoss, embedded: Embedded, places: Tensor, tau: Tensor, args: Namespace, minibatch: Tensor
) -> Tensor:
    """alpha of all anchors from the checkpoint's normalizer, (2, k) float64; NaN where it has no estimate.

    Every process computes all of them in the same order, since a normalizer may communicate.

    Args:
        minibatch: the anchors' L in batches as large as the training's, (2, k), for normalizers that make use of it.
    """
    image, text = (exact.Rows(side, args.device).take(places) for side in (embedded.image, embedded.text))
    index = embedded.rows[places].to(args.device)
    step, queued = ESTIMATED_AT_ONCE, nearest_places(loss.normalizer, embedded, args.device)
    if queued is not None:
        step = min(step, global_batch(args))
    parts = []
    with exact.full_precision():
        for start in range(0, len(places), step):
            part = slice(start, start + step)
            normalizer = loss.normalizer
            if queued is not None and isinstance(normalizer, Queue):
                normalizer = queue_without(normalizer, torch.isin(queued, places[part]))
            part_tau = tau[:, part] if tau.dim() else tau
            own = minibatch[:, part].to(image)
            batch = Batch.of_process(image[part], text[part], part_tau, index[part], own.new_full(own.shape, math.nan))
            alone = normalizer(batch)  # NaN where it uses the batch's own estimate: beside one of its own, or for none
            batch.all_log_batch = own
            alpha = normalizer(batch)
            parts.append(alpha.where((alpha != own) | ~alone.isnan(), math.nan).double().cpu())
    return torch.cat(parts, dim=1)


def settings(
    args: Namespace, loss: GlobalContrastiveLoss | None, tau: Tensor, common: dict[str, Any]
) -> dict[str, Any]:
    """The settings that the normalizers depend on, for the JSON file."""
    surrogate = common["surrogate"]
    shown = {
        "loss": args.loss or ("siglip" if args.siglip else "clip"),
        "normalizer": None if loss is None else loss.normalizer.name,
        "temperature": None if loss is None else loss.temperature.name,
        "tau": tau.item() if tau.dim() == 0 else {side: spread_of(tau[i].cpu()) for i, side in enumerate(SIDES)},
        "eps": common["eps"],
        "surrogate": surrogate.name,
        "negatives": "cross" if loss is None else loss.negatives,
        "mixing": 0.0 if loss is None else loss.mixing,
        "mixing_applied": False,
    }
    return shown | {option.name: getattr(args, option.name) for option in surrogate.options}


def quantiles(values: Tensor) -> dict[str, float]:
    at = torch.tensor(QUANTILES, dtype=torch.float64) / 100
    return {str(name): value for name, value in zip(QUANTILES, values.double().quantile(at).tolist(), strict=True)}


def spread_of(values: Tensor) -> dict[str, Any]:
    """Mean, standard deviation and quantiles of values (k,)."""
    values = values.double()
    return {"mean": values.mean().item(), "std": values.std(correction=0).item(), "quantiles": quantiles(values)}


def errors(estimate: Tensor, true: Tensor) -> dict[str, Any]:
    """Errors for images, texts and both as anchors.

    `mse`; `bias` and `spread`, the mean and standard deviation of estimate - true, so that mse = bias^2 + spread^2; its
    `quantiles`; the number of `anchors` with an estimate and of those `without_estimate`. None if no anchor has one.

    Args:
        estimate, true: (2, k) float64.
    """
    image, text = estimate - true
    both = torch.cat([image, text])
    return {"image": error_of(image), "text": error_of(text), "both": error_of(both)}


def error_of(difference: Tensor) -> dict[str, Any]:
    known = difference[~difference.isnan()]
    counts = {"anchors": len(known), "without_estimate": len(difference) - len(known)}
    if len(known) == 0:
        return {**counts, "mse": None, "bias": None, "spread": None, "quantiles": None}
    shape = spread_of(known)
    mse = known.square().mean().item()
    return {**counts, "mse": mse, "bias": shape["mean"], "spread": shape["std"], "quantiles": shape["quantiles"]}
