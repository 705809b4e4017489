"""`OptimizerSteps`: which of the loop's steps the optimizer makes, and whether a run goes on after a NaN."""

import logging

import torch
from torch.optim import Optimizer

from open_clip_ext.distributed import rank
from open_clip_ext.losses import NonFiniteError

# A GradScaler halves its scale at each step that it skips: from 2^16 to 2^-24, float16's smallest number.
MOST_IN_A_ROW = 40


class OptimizerSteps:
    """Counts the steps that the optimizer has made, of those of the loop.

    A GradScaler (`--precision amp`) skips a step whose gradients are not finite, and OpenCLIP goes on.

    Attributes:
        made: steps of the optimizer.
    """

    def __init__(self) -> None:
        self.made = 0
        self._ended = self._since_made = self._passed_over = 0

    def count(self, optimizer: Optimizer) -> None:
        """Count the steps of this optimizer."""

        def made(*_: object) -> None:
            self.made += 1
            self._since_made = 0

        optimizer.register_step_post_hook(made)

    def end_step(self) -> None:
        """A step of the loop is done."""
        self._ended += 1
        self._since_made += 1

    def pass_over(self, error: NonFiniteError, model: torch.nn.Module) -> None:
        """Warn of a step that was not finite and was skipped; one process may call this alone.

        Raises:
            NonFiniteError: `error`: none was skipped, more than `MOST_IN_A_ROW` were, or a weight is not finite.
        """
        skips = self.made < self._ended and self._since_made <= MOST_IN_A_ROW
        if not (skips and are_finite(model)):
            raise error
        if rank() == 0 and self._passed_over < self._ended:
            self._passed_over = self._ended
            logging.warning(f"{error}; the gradient scaler has skipped it, and the training goes on")


def are_finite(model: torch.nn.Module) -> bool:
    """Whether all weights are, or this process's shards of them; waits for the device once."""
    own = (weights.to_local() if hasattr(weights, "to_local") else weights for weights in model.parameters())
    return bool(torch.stack([weights.isfinite().all() for weights in own]).all())
