"""Base class of the estimators of log-normalizers: alpha_i ~ log(eps + g_i) over the whole data set."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from open_clip_ext.batch import Batch
from open_clip_ext.options import Part


class Normalizer(Part, nn.Module):
    """Base class of the estimators.

    `materialize` allocates the state, `update` updates it once per optimizer step, and `forward` then returns alpha of
    this process's anchors. State is kept on the device, in buffers if equal on every process, else in
    `LocalTensors`; only `full_state` and `load_full_state` may wait for the device.

    Class attributes, in addition to those of `Part`:
        differentiable: whether alpha is a function of the embeddings; the constructor then takes `eps` and `surrogate`.
        can_capture: whether `capture_state` is defined: the host launches the same operations in each step of an epoch.
        allows_keys: whether samples with the same key can be left out of one another's estimate.
        allows_reference: whether the features may be concatenated with a reference model's (`reference_gap`).
        intra_modal: whether alpha can cover negatives of the anchor's own modality (`--negatives both`).
    """

    can_capture = False
    differentiable: ClassVar[bool] = False
    allows_keys: ClassVar[bool] = False
    allows_reference: ClassVar[bool] = False
    intra_modal: ClassVar[bool] = False

    def check_memory(self, dimension: int, device: torch.device | str, processes: int) -> None:
        """Raise InputError if one process's state for embeddings of `dimension` cannot fit on `device`."""

    def check_batch(self, size: int) -> None:
        """Raise InputError if global batches of `size` pairs make the estimator useless."""

    def description(self) -> str:
        """The name, with settings worth logging."""
        return self.name

    def update(self, batch: Batch) -> Any:
        """Update the state with one global batch, from its `all_` tensors, so that every process does the same.

        Returns:
            What `forward` needs of this update, or None.
        """
        return None

    def capture_state(self) -> tuple[Any, ...] | None:
        """What `capture` and `forward` read or write besides the batch, for `StepGraph.run`; None if the next step
        cannot be captured. Numbers of the host that change from step to step, not from epoch to epoch, must be in it.
        """
        return None

    def capture(self, batch: Batch) -> Any:
        """`update` for a graph: what is launched on the device alone."""
        return self.update(batch)

    def replayed(self, batch: Batch) -> None:
        """Do what `update` does beside `capture`, after each replay."""

    def forward(self, batch: Batch, updated: Any = None) -> Tensor:
        """alpha of this process's anchors, (2, b), with a graph to the inputs if `differentiable`.

        Parameters of a normalizer that require a gradient get it, too.

        Args:
            batch: its `image`, `text`, `positives` and `tau` are separate leaves; `positives` does not depend on the
                embeddings.
            updated: the result of `update` for this batch; None in evaluation, where the batch is not in the state.
        """
        raise NotImplementedError

    def diagnostics(self, log_batch: Tensor, alpha: Tensor) -> dict[str, Tensor]:
        """Values for the log: 0-d tensors, on any device, for the last batch.

        Args:
            log_batch: L, (2, B).
            alpha: results of `forward` on all processes, (2, B).
        """
        return {}
