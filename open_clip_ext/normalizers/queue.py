"""A queue of the latest m embeddings: no training, no state per sample; of no paper, ours.

    alpha_1i = logaddexp(log eps, logsumexp_j(l(e_1i . q_j - s_ii) / tau) - log k)

over the k queued texts q_j (for texts as anchors, images) that are not of the step's own batch: among those is the
anchor's own positive, whose gap of 0 would hide every log-normalizer below -log k. While the queue holds nothing but
the batch, alpha is the batch's own estimate. As plain equations, with the mixing: `equations.queue_u`,
`equations.queue`.

Shapes: m = length of the queue, d = embedding dimension, B = global batch.
"""

import math

import torch
from torch import Tensor

from open_clip_ext.distributed import rank
from open_clip_ext.memory import check_fits
from open_clip_ext.normalizers.base import Batch, Normalizer
from open_clip_ext.normalizers.log_sum import log_sum
from open_clip_ext.normalizers.ring import EmbeddingRing
from open_clip_ext.options import Option
from open_clip_ext.pairs import Pairs, add_eps
from open_clip_ext.surrogates import Identity, Surrogate


class Queue(Normalizer):
    """Memory is allocated at the first batch, on its device: 2 * m * d numbers.

    Args: see `options`; `eps` and `surrogate` are the loss's.

    Raises:
        InputError: an argument is out of range; the message names it.
    """

    name = "queue"
    differentiable = True
    options = (
        Option(
            "queue_size", int, 4096, "m, embeddings that the queue holds on each side",
            valid=lambda value: value >= 1, wanted="at least 1", in_state=True,
        ),
    )

    def __init__(
        self, queue_size: int = 4096, eps: float = 1e-14, surrogate: Surrogate | None = None
    ):
        super().__init__()
        self.options[0].check(queue_size)
        self.capacity = queue_size
        self.eps = eps
        self.surrogate = surrogate or Identity()
        self.ring: EmbeddingRing | None = None
        self.own: list[slice] = []  # places of the step's own batch

    @torch.no_grad()
    def update(self, batch: Batch) -> None:
        self.own = self._follow(batch.image).push(batch)

    def memory(self, dimension: int, processes: int) -> dict[str, int]:
        return {"queue of embeddings": 4 * 2 * self.capacity * dimension}

    def check_memory(self, dimension: int, device: torch.device | str, processes: int) -> None:
        needed = sum(self.memory(dimension, processes).values())
        check_fits(f"--queue-size: {self.capacity} of dimension {dimension}", needed, device, "lower it")

    def _follow(self, image: Tensor) -> EmbeddingRing:
        """The ring, where the embeddings are."""
        if self.ring is None:
            self.check_memory(image.shape[1], image.device, 1)
            self.ring = EmbeddingRing(self.capacity, image.shape[1], image)
        elif self.ring.rows.device != image.device or self.ring.rows.dtype != image.dtype:
            self.ring = self._restored(self.ring.state(), image)
        return self.ring

    def forward(self, pairs: Pairs, positives: Tensor, tau: Tensor, batch: Batch) -> Tensor:
        active = 0 if self.ring is None else self.ring.active
        seen = gaps(self.own, active) if self.training else [slice(0, active)]
        others = sum(some.stop - some.start for some in seen)
        if others == 0:
            return batch.log_batch[:, pairs.local]
        inputs = (pairs.image, pairs.text, positives, tau, self._follow(pairs.all_image).rows)
        log_total = log_sum(*inputs, self.surrogate, seen=seen)
        return add_eps(log_total - math.log(others), self.eps)

    def diagnostics(self, log_batch: Tensor, alpha: Tensor) -> dict[str, Tensor]:
        return {"queued": torch.tensor(float(0 if self.ring is None else self.ring.active))}

    def full_state(self) -> dict[str, Tensor]:
        if rank() != 0 or self.ring is None:
            return {}
        return {name: value.detach().cpu().clone() for name, value in self.ring.state().items()}

    def load_full_state(self, state: dict[str, Tensor]) -> None:
        if "ring" not in state:
            return
        if state["ring"].shape[1] != self.capacity:
            raise ValueError(f"queue_size: {self.capacity} where the state has {state['ring'].shape[1]}")
        self.ring = self._restored(state, state["ring"])

    def _restored(self, state: dict[str, Tensor], like: Tensor) -> EmbeddingRing:
        ring = EmbeddingRing(self.capacity, state["ring"].shape[2], like)
        ring.restore(state)
        return ring


def gaps(places: list[slice], size: int) -> list[slice]:
    """What `places`, which do not overlap, leave of `size` places."""
    places = sorted(places, key=lambda some: some.start)
    ends, starts = [0, *(some.stop for some in places)], [*(some.start for some in places), size]
    return [slice(end, start) for end, start in zip(ends, starts, strict=True) if start > end]
