"""The latest embeddings of the training set, in a ring buffer."""

import torch
from torch import Tensor

from open_clip_ext.normalizers.base import Batch


class EmbeddingRing:
    """The latest m pairs of embeddings, (2, m, d): [0] texts, which image anchors meet, [1] images.

    Args:
        capacity: m.
        dimension: d.
        like: a tensor of the device and type to use.
    """

    def __init__(self, capacity: int, dimension: int, like: Tensor):
        self.rows = like.new_zeros(2, capacity, dimension)
        self.capacity = capacity
        self.active = 0  # rows that were filled
        self.head = 0  # the place of the next row

    @property
    def own_active(self) -> int:
        """Filled rows that are kept here: all."""
        return self.active

    def push(self, batch: Batch) -> list[slice]:
        """Take the batch's last m pairs in place of the oldest; their places, one after the other.

        In place of a batch that is not finite it takes what it took before, or nothing but unit vectors.
        """
        count = min(len(batch.text), self.capacity)
        places, before = self._places(self.head, count), self._places(self.head - count, count)
        for rows, latest in zip(self.rows, (batch.text[-count:], batch.image[-count:]), strict=True):
            earlier = torch.cat([rows[some] for some in before])
            if self.active < count:
                earlier = torch.eye(*latest.shape, dtype=latest.dtype, device=latest.device)
            new = torch.where(batch.finite, latest, earlier)
            for some, part in zip(places, new.split([some.stop - some.start for some in places]), strict=True):
                rows[some] = part
        self.head = (self.head + count) % self.capacity
        self.active = min(self.active + count, self.capacity)
        return places

    def _places(self, start: int, count: int) -> list[slice]:
        """`count` places from `start` on, in one piece or two."""
        start %= self.capacity
        end = start + count
        if end <= self.capacity:
            return [slice(start, end)]
        return [slice(start, self.capacity), slice(0, end - self.capacity)]

    def state(self) -> dict[str, Tensor]:
        return {"ring": self.rows, "active": torch.tensor(self.active), "ring_head": torch.tensor(self.head)}

    def restore(self, state: dict[str, Tensor]) -> None:
        self.rows.copy_(state["ring"])
        self.active, self.head = int(state["active"]), int(state["ring_head"])
