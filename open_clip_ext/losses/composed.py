"""A loss with replaceable parts: it passes calls on to the parts, and saves their state with its own."""

from typing import Any

import torch

from open_clip_ext.errors import InputError
from open_clip_ext.losses.graphed import GraphedLoss
from open_clip_ext.normalizers.base import Normalizer
from open_clip_ext.objectives import Objective
from open_clip_ext.options import Part
from open_clip_ext.side_model import below
from open_clip_ext.surrogates import Surrogate
from open_clip_ext.temperatures import Temperature


class ComposedLoss(GraphedLoss):
    """Base of `GlobalContrastiveLoss`, whose constructor sets the parts."""

    normalizer: Normalizer
    temperature: Temperature
    objective: type[Objective]
    surrogate: Surrogate  # in use; a recovery of statistics may have another than the loss's own
    _own_surrogate: Surrogate
    negatives: str
    reference_gap: bool
    consistency: float

    def _check_parts(self, normalizer: Normalizer, temperature: Temperature, objective: type[Objective]) -> None:
        """Raise InputError if they or the options do not fit together."""
        if self.negatives != "cross" and not normalizer.intra_modal:
            raise InputError(
                f"{self.negatives!r} with normalizer {normalizer.name!r}, which has negatives of the other modality "
                "only; use 'cross'", "negatives",
            )
        for part in (normalizer, temperature):
            if self.loss_graph and not part.can_capture:
                raise InputError(f"with {part.name!r}, whose steps differ in what they launch", "loss_graph")
            if self.reference_gap and not part.allows_reference:
                raise InputError(f"with {part.name!r}, which takes unit vectors of one model only", "reference_gap")
        if self.reference_gap and self.negatives != "cross":
            raise InputError(f"with negatives {self.negatives!r}; use 'cross'", "reference_gap")
        if self.reference_gap and self.consistency:
            raise InputError("with reference_gap, whose features are not unit vectors of one model", "consistency")
        if objective.through_alpha and not normalizer.differentiable:
            raise InputError(
                f"{objective.name!r} needs a normalizer that is a function of the embeddings; "
                f"with normalizer {normalizer.name!r} use 'compositional'", "encoder_objective",
            )
        if self.negatives == "views" and not temperature.allows_views:
            raise InputError(
                f"{self.negatives!r} with temperature {temperature.name!r}, which has one network for each view; use "
                "'both' or 'cross'", "negatives",
            )

    @property
    def follows_epochs(self) -> bool:  # type: ignore[override]
        return self.normalizer.follows_epochs or self.temperature.follows_epochs

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.normalizer.set_epoch(epoch)
        self.temperature.set_epoch(epoch)

    def capture_state(self) -> tuple[Any, ...] | None:
        of_normalizer = self.normalizer.capture_state()
        return None if of_normalizer is None else (self.surrogate, *of_normalizer, *self.temperature.capture_state())

    def set_steps_per_pass(self, steps: int, passes: float | None = None) -> None:
        self.normalizer.set_steps_per_pass(steps, passes)

    def settings_of_length(self) -> dict[str, float]:
        return self.normalizer.settings_of_length()

    def memory(self, dimension: int, processes: int) -> dict[str, int]:
        return self.normalizer.memory(dimension, processes)

    def limit_to(self, num_samples: int) -> None:
        self.normalizer.limit_to(num_samples)

    def description(self) -> str:
        parts = {
            "normalizers": self.normalizer.description(), "temperature": self.temperature.name,
            "surrogate": self.surrogate.name, "encoder objective": self.objective.name,
        }
        return ", ".join(f"{part} {name}" for part, name in parts.items())

    def materialize(self, dimension: int, device: torch.device, dtype: torch.dtype) -> None:
        self.normalizer.materialize(dimension, device, dtype)
        self.temperature.materialize(dimension, device, dtype)
        super().materialize(dimension, device, dtype)  # last, so that after a failure the next call allocates again

    def full_state(self) -> dict[str, Any]:
        state = {f"state.{name}": value for name, value in self.normalizer.full_state().items()}
        state |= {f"temperature.{name}": value for name, value in self.temperature.full_state().items()}
        # What the state depends on: a table's rows on the gaps, and a temperature's on the scheme, if it has any.
        names = {"normalizer": self.normalizer.name}
        if self.normalizer.needs_index:
            names |= {"surrogate": self._own_surrogate.name, "negatives": self.negatives}
        if type(self.temperature).full_state is not Temperature.full_state:
            names["temperature"] = self.temperature.name
        return names | super().full_state() | state

    def check_state(self, state: dict[str, Any], dimension: int = 0) -> None:
        names = {"normalizer": self.normalizer.name, "temperature": self.temperature.name,
                 "surrogate": self._own_surrogate.name, "negatives": self.negatives}  # fmt: skip
        for kind, name in names.items():
            if state.get(kind, name) != name:
                raise ValueError(f"{kind}: {name!r} where the state is of {state[kind]!r}")
        super().check_state(state)
        for part, part_state in self._states_of_parts(state):
            part.check_state(part_state, int(state["dimension"]))

    def load_full_state(self, state: dict[str, Any]) -> None:
        super().load_full_state(state)
        for part, part_state in self._states_of_parts(state):
            part.load_full_state(part_state)

    def _states_of_parts(self, state: dict[str, Any]) -> list[tuple[Part, dict[str, Any]]]:
        return [(self.normalizer, below(state, "state.")), (self.temperature, below(state, "temperature."))]
