"""The data set's embeddings, read in chunks; anchors among them; and sums over all as their negatives.

Shapes as in `exact`: n = pairs of the data set, k = anchors, d = embedding dimension.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import Tensor

from open_clip_ext.surrogates import Identity, Surrogate

Embeddings = Tensor | Sequence[Tensor]

_LOWEST = -1e30  # below every exponent, and finite, so that no difference of two is NaN


class Rows:
    """Embeddings (n, d), read in chunks and by row.

    Args:
        blocks: the embeddings.
        device: where to return them; None: where they are.

    Raises:
        ValueError: there are no blocks, or they differ in dimension.
    """

    def __init__(self, blocks: Embeddings, device: torch.device | str | None = None):
        self.blocks = [blocks] if isinstance(blocks, Tensor) else list(blocks)
        if not self.blocks or any(block.dim() != 2 or block.shape[1] != self.dimension for block in self.blocks):
            raise ValueError("embeddings must be (n, d), in one tensor or in blocks of rows")
        self.device = self.blocks[0].device if device is None else torch.device(device)
        self._ends = torch.tensor(list(accumulate(len(block) for block in self.blocks)))

    @property
    def dimension(self) -> int:
        return self.blocks[0].shape[1]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def chunks(self, size: int) -> Iterator[Tensor]:
        """Iterate over all rows in order, in chunks (c, d) float32 with c <= size."""
        for block in self.blocks:
            for chunk in block.split(size):
                yield chunk.to(self.device, torch.float32)

    def take(self, index: Tensor) -> Tensor:
        """The rows `index`, (m,) int64, as (m, d) float32."""
        index = index.cpu()
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < len(self):
            raise ValueError(f"rows must lie in [0, {len(self)})")
        ordered, order = index.sort()
        bounds = torch.searchsorted(ordered, self._ends).tolist()
        parts, start = [], 0
        for block, end, stop in zip(self.blocks, self._ends.tolist(), bounds, strict=True):
            if stop > start:
                parts.append(block[(ordered[start:stop] - (end - len(block))).to(block.device)])
            start = stop
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return torch.cat(parts).to(self.device, torch.float32)[back.to(self.device)]


class Anchors:
    """k anchors of the data set, with their temperatures and positives' similarities.

    Args:
        image, text: the embeddings.
        index: rows of the anchors, (k,) int64.
        tau: temperatures > 0, 0-d or (2, k).
        surrogate: l; None: the identity.
        intra_modal: whether samples of the anchor's own modality are negatives, too (iSogCLR, Eq. 11).

    Raises:
        ValueError: shapes, rows or temperatures do not fit; the message names the argument.
    """

    def __init__(
        self, image: Rows, text: Rows, index: Tensor, tau: Tensor | float,
        surrogate: Surrogate | None = None, intra_modal: bool = False,
    ):
        if [block.shape for block in image.blocks] != [block.shape for block in text.blocks]:
            raise ValueError("image and text must be of the same shape, in the same blocks")
        if len(image) < 2:
            raise ValueError(f"image: {len(image)} pair(s) have no negatives; at least 2 are needed")
        self.rows = (image, text)
        self.index = index.cpu()
        self.embeddings = [rows.take(self.index) for rows in self.rows]
        self.positives = (self.embeddings[0].double() * self.embeddings[1].double()).sum(dim=1).float()
        tau = torch.as_tensor(tau, dtype=torch.float32).to(image.device)
        if tau.dim() and tuple(tau.shape) != (2, len(index)):
            raise ValueError(f"tau must be 0-d or (2, {len(index)}); got {tuple(tau.shape)}")
        if not (tau > 0).all():
            raise ValueError(f"tau must be > 0; got {tau.min().item():g}")
        self.tau = tau.expand(2, len(index))
        self.surrogate = surrogate or Identity()
        self.sides = [(side, (1 - side, side) if intra_modal else (1 - side,)) for side in range(2)]
        self.negatives = (2 if intra_modal else 1) * (len(image) - 1)

    def __len__(self) -> int:
        return len(self.index)

    def exponents(self, side: int, part: slice, columns: Tensor, out: Tensor) -> Tensor:
        """l(s_ij - s_ii) / tau_i of the anchors `part` of a side against `columns` (c, d); overwrites `out`."""
        torch.mm(self.embeddings[side][part], columns.T, out=out)
        gap = out.sub_(self.positives[part, None])
        return self.surrogate.value(gap).div_(self.tau[side, part, None])


class LogSums:
    """Streaming log-sum-exp for (2, k) anchors."""

    def __init__(self, anchors: int, device: torch.device):
        self.peak = torch.full((2, anchors), _LOWEST, device=device)
        self.total = torch.zeros(2, anchors, dtype=torch.float64, device=device)

    def add(self, side: int, part: slice, exponents: Tensor) -> None:
        """Add `exponents` (a, c) of the anchors `part`; overwrites them."""
        before = self.peak[side, part]
        peak = torch.maximum(before, exponents.amax(dim=1))
        self.total[side, part] *= (before - peak).double().exp()
        self.total[side, part] += exponents.sub_(peak[:, None]).exp_().sum(dim=1)
        self.peak[side, part] = peak

    def value(self) -> Tensor:
        """The log-sum-exps, (2, k) float64; -inf where nothing was added."""
        return self.total.log() + self.peak.double()


@contextmanager
def full_precision() -> Iterator[None]:
    """Disable TF32, which OpenCLIP enables: its 10 bits of a similarity are 0.1 in an exponent at tau = 0.01."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
