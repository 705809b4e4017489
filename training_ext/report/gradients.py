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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from tqdm import tqdm

from open_clip_ext.batch import Batch, add_eps, log_mean_of_directions
from open_clip_ext.diagnostics import exact
from open_clip_ext.kernels.similarities import SimilarityBlocks
from open_clip_ext.losses import GlobalContrastiveLoss
from open_clip_ext.normalizers import Normalizer, Queue
from open_clip_ext.normalizers.npn import NPN
from open_clip_ext.surrogates import Surrogate
from training_ext.report.embeddings import Embedded
from training_ext.report.queues import nearest_places, queue_without

PAIRS = 32  # the gradients are compared in their embeddings


@dataclass
class Objective:
    """The global objective of a data set.

    Args:
        image, text: unit embeddings of the n pairs, (n, d).
        index: their rows in the data set, (n,).
        tau, scale: temperatures, and the factors of log(eps + g_i), 0-d or (2, n).
        surrogate, eps, intra_modal, one_per_pair: as in the loss.
    """

    image: exact.Embeddings
    text: exact.Embeddings
    index: Tensor
    tau: Tensor
    scale: Tensor
    surrogate: Surrogate
    eps: float
    intra_modal: bool = False
    one_per_pair: bool = False

    def gradients(self, rows: Tensor, alpha: Tensor) -> Tensor:
        """Gradients in the embeddings of `rows` (k,), (2, k, d), see `exact.embedding_gradients`."""
        return exact.embedding_gradients(
            self.image, self.text, rows, alpha, self.tau, self.scale, self.surrogate, self.intra_modal,
            device=self.tau.device,
        )

    def batch(self, places: Tensor) -> "Objective":
        """The objective over the pairs at `places` (B,) only."""
        image, text = (exact.Rows(side, self.tau.device).take(places) for side in (self.image, self.text))
        tau, scale = (values[:, places] if values.dim() else values for values in (self.tau, self.scale))
        return Objective(
            image, text, self.index[places], tau, scale, self.surrogate, self.eps, self.intra_modal, self.one_per_pair
        )


@dataclass
class Step:
    """A batch as in a training step of one process.

    Args:
        places: its positions among the n pairs, (B,).
        batch: the batch as the loss receives it.
    """

    places: Tensor
    batch: Batch

    @classmethod
    def of(cls, objective: Objective, places: Tensor) -> "Step":
        """The step over a batch.

        Args:
            objective: the objective over the batch's pairs, see `Objective.batch`.
            places: as above.
        """
        assert isinstance(objective.image, Tensor) and isinstance(objective.text, Tensor)
        index = objective.index.to(objective.tau.device)
        batch = Batch.of_process(objective.image, objective.text, objective.tau, index)
        blocks = SimilarityBlocks(batch, objective.surrogate, objective.intra_modal)
        batch.all_log_batch = add_eps(blocks.log_batch_normalizers(), objective.eps)
        if objective.one_per_pair:
            batch.all_log_batch = log_mean_of_directions(batch.all_log_batch)
        batch.finite = torch.ones((), dtype=torch.bool, device=batch.image.device)
        return cls(places, batch)


# Returns alpha of the batch's anchors, (2, B), and B times the part of the gradient that flows through alpha, (2, B, d)
# or 0.
Estimator = Callable[[Step], tuple[Tensor, Tensor | float]]


def given(alpha: Tensor) -> Estimator:
    """The estimator that returns the constants `alpha` (2, n)."""
    return lambda step: (alpha[:, step.places], 0.0)


def minibatch(step: Step) -> tuple[Tensor, float]:
    """The batch's own estimates ("Mini-batch Approximation", NeuCLIP, Section 3)."""
    return step.batch.log_batch, 0.0


def of_loss(loss: GlobalContrastiveLoss, queued: Tensor | None) -> Estimator:
    """The estimator of the checkpoint's loss.

    Args:
        queued: positions among the n pairs of those in the queue, (m,); None if it has no queue.
    """

    def estimate(step: Step) -> tuple[Tensor, Tensor | float]:
        batch, updated = step.batch, None
        if queued is not None and isinstance(loss.normalizer, Queue):
            normalizer: Normalizer = queue_without(loss.normalizer, torch.isin(queued, step.places))
        else:
            normalizer = copy.deepcopy(loss.normalizer)
            if isinstance(normalizer, NPN):
                normalizer.restart_every = 0
            updated = normalizer.update(batch)
        inputs = batch.leaves(requires_grad=loss.objective.through_alpha)
        with torch.set_grad_enabled(loss.objective.through_alpha):
            alpha = loss.mixed(normalizer(inputs, updated), batch.log_batch)
        if not loss.objective.through_alpha:
            return alpha, 0.0
        grad_image, grad_text, *_ = loss.gradient_through_alpha(batch, inputs, alpha)
        return alpha.detach(), batch.size * torch.stack([grad_image, grad_text])

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
    shape = (batches, 2, len(rows), exact.Rows(objective.image).dimension)
    found = {name: torch.empty(shape) for name in estimators}
    with exact.full_precision():
        for number in range(batches):
            for places, members in batches_with(rows, num_rows, size, generator):
                own = (places == rows[members, None]).nonzero()[:, 1]
                over_batch = objective.batch(places)
                step = Step.of(over_batch, places)
                for name, estimate in estimators.items():
                    alpha, through_alpha = estimate(step)
                    gradients = over_batch.gradients(own, alpha)
                    if isinstance(through_alpha, Tensor):
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
    true: Tensor, embedded: Embedded,
) -> dict[str, Any]:
    """The gradients' entry in the JSON file; every process computes all of it.

    Args:
        true: exact log-normalizers of all n rows, (2, n).
    """
    num_rows = len(objective.index)
    draw_rows = torch.Generator().manual_seed(options.report_seed)
    rows = torch.randperm(num_rows, generator=draw_rows)[:PAIRS].sort().values
    true = true.to(objective.tau)
    if objective.one_per_pair:
        true = log_mean_of_directions(true)
    gradient = objective.gradients(rows, true).cpu()
    estimators: dict[str, Estimator] = {}
    if loss is not None and loss.normalizer.name != "batch":
        estimators[loss.normalizer.name] = of_loss(loss, nearest_places(loss.normalizer, embedded, args.device))
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
