"""Embeddings of a data set in chunks, anchors among its pairs, and log-sums over an anchor's negatives.

Shapes as in `exact`: n = pairs of the data set, k = anchors, d = embedding dimension.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from open_clip_ext.surrogates import Identity, Surrogate

Embeddings = Tensor | Sequence[Tensor]

_LOWEST = -1e30  # below every exponent, and finite, so that no difference of two is NaN


class Pairs:
    """The embeddings of n pairs, read in chunks and by row.

    Args:
        image, text: the embeddings.
        device: where to return them; None: where they are.

    Raises:
        ValueError: there are fewer than 2 pairs, or shapes do not fit.
    """

    def __init__(self, image: Embeddings, text: Embeddings, device: torch.device | str | None = None):
        self.sides = [[side] if isinstance(side, Tensor) else list(side) for side in (image, text)]
        shapes = [[block.shape for block in side] for side in self.sides]
        if not shapes[0] or any(len(shape) != 2 or shape[1] != shapes[0][0][-1] for shape in shapes[0]):
            raise ValueError("embeddings must be (n, d), in one tensor or in blocks of rows")
        if shapes[0] != shapes[1]:
            raise ValueError("image and text must be of the same shape, in the same blocks")
        self.device = self.sides[0][0].device if device is None else torch.device(device)
        self._ends = list(accumulate(len(block) for block in self.sides[0]))
        if len(self) < 2:
            raise ValueError(f"image: {len(self)} pair(s) have no negatives; at least 2 are needed")

    def __len__(self) -> int:
        return self._ends[-1]

    def chunks(self, size: int) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield all pairs in chunks, in order: the row of the first pair, and [image, text], (<= size, d) each."""
        start = 0
        for blocks in zip(*self.sides, strict=True):
            for chunk in zip(*(block.split(size) for block in blocks), strict=True):
                yield start, [side.to(self.device, torch.float32) for side in chunk]
                start += len(chunk[0])

    def take(self, index: Tensor) -> list[Tensor]:
        """The embeddings [image, text] of the rows `index`, (m,) int64, as (m, d) float32."""
        index = index.cpu()
        if not 0 <= int(index.min()) <= int(index.max()) < len(self):
            raise ValueError(f"rows must lie in [0, {len(self)})")
        ordered, order = index.sort()
        stops = torch.searchsorted(ordered, torch.tensor(self._ends)).tolist()
        back = order.argsort().to(self.device)
        embeddings = []
        for side in self.sides:
            parts = []
            for block, end, start, stop in zip(side, self._ends, [0, *stops], stops, strict=False):
                if stop > start:
                    parts.append(block[(ordered[start:stop] - (end - len(block))).to(block.device)])
            embeddings.append(torch.cat(parts).to(self.device, torch.float32)[back])
        return embeddings


class Anchors:
    """k anchors of the data set, with their positives' similarities.

    Args:
        pairs: the data set.
        index: rows of the anchors, (k,) int64.
        tau: temperatures, (2, k).
        surrogate: l; None: the identity.
        intra_modal: whether samples of the anchor's own modality are negatives, too (iSogCLR, Eq. 11).
    """

    def __init__(self, pairs: Pairs, index: Tensor, tau: Tensor, surrogate: Surrogate | None, intra_modal: bool):
        self.index = index.cpu()
        self.embeddings = pairs.take(index)
        self.positives = (self.embeddings[0].double() * self.embeddings[1].double()).sum(dim=1).float()
        self.tau = tau
        self.surrogate = surrogate or Identity()
        self.sides = [(side, other) for side in (0, 1) for other in ((1 - side, side) if intra_modal else (1 - side,))]

    def log_sums(self, columns: Sequence[Tensor], without: Any) -> Tensor:
        """Log of the sum of exp(l(s_ij - s_ii) / tau_i) of each anchor over the pairs j of `columns`, (2, k) float64.

        Args:
            columns: embeddings [image, text] of c pairs, (c, d).
            without: entries of (k, c) that are no negatives, as a mask or an index.
        """
        total = self.tau.new_full((2, len(self.index)), -math.inf, dtype=torch.float64)
        for side, other in self.sides:
            gaps = (self.embeddings[side] @ columns[other].T).sub_(self.positives[:, None])
            exponents = self.surrogate.value(gaps).div_(self.tau[side, :, None])
            exponents[without] = -math.inf
            peak = exponents.amax(dim=1).clamp(min=_LOWEST)
            sums = exponents.sub_(peak[:, None]).exp_().sum(dim=1).double().log() + peak.double()
            total[side] = torch.logaddexp(total[side], sums)
        return total

    def positives_among(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Positions (anchor, column) of the anchors' positives among the pairs `start` .. `start + count - 1`."""
        column = self.index - start
        anchor = ((column >= 0) & (column < count)).nonzero()[:, 0]
        return anchor, column[anchor]


@contextmanager
def full_precision() -> Iterator[None]:
    """Disable TF32, which OpenCLIP enables: its 10 bits of a similarity are 0.1 in an exponent at tau = 0.01."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
