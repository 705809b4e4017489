"""The interface of a normalizer estimator: alpha_i ~ log(eps + g_i) over the whole data set."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from open_clip_ext.options import Option
from open_clip_ext.pairs import Pairs


@dataclass
class Batch:
    """One optimiser step's global batch, equal on every process and without graph.

    Args:
        image, text: (B, d) unit vectors.
        positives: s_ii, (B,).
        log_batch: L = log(eps + g) over the batch, (2, B), images as anchors first.
        tau: temperatures, 0-d or (2, B).
        index: rows of the samples in the data set, (B,) int64, or None.
        finite: 0-d bool on the device, False if any of it is not finite or a row is out of range: then nothing of it
            may enter the state.
    """

    image: Tensor
    text: Tensor
    positives: Tensor
    log_batch: Tensor
    tau: Tensor
    index: Tensor | None
    finite: Tensor

    def numbers(self) -> "Batch":
        """The same if it is finite, else with some numbers: sums over it are finite, and may be multiplied by 0."""
        instead = {"image": 0.0, "text": 0.0, "positives": 0.0, "log_batch": 0.0, "tau": 1.0}
        return replace(
            self, **{name: torch.where(self.finite, getattr(self, name), value) for name, value in instead.items()}
        )


class Normalizer(nn.Module):
    """Base of the estimators.

    `update` moves the state, once per optimiser step; `forward` then gives alpha for this process's anchors. State is
    kept on the device, and only `full_state` and `load_full_state` may wait for the device.

    Class attributes:
        name: as given to `--normalizer`.
        options: settings of the constructor, each a command-line flag.
        needs_index: whether state is kept per sample; the constructor then takes `num_samples` and `device`.
        differentiable: whether alpha is a function of the embeddings; the constructor then takes `eps` and `surrogate`.
        knows_both_sides: whether alpha also stands for negatives of the anchor's own side (`--negatives both`).
    """

    name: ClassVar[str]
    options: ClassVar[tuple[Option, ...]] = ()
    needs_index: ClassVar[bool] = False
    differentiable: ClassVar[bool] = False
    knows_both_sides: ClassVar[bool] = False
    num_samples: int  # where `needs_index`

    @classmethod
    def complete(cls, settings: dict, epochs: int | None, given: Collection[str]) -> None:
        """As `Loss.complete`."""

    def memory(self, dimension: int, processes: int) -> dict[str, int]:
        """Bytes that each of `processes` keeps for embeddings of `dimension`, by what they are, without rows per
        sample."""
        return {}

    def check_memory(self, dimension: int, device: torch.device | str, processes: int) -> None:
        """Raise InputError if what each of `processes` keeps for embeddings of `dimension` cannot fit on `device`."""

    def set_steps_per_epoch(self, steps: int) -> None:
        """As `Loss.set_steps_per_epoch`."""

    def description(self) -> str:
        """Its name, and what is worth knowing about it in the log."""
        return self.name

    def set_epoch(self, epoch: int) -> None:
        """Called before each epoch, 0-based."""

    def update(self, batch: Batch) -> None:
        """Move the state with one global batch. Every process calls it with the same batch."""

    def forward(self, pairs: Pairs, positives: Tensor, tau: Tensor, batch: Batch) -> Tensor:
        """alpha of this process's anchors, (2, b), with a graph to the inputs if `differentiable`.

        The inputs are separate leaves: `positives` is not computed from `pairs`. Parameters of a normalizer that
        require a gradient get it, too.

        Args:
            pairs: this process's embeddings.
            positives: s_ii of this process, (b,).
            tau: temperatures of this process's anchors, 0-d or (2, b).
            batch: the global batch, the one of the last `update` unless the loss is in evaluation mode.
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
        """Take over what `full_state` gave, under any number of processes."""
