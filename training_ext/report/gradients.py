"""Bias and variance of the gradient under each estimator of the normalizers, against the exact gradient.

The exact gradient is that of NeuCLIP's Eq. 2 in the embeddings of some pairs, with the exact log-normalizers of all n
rows. An estimator's gradient is that of the loss over a batch B (Eq. 4; for the unified objective Eq. 12, also through
alpha). A row is in few batches, so the two are compared on batches that contain it:

    E[ B dF_B/de_a | a in B ] = n dF/de_a

where F_B is the objective over the batch and alpha the exact log-normalizers (see `exact.embedding_gradients`). With
any other alpha the difference of the two sides is the estimator's bias. The batches are those of a shuffled epoch, so
the other rows of a batch are a random sample.

alpha is that of a training step over the batch, so a copy of the estimator is updated with the batch first: a table's
u_i contains the batch's own estimate with weight gamma (Eq. 3), and a network makes T_u updates (Algorithm 1), without
which its predictions for the batch are far worse. A restart that would be due is skipped. `mixing` is applied. Pairs
that are both in a queue and in the batch are left out of the queue.
"""

import copy
import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from tqdm import tqdm

from open_clip_ext.batch import Batch
from open_clip_ext.diagnostics.embeddings import Pairs, full_precision
from open_clip_ext.losses import GlobalContrastiveLoss
from open_clip_ext.normalizers import Normalizer, Queue
from open_clip_ext.normalizers.npn import NPN
from training_ext.report.objective import Objective
from training_ext.report.queues import nearest_places, queue_without

PAIRS = 32  # the gradients are compared in their embeddings

Estimator = Callable[[Batch, Tensor], tuple[Tensor, Tensor | None]]
"""Maps a batch, and its places (B,) among the n pairs, to alpha of its anchors, (2, B), and B times the part of the
gradient that flows through alpha, (2, B, d), None if none does."""


def given(alpha: Tensor) -> Estimator:
    """The estimator that returns the constants `alpha` (2, n)."""
    return lambda batch, places: (alpha[:, places], None)


def minibatch(batch: Batch, places: Tensor) -> tuple[Tensor, None]:
    """The batch's own estimates ("Mini-batch Approximation", NeuCLIP, Section 3)."""
    return batch.log_batch, None


def of_loss(loss: GlobalContrastiveLoss, queued: Tensor | None) -> Estimator:
    """The estimator of the checkpoint's loss.

    Args:
        queued: places among the n pairs of those in the queue, (m,); None if it has no queue.
    """
    through_alpha = loss.objective.through_alpha

    def estimate(batch: Batch, places: Tensor) -> tuple[Tensor, Tensor | None]:
        updated = None
        if queued is not None and isinstance(loss.normalizer, Queue):
            normalizer: Normalizer = queue_without(loss.normalizer, torch.isin(queued, places))
        else:
            normalizer = copy.deepcopy(loss.normalizer)
            if isinstance(normalizer, NPN):
                normalizer.restart_every = 0
            updated = normalizer.update(batch)
        inputs = batch.leaves(requires_grad=through_alpha)
        with torch.set_grad_enabled(through_alpha):
            alpha = loss.mixed(normalizer(inputs, updated), batch.log_batch)
        if not through_alpha:
            return alpha, None
        image, text, *_ = loss.gradient_through_alpha(batch, inputs, alpha)
        return alpha.detach(), batch.size * torch.stack([image, text])

    return estimate


