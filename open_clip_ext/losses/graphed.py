"""A loss whose computation may be one CUDA graph."""

from typing import Any

from torch import Tensor

from open_clip_ext.distributed import world_size
from open_clip_ext.losses.accumulation import FirstCall, Inputs
from open_clip_ext.losses.base import Loss
from open_clip_ext.options import option
from open_clip_ext.step_graph import StepGraph


class GraphedLoss(Loss):
    """Base of the losses whose `compute` launches the same operations in each step of an epoch.

    A subclass passes what is for the host alone to `_graph.on_host`.
    """

    loss_graph: bool = option(False, "launch a step's loss as one CUDA graph")

    def __init__(self, accum_freq: int = 1, validate: bool = False, **options: Any):
        super().__init__(accum_freq, validate, **options)
        self._graph = StepGraph("loss_graph")

    def capture_state(self) -> tuple[Any, ...] | None:
        """What `compute` reads or writes besides its arguments, for `StepGraph.run`; None if the next step cannot be
        captured."""
        return ()

    def _captures(self, update_state: bool) -> tuple[Any, ...] | None:
        """What the graph of this call depends on; None where there is none."""
        if not (self.loss_graph and update_state):
            return None
        if world_size() > 1:
            self._graph.give_up("with several processes")
        if self._graph.failed:
            return None
        state = self.capture_state()
        return None if state is None else (self.epoch, self._is_float16, *state)

    def _value(self, inputs: Inputs, update_state: bool, shares: bool) -> Tensor:
        return super()._value(inputs, update_state, shares or self._captures(update_state) is not None)

    def _computed(self, inputs: Inputs, update_state: bool) -> FirstCall:
        depends_on = self._captures(update_state)
        if depends_on is None:
            return super()._computed(inputs, update_state)
        step = super()._computed
        return self._graph.run(lambda **inputs: step(inputs, update_state), inputs, depends_on).clone()

    def note(self, problems: Tensor, names: tuple[str, ...] | None = None) -> None:
        note = super().note
        if self._graph.capturing:  # each replay overwrites the tensor
            self._graph.on_host(lambda: note(problems.clone(), names))
        else:
            note(problems, names)
