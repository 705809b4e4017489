"""A ring buffer of the latest embeddings of the training set, and the base of the estimators that have one."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from open_clip_ext.batch import Batch
from open_clip_ext.distributed import LocalTensors, rank, world_size
from open_clip_ext.memory import check_fits
from open_clip_ext.normalizers.base import Normalizer
from open_clip_ext.surrogates import Identity, Surrogate


class EmbeddingRing(LocalTensors):
    """The latest m pairs of embeddings, (2, m, d): [0] texts, the negatives of image anchors; [1] images.

    Args:
        capacity: m.
        dimension: d.
        device, dtype: of the embeddings.
        split: whether process r keeps the places r, r + W, r + 2W, ... alone.
    """

    local_tensors = ("rows", "keys")

    def __init__(
        self, capacity: int, dimension: int, device: torch.device, dtype: torch.dtype, split: bool = False
    ):
        super().__init__()
        self.capacity = capacity
        self._first, self._step = (rank(), world_size()) if split else (0, 1)
        self.rows = torch.zeros(2, self._num_local(capacity), dimension, device=device, dtype=dtype)
        self.rows[:, :, 0] = 1  # unit vectors, also where a batch that is not finite fills them
        self.keys: Tensor | None = None  # (m,) int64, once a batch has keys
        self.active = 0  # number of filled rows
        self.head = 0  # position of the next row

    def _num_local(self, places: int) -> int:
        """Number of this process's positions among the first `places` of the ring."""
        return len(range(self._first, places, self._step))

    @property
    def own_active(self) -> int:
        """Number of filled rows on this process; rows fill in order."""
        return self._num_local(self.active)

    def push(self, batch: Batch) -> list[slice]:
        """Replace the oldest pairs by the batch's last m; return this process's rows that it fills, one or two slices.

        Under a non-finite batch rows and keys stay.
        """
        count = min(batch.size, self.capacity)
        if batch.keys is not None and self.keys is None:
            self.keys = self.unlike_keys(batch.keys.device)
        places = self._places(count)
        for local_rows, pairs in places:
            for rows, features in zip(self.rows, (batch.all_text, batch.all_image), strict=True):
                earlier = rows[local_rows]
                torch.where(batch.finite, features[-count:][pairs], earlier, out=earlier)
            if self.keys is not None:
                keys = self.unlike_keys(self.keys.device)[local_rows]
                if batch.keys is not None:
                    keys = batch.keys[-count:][pairs]
                self.keys[local_rows] = torch.where(batch.finite, keys, self.keys[local_rows])
        self.head = (self.head + count) % self.capacity
        self.active = min(self.active + count, self.capacity)
        return [local_rows for local_rows, _ in places]

    def _places(self, count: int) -> list[tuple[slice, slice]]:
        """The next `count` places, as one slice of this process's rows or two, each with a slice of `count` pairs."""
        wrapped = max(0, self.head + count - self.capacity)
        places = []
        for begin, end, pair in ((self.head, self.head + count - wrapped, 0), (0, wrapped, count - wrapped)):
            if begin < end:
                first_local = (self._first - begin) % self._step
                pairs = slice(pair + first_local, pair + end - begin, self._step)
                places.append((slice(self._num_local(begin), self._num_local(end)), pairs))
        return places

    def unlike_keys(self, device: torch.device) -> Tensor:
        """Keys for pairs without one, for this process's rows: each differs from all others.

        A data set gives samples without a key -1, -2, ...
        """
        return torch.arange(self.rows.shape[1], device=device) - 2**62

    def state(self) -> dict[str, Tensor]:
        keys = {} if self.keys is None else {"ring_keys": self.keys}
        return {"ring": self.rows, "active": torch.tensor(self.active), "ring_head": torch.tensor(self.head)} | keys

    def restore(self, state: dict[str, Tensor]) -> None:
        """Load the result of `state`."""
        self.rows.copy_(state["ring"])
        self.rows[:, :, 0] += (self.rows == 0).all(dim=2)  # places never filled, in states of earlier versions
        keys = state.get("ring_keys")  # copied: the next push writes into it
        self.keys = None if keys is None else keys.to(self.rows.device, copy=True)
        self.active, self.head = int(state["active"]), int(state["ring_head"])


class RingNormalizer(Normalizer):
    """Base of the estimators that compare an anchor with up to m vectors, made of a ring's embeddings.

    Args: `eps` and `surrogate` are the loss's; for the options see the bodies of the classes.

    Class attributes:
        size: name of the option that is m.
    """

    allows_keys = True
    differentiable = True
    size: ClassVar[str]
    ring: EmbeddingRing  # which `materialize` makes

    def __init__(self, eps: float = 1e-14, surrogate: Surrogate | None = None, **options: Any):
        super().__init__(**options)
        self.eps = eps
        self.surrogate = surrogate or Identity()
        self.capacity = self._max_capacity

    @property
    def _max_capacity(self) -> int:
        """m, as the option gives it, before `limit_to`."""
        return getattr(self, self.size)

    def limit_to(self, num_samples: int) -> None:
        self.capacity = min(self._max_capacity, num_samples)

    def description(self) -> str:
        capped = f", {self.capacity} for as many samples" if self.capacity < self._max_capacity else ""
        return super().description() + capped

    def check_memory(self, dimension: int, device: torch.device | str, processes: int) -> None:
        needed = sum(self.memory(dimension, processes).values())
        check_fits(self.size, f"{self.capacity} of dimension {dimension}", needed, device, "lower it")

    def check_state(self, state: dict[str, Tensor], dimension: int) -> None:
        super().check_state(state, dimension)
        if "ring" in state and state["ring"].shape[1] != self.capacity:
            saved = state["ring"].shape[1]
            raise ValueError(f"{self.size}: {self.capacity} where the state has {saved}, at most one per sample")
