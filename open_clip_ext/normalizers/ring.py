"""A ring buffer of the latest embeddings of the training set."""

import torch
from torch import Tensor, nn

from open_clip_ext.batch import Batch


class EmbeddingRing(nn.Module):
    """The latest m pairs of embeddings, (2, m, d): [0] texts, the negatives of image anchors; [1] images.

    Args:
        capacity: m.
        dimension: d.
        device, dtype: of the embeddings.
    """

    rows: Tensor
    keys: Tensor | None

    def __init__(self, capacity: int, dimension: int, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.capacity = capacity
        rows = torch.zeros(2, self.own_capacity, dimension, device=device, dtype=dtype)
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("keys", None, persistent=False)  # (m,) int64, once a batch has keys
        self.active = 0  # number of filled rows
        self.head = 0  # position of the next row

    @property
    def own_capacity(self) -> int:
        """Rows on this process: all."""
        return self.capacity

    @property
    def own_active(self) -> int:
        """Filled rows on this process: all."""
        return self.active

    def push(self, batch: Batch) -> list[slice]:
        """Replace the oldest pairs by the batch's last m; return their places in order, as one slice or two.

        A non-finite batch is replaced by the pairs pushed before it, or by unit vectors if there are too few.
        """
        count = min(batch.size, self.capacity)
        places, before = self._places(self.head, count), self._places(self.head - count, count)
        for rows, latest in zip(self.rows, (batch.all_text[-count:], batch.all_image[-count:]), strict=True):
            earlier = torch.cat([rows[some] for some in before])
            if self.active < count:
                earlier = torch.zeros_like(latest)
                earlier[:, 0] = 1
            new = torch.where(batch.finite, latest, earlier)
            for some, part in zip(places, new.split([some.stop - some.start for some in places]), strict=True):
                rows[some] = part
        if batch.keys is not None:
            self._push_keys(batch.keys[-count:], places)
        elif self.keys is not None:
            unlike = self.unlike_keys(self.keys.device)
            for some in places:
                self.keys[some] = unlike[some]
        self.head = (self.head + count) % self.capacity
        self.active = min(self.active + count, self.capacity)
        return places

    def unlike_keys(self, device: torch.device) -> Tensor:
        """Keys of what has none, each like no other, for the places that are kept here; a data set numbers its cells
        without a key -1, -2, ..."""
        return torch.arange(self.own_capacity, device=device) - 2**62

    def _push_keys(self, latest: Tensor, places: list[slice]) -> None:
        if self.keys is None:
            self.keys = self.unlike_keys(latest.device)
        for some, part in zip(places, latest.split([some.stop - some.start for some in places]), strict=True):
            self.keys[some] = part

    def _places(self, start: int, count: int) -> list[slice]:
        """`count` places from `start` on, as one slice or two."""
        start %= self.capacity
        end = start + count
        if end <= self.capacity:
            return [slice(start, end)]
        return [slice(start, self.capacity), slice(0, end - self.capacity)]

    def state(self) -> dict[str, Tensor]:
        keys = {} if self.keys is None else {"ring_keys": self.keys}
        return {"ring": self.rows, "active": torch.tensor(self.active), "ring_head": torch.tensor(self.head)} | keys

    def restore(self, state: dict[str, Tensor]) -> None:
        """Load the result of `state`."""
        self.rows.copy_(state["ring"])
        keys = state.get("ring_keys")  # copied: the next push writes into it
        self.keys = None if keys is None else keys.to(self.rows.device, copy=True)
        self.active, self.head = int(state["active"]), int(state["ring_head"])