def batches_with(rows: Tensor, num_rows: int, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of one shuffled epoch that contain any of `rows`: positions (B,), and which of `rows` are in them, (m,).

    Each of `rows` occurs once, and any other row is in its batch with probability (B - 1)/(n - 1); the last batch of
    the epoch is filled up with rows of the one before.
    """
    order = torch.randperm(num_rows, generator=generator)
    position = torch.empty_like(order)
    position[order] = torch.arange(num_rows)
    starts = (position[rows] // size * size).clamp(max=num_rows - size)
    for start in starts.unique().tolist():
        yield order[start : start + size], (starts == start).nonzero()[:, 0]


@torch.no_grad()
def draw(
    objective: Objective, rows: Tensor, size: int, batches: int, seed: int, estimators: dict[str, Estimator],
    progress: Callable[[], object] = lambda: None,
) -> dict[str, Tensor]:
    """B times the gradient over random batches in the embeddings of `rows` (k,); by estimator, (batches, 2, k, d)."""
    generator = torch.Generator().manual_seed(seed)
    num_rows = len(objective.index)
    shape = (batches, 2, len(rows), Pairs(objective.image, objective.text).dimension)
    found = {name: torch.empty(shape) for name in estimators}
    with full_precision():
        for number in range(batches):
            for places, members in batches_with(rows, num_rows, size, generator):
                own = (places == rows[members, None]).nonzero()[:, 1]
                over_batch = objective.at(places)
                batch = over_batch.batch()
                for name, estimate in estimators.items():
                    alpha, through_alpha = estimate(batch, places)
                    gradients = over_batch.gradients(own, alpha)
                    if through_alpha is not None:
                        gradients += through_alpha[:, own]
                    found[name][number][:, members] = gradients.cpu().float()
            progress()
    return found


def statistics(draws: Tensor, true: Tensor) -> dict[str, float | None]:
    """Bias, variance and cosine of an estimator's gradient, with all pairs' embeddings as one vector.

    Args:
        draws: R >= 2 independent estimates, (R, ...).
        true: the exact gradient, (...).

    Returns:
        `bias`: |mean - exact| / |exact|; `bias_noise`: the bias that an unbiased estimator of the same variance would
        show, sqrt(variance / R). `variance`: mean squared distance from the mean, over |exact|^2. `cosine`: between
        mean and exact; `batch_cosine`: between one draw and exact, mean over draws. `..._error`: their standard errors,
        by jackknife for `bias` and `cosine`. None if not finite, for example where `true` is 0.
    """
    draws, true = draws.double().flatten(1), true.double().flatten()
    norm, count = true.norm(), len(draws)
    mean = draws.mean(dim=0)
    without_one = mean + (mean - draws) / (count - 1)
    squares = (draws - mean).square().sum(dim=1) / norm**2 * count / (count - 1)
    cosines = cosine_similarity(draws, true[None], dim=1)

    def jackknife(values: Tensor) -> Tensor:
        return (values.var(correction=0) * (count - 1)).sqrt()

    root = math.sqrt(count)
    shown = {
        "bias": (mean - true).norm() / norm,
        "bias_error": jackknife((without_one - true).norm(dim=1) / norm),
        "bias_noise": squares.mean().sqrt() / root,
        "variance": squares.mean(),
        "variance_error": squares.std() / root,
        "cosine": cosine_similarity(mean, true, dim=0),
        "cosine_error": jackknife(cosine_similarity(without_one, true[None], dim=1)),
        "batch_cosine": cosines.mean(),
        "batch_cosine_error": cosines.std() / root,
    }
    return {name: value.item() if value.isfinite() and norm > 0 else None for name, value in shown.items()}


def compare_gradients(
    options: Namespace, args: Namespace, sizes: list[int], loss: GlobalContrastiveLoss | None, objective: Objective,
    true: Tensor,
) -> dict[str, Any]:
    """The gradients' entry in the JSON file; every process computes all of it.

    Args:
        true: exact log-normalizers of all n rows, (2, n).
    """
    draw_rows = torch.Generator().manual_seed(options.report_seed)
    rows = torch.randperm(len(objective.index), generator=draw_rows)[:PAIRS].sort().values
    true = true.to(objective.tau)
    gradient = objective.gradients(rows, true).cpu()
    estimators: dict[str, Estimator] = {}
    if loss is not None and loss.normalizer.name != "batch":
        estimators[loss.normalizer.name] = of_loss(loss, nearest_places(loss.normalizer, objective))
    estimators |= {"minibatch": minibatch, "exact": given(true)}
    shown = []
    for size in sizes:
        with tqdm(total=options.gradient_batches, desc=f"Gradients of {size}", disable=args.rank != 0) as bar:
            draws = draw(
                objective, rows, size, options.gradient_batches, options.report_seed, estimators, progress=bar.update
            )
        shown += [{"name": name, "batch_size": size, **statistics(draws[name], gradient)} for name in estimators]
    return {
        "pairs": len(rows),
        "batches": options.gradient_batches,
        "encoder_objective": "compositional" if loss is None else loss.objective.name,
        "exact_norm": gradient.norm().item(),
        "estimators": shown,
    }
