"""State of a loss: when it is allocated, on which device, and its form in a checkpoint."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from open_clip_ext.distributed import LocalTensors, rank
from open_clip_ext.options import Part

STATE_FORMAT = 1  # of `full_state`


class LossState(Part, LocalTensors):
    """Base of `Loss`: state that follows the batches' device and dtype, and that a checkpoint restores.

    Attributes:
        name: of the class, stored in the state, so that one loss cannot load another's.
        steps: training steps so far.
        dimension: of the embeddings, once known.
    """

    local_tensors = ("_like",)

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.steps = 0
        self.dimension = 0
        self._like = torch.empty(0)  # its device and dtype are the state's

    def materialize(self, dimension: int, device: torch.device, dtype: torch.dtype) -> None:
        self.dimension = dimension
        self._like = torch.empty(0, device=device, dtype=dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LossState":
        """Move the state as `Module.to` does, but keep float32: a table's logarithms do not survive 16 bits."""

        def convert(tensor: Tensor) -> Tensor:
            converted = fn(tensor)
            is_shorter = converted.is_floating_point() and converted.itemsize < 4 <= tensor.itemsize
            return tensor.to(converted.device) if is_shorter else converted

        return super()._apply(convert, recurse)

    # An evaluation may come first, in inference mode, whose tensors could never be trained.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _adapt(self, dimension: int, device: torch.device, dtype: torch.dtype) -> None:
        """Allocate the state at the first batch; move it where a later one is of another device or dtype."""
        if not self.dimension:
            self.to(device)
            self.materialize(dimension, device, dtype)
        elif self.dimension != dimension:
            raise ValueError(f"image_features: dimension {dimension} where the earlier batches had {self.dimension}")
        elif (self._like.device, self._like.dtype) != (device, dtype):
            self.to(device, dtype)

    def full_state(self) -> dict[str, Any]:
        """The loss's state as CPU tensors, numbers and strings, which `torch.load(weights_only=True)` reads.

        It does not depend on the number of processes: process 0 gets all of it, the others get no tensors. Every
        process must call it, and likewise `state_dict()`, which contains it.

        Raises:
            RuntimeError: the state is sharded over processes, and one has not called it within 5 minutes.
        """
        other = {"process": rank()} if rank() else {}
        return {
            "format": STATE_FORMAT, "loss": self.name, "steps": self.steps, **other,
            "dimension": self.dimension, "dtype": str(self._like.dtype).removeprefix("torch."),
        }

    def check_state(self, state: dict[str, Any], dimension: int = 0) -> None:
        """Raise ValueError if `load_full_state` cannot load the state; nothing is changed."""
        if "process" in state:
            raise ValueError(f"state: process {state['process']}'s, which has no tensors; load process 0's")
        if state.get("format") != STATE_FORMAT:
            saved_format = f"format {state['format']}" if "format" in state else "an older format"
            raise ValueError(f"state: {saved_format} where this open_clip_ext reads format {STATE_FORMAT}")
        if state["loss"] != self.name:
            raise ValueError(f"loss: {self.name!r} where the state is of {state['loss']!r}")
        if self.dimension and not state["dimension"]:
            raise ValueError("state: saved before the first batch; load it into a new loss, this one has had batches")

    def load_full_state(self, state: dict[str, Any]) -> None:
        """Load the result of `full_state` on process 0; every process loads all of it.

        Raises:
            ValueError: the state is of another loss, other sizes, another format or another process; nothing is
                changed.
        """
        self.check_state(state)
        self.steps = int(state["steps"])
        if state["dimension"]:
            dtype = torch.float64 if state["dtype"] == "float64" else torch.float32
            self.materialize(int(state["dimension"]), self._like.device, dtype)

    def get_extra_state(self) -> dict[str, Any]:
        state = self.full_state()
        return state if rank() else state | {"tensors": number_of_tensors(state)}

    @torch.inference_mode(False)
    def set_extra_state(self, state: dict[str, Any]) -> None:
        if (count := number_of_tensors(state)) != state.get("tensors", count):
            raise ValueError(
                f"state: {count} of its {state['tensors']} tensors; save it by torch.save, as "
                "torch.distributed.checkpoint loads only those that the loss has already, and a new loss has none"
            )
        self.load_full_state(state)


def number_of_tensors(state: dict[str, Any]) -> int:
    return sum(isinstance(value, Tensor) for value in state.values())
