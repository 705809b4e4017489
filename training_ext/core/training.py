"""What components see of a run: `Training`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from open_clip_ext.losses import Loss, NonFiniteError
from training_ext.core.steps import OptimizerSteps


@dataclass
class Training:
    """What a run trains with; None until it is built.

    Args:
        components: of the run.
        data: the train data, `rows.TrainData`.
        state: what checkpoints have of this package, `state.State`.
        model: without wrappers.
        loss: of this package; None with OpenCLIP's own.
        new_loss: builds one like it.
        transform, tokenizer: of the evaluated model.
        steps: those that the optimizer has made.
    """

    components: Sequence[Any]
    new_loss: Callable[[], Loss]
    data: Any = None
    state: Any = None
    model: Any = None
    optimizer: Any = None
    loss: Loss | None = None
    transform: Any = None
    tokenizer: Any = None
    steps: OptimizerSteps = field(default_factory=OptimizerSteps)

    def check_finite(self) -> None:
        """Look for a NaN or an infinity that this package's loss has met since the last call.

        Raises:
            NonFiniteError: there is one, see `OptimizerSteps.pass_over`.
        """
        if self.loss is None:
            return
        try:
            self.loss.raise_if_not_finite()
        except NonFiniteError as error:
            self.steps.pass_over(error, self.model)
