"""What components see of a run: `Training`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from open_clip_ext.losses import Loss, NonFiniteError

SEVERAL = 5  # steps


@dataclass
class Training:
    """What a run trains with; None until it is built.

    Args:
        components: of the run.
        data: the train data, `rows.TrainData`.
        state: what checkpoints have of this package, `state.State`.
        model: without wrappers.
        reference: the frozen model of --distill-model.
        loss: of this package; None with OpenCLIP's own.
        new_loss: builds one like it.
        transform, tokenizer: of the evaluated model.
        scaler: the GradScaler of the epoch; None without.
        steps: of the loop, that this process has made.
        updated: the number of `steps` with the optimizer's latest; the gradient scaler has skipped those since.
        skipped: number of all steps that it has skipped.
    """

    components: Sequence[Any]
    new_loss: Callable[[], Loss]
    data: Any = None
    state: Any = None
    model: Any = None
    reference: Any = None
    optimizer: Any = None
    loss: Loss | None = None
    transform: Any = None
    tokenizer: Any = None
    scaler: Any = None
    steps: int = 0
    updated: int = 0
    skipped: int = 0
    passed_over = -1  # the number of steps at the latest NaN of a skipped one

    def check_finite(self, problem: NonFiniteError | None = None) -> None:
        """Raise NonFiniteError if this package's loss has met a NaN or an infinity since the last call, or else for the
        `problem`; not if the gradient scaler has skipped that step, see `skipped_step.pass_over`."""
        try:
            if self.loss is not None:
                self.loss.raise_if_not_finite()
        except NonFiniteError as error:
            problem = error
        if problem is not None and self.passed_over < self.steps:
            from training_ext.core.skipped_step import pass_over

            # No scale takes part in the forward pass, so several in a row are no single bad batches.
            is_one = self.steps - self.updated < SEVERAL
            pass_over(problem, self.model, self.scaler if is_one else None)
            self.passed_over = self.steps

    def check_scale(self) -> None:
        """Raise NonFiniteError if the gradient scaler has skipped the latest steps, and a smaller scale is no help."""
        if self.updated < self.steps:
            from training_ext.core.skipped_step import check_scale

            check_scale(self.scaler, self.steps - self.updated)
