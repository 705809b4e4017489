"""The interface of a normalizer estimator: alpha_i ~ log(eps + g_i) over the whole data set."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from open_clip_ext.batch import Batch
from open_clip_ext.parts import Part


class Normalizer(Part, nn.Module):
    """Base of the estimators.

    `materialize` makes the state; `update` moves it, once per optimiser step; `forward` then gives alpha for this
    process's anchors. State is kept in buffers on the device, and only `full_state` and `load_full_state` may wait for
    the device.

    Class attributes, beside those of `Part`:
        differentiable: whether alpha is a function of the embeddings; the constructor then takes `eps` and `surrogate`.
        allows_keys: whether samples with the same key can be left out of one another's estimate.
        allows_reference: whether the embeddings may be those of a model beside a reference's, `reference_gap`.
        intra_modal: whether alpha also stands for negatives of the anchor's own modality (`--negatives both`).
    """

    differentiable: ClassVar[bool] = False
    allows_keys: ClassVar[bool] = False
    allows_reference: ClassVar[bool] = False
    intra_modal: ClassVar[bool] = False
    num_samples: int  # where `needs_index`

    def memory(self, dimension: int, processes: int) -> dict[str, int]:
        """Bytes that each of `processes` keeps for embeddings of `dimension`, by what they are, without rows per
        sample."""
        return {}

    def check_memory(self, dimension: int, device: torch.device | str, processes: int) -> None:
        """Raise InputError if what each of `processes` keeps for embeddings of `dimension` cannot fit on `device`."""

    def set_steps_per_epoch(self, steps: int, epochs: int | None = None) -> None:
        """As `Loss.set_steps_per_epoch`."""

    def limit_to(self, num_samples: int) -> None:
        """As `Loss.limit_to`."""

    def check_batch(self, size: int) -> None:
        """Raise InputError if global batches of `size` pairs leave nothing for the estimator to do."""

    def description(self) -> str:
        """Its name, and what is worth knowing about it in the log."""
        return self.name

    def set_epoch(self, epoch: int) -> None:
        """Called before each epoch, 0-based."""

    def materialize(self, dimension: int, device: torch.device, dtype: torch.dtype) -> None:
        """Make the state that depends on the embeddings' dimension, type or device. The loss calls it once, at the
        first batch or when a state is loaded."""

    def update(self, batch: Batch) -> Any:
        """Move the state with one global batch, by what it has of all processes: every process does the same.

        Returns:
            What `forward` wants to know of this update, or None.
        """
        return None

    def forward(self, batch: Batch, updated: Any = None) -> Tensor:
        """alpha of this process's anchors, (2, b), with a graph to the inputs if `differentiable`.

        Parameters of a normalizer that require a gradient get it, too.

        Args:
            batch: its `image`, `text`, `positives` and `tau` are separate leaves: `positives` is not computed from the
                embeddings.
            updated: what `update` returned for this batch; None in evaluation, where the batch is not in the state.
        """
        raise NotImplementedError

    def diagnostics(self, log_batch: Tensor, alpha: Tensor) -> dict[str, Tensor]:
        """0-d tensors worth a log line, on any device, for the last batch.

        Args:
            log_batch: L, (2, B).
            alpha: what `forward` gave on all processes, (2, B).
        """
        return {}

    def full_state(self) -> dict[str, Tensor]:
        """State as CPU tensors, whole on process 0, whatever the number of processes. Every process must call it."""
        return {}

    def load_full_state(self, state: dict[str, Tensor]) -> None:
        """Take over what `full_state` gave, under any number of processes; after `materialize` if there was any."""
