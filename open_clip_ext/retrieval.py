"""Retrieval between images and texts: the rank of each one's positive among all candidates, and recall at k.

An image may have several texts, each of which is a positive of it. Similarities are computed in float64, a tile at a
time (`kernels.streaming`), so memory grows with the number of embeddings and not of their pairs.

Similarities that differ by no more than float64 rounds are equal, and equal candidates stand in random order: ranks and
recalls are the expected ones. One other candidate that is as similar as the positive thus counts half, and embeddings
that are all equal score as chance. One that is not finite counts as zeros, so that it alone scores as chance.

Shapes: I images, T texts, d = dimension; the q queries are all images, and the candidates all texts, or vice versa.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from open_clip_ext.kernels.streaming import tiles
from open_clip_ext.losses.checks import check_int64

SIDES, RECALLS = ("image_to_text", "text_to_image"), (1, 5, 10)
VALIDATION = tuple(f"{side}_{kind}" for side in SIDES for kind in ("R@1", "R@5", "R@10", "mean_rank", "median_rank"))
ANY_CAPTION = tuple(f"{side}_any_R@{k}" for side in SIDES for k in RECALLS)
NUM_IMAGES = "num_images"
"""Names of what `validation_metrics` returns."""


@dataclass(frozen=True)
class Ranks:
    """Rank of each query's most similar positive, by counts of candidates; each (q,) int64, on the CPU."""

    above: Tensor  # number of candidates that are more similar
    equal: Tensor  # number of other candidates as similar, positives not counted
    positives: Tensor  # number of positives as similar, at least 1

    def expected(self) -> Tensor:
        """The expected rank of the first positive, from 0, (q,) float64."""
        return self.above + self.equal.double() / (self.positives + 1)

    def hits(self, k: int) -> Tensor:
        """Probability that a positive is among the k most similar candidates, 0 or 1 but for ties, (q,) float64."""
        missed = torch.ones_like(self.above, dtype=torch.float64)
        for rank in range(k):
            # Of the equal candidates, those that are no positives and may stand at this rank.
            non_positives = (self.above + self.equal - rank).clamp(min=0).double()
            missed *= torch.where(rank < self.above, 1.0, non_positives / (non_positives + self.positives))
        return 1 - missed

    def recall(self, k: int) -> float:
        """Expected fraction of the queries that have a positive among the k most similar candidates."""
        return float(self.hits(k).mean())


@torch.no_grad()
def retrieval_ranks(
    image: Tensor, text: Tensor, image_of_text: Tensor | None = None, device: torch.device | str | None = None
) -> tuple[Ranks, Ranks]:
    """The ranks of the images' texts, and of the texts' images.

    Args:
        image: embeddings (I, d) of any floating type. text: (T, d).
        image_of_text: (T,) int64, the index of each text's image; each image has at least one. By default text i
            belongs to image i.
        device: where similarities are computed, by default where the images are.

    Raises:
        ValueError: `image_of_text` is not as above, or has no default as there are fewer images or texts.
    """
    compute_device = image.device if device is None else torch.device(device)
    of = torch.arange(len(text), device=image.device) if image_of_text is None else image_of_text
    check_int64("image_of_text", of, len(text))
    if of.unique().tolist() != list(range(len(image))):
        raise ValueError(
            f"image_of_text must name each of the {len(image)} images for one or more of the {len(text)} texts, and no "
            "other; only for as many images as texts it may be left out"
        )
    image, text = (vectors.masked_fill(~vectors.isfinite().all(dim=1, keepdim=True), 0) for vectors in (image, text))
    rows, columns = tiles(len(image), [slice(0, len(text))], compute_device)
    pair_similarities = torch.cat([(image[of[part]].double() * text[part].double()).sum(dim=1) for part in columns])
    best = pair_similarities.new_full((len(image),), -torch.inf).scatter_reduce(0, of, pair_similarities, "amax")
    # Two sums of d products in different order differ by at most d epsilons of the product of the norms.
    slack = text.shape[1] * torch.finfo(pair_similarities.dtype).eps * image.norm(dim=1).max() * text.norm(dim=1).max()
    as_good = ~(pair_similarities < (best - slack)[of])
    images = _Side(best, slack, of.new_zeros(len(image)).scatter_add(0, of, as_good.long()), 1, compute_device)
    texts = _Side(pair_similarities, slack, torch.ones_like(of), 0, compute_device)
    for row in rows:
        some = image[row].to(compute_device).double()
        for column in columns:
            similarities = some @ text[column].to(compute_device).double().T
            images.count(similarities, row)
            texts.count(similarities, column)
    return images.ranks(len(text)), texts.ranks(len(image))


def validation_metrics(
    image: Tensor, text: Tensor, image_of_text: Tensor | None = None, device: torch.device | str | None = None
) -> dict[str, float]:
    """Retrieval metrics of n pairs, named as in OpenCLIP's `get_clip_metrics`; `ANY_CAPTION`, `NUM_IMAGES`, too.

    Args:
        image: (n, d). text: (n, d).
        image_of_text: (n,) int64, the index of each pair's image, counted from 0; None: without `ANY_CAPTION`, the
            recalls at which each caption of an image counts as its positive, and without `NUM_IMAGES`.
        device: as of `retrieval_ranks`.
    """
    metrics: dict[str, float] = {}
    for side, ranks in zip(SIDES, retrieval_ranks(image, text, device=device), strict=True):
        expected = ranks.expected()
        metrics[f"{side}_mean_rank"] = float(expected.mean()) + 1
        metrics[f"{side}_median_rank"] = float(expected.quantile(0.5).floor()) + 1
        metrics |= {f"{side}_R@{k}": ranks.recall(k) for k in RECALLS}
    if image_of_text is None:
        return metrics
    pairs = torch.arange(len(text), device=image_of_text.device)
    first_pairs = pairs.new_zeros(int(image_of_text.max()) + 1).scatter_reduce(
        0, image_of_text, pairs, "amin", include_self=False
    )
    for side, ranks in zip(SIDES, retrieval_ranks(image[first_pairs], text, image_of_text, device), strict=True):
        metrics |= {f"{side}_any_R@{k}": ranks.recall(k) for k in RECALLS}
    return metrics | {NUM_IMAGES: len(first_pairs)}


class _Side:
    """Counts, for the queries of one direction, the candidates that are more and less similar than the best positive.

    Args:
        level: similarity of each query and its best positive, (q,).
        slack: difference up to which similarities are equal.
        positives: as in `Ranks`.
        dim: the candidates' dimension in a tile of similarities.
    """

    def __init__(self, level: Tensor, slack: Tensor, positives: Tensor, dim: int, device: torch.device):
        self.low, self.high = (level - slack).to(device), (level + slack).to(device)
        self.positives = positives
        self.dim = dim
        self.above, self.below = torch.zeros(2, len(level), dtype=torch.int64, device=device)

    def count(self, similarities: Tensor, queries: slice) -> None:
        """Count the candidates of a tile."""
        low, high = (bound[queries].unsqueeze(self.dim) for bound in (self.low, self.high))
        self.above[queries] += (similarities > high).sum(self.dim)
        self.below[queries] += (similarities < low).sum(self.dim)

    def ranks(self, candidates: int) -> Ranks:
        above, below, positives = self.above.cpu(), self.below.cpu(), self.positives.cpu()
        return Ranks(above, candidates - above - below - positives, positives)
