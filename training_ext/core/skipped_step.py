"""Whether a run goes on after a NaN: if the gradient scaler of `--precision amp` has skipped that step."""

import logging
from typing import Any

import torch

from open_clip_ext.distributed import rank
from open_clip_ext.losses import NonFiniteError

# A scaler halves its scale, at first 2^16, at each step that it skips. Below 1 it no longer enlarges gradients: what
# still overflows float16 are they themselves.
LEAST_SCALE = 1.0


def pass_over(error: NonFiniteError, model: torch.nn.Module, scaler: Any) -> None:
    """Warn of a step that was not finite and was skipped, as OpenCLIP goes on; one process may call this alone.

    Args:
        error: names the step.
        scaler: a GradScaler, or None.

    Raises:
        NonFiniteError: `error`: no scaler, one whose scale is below `LEAST_SCALE`, or a weight that is not
            finite, of this process's shards.
    """
    if scaler is None or not scaler.is_enabled() or scaler.get_scale() < LEAST_SCALE:
        raise error
    own = (weights.to_local() if hasattr(weights, "to_local") else weights for weights in model.parameters())
    if not torch.stack([weights.isfinite().all() for weights in own]).all():  # one wait for the device
        raise error
    if rank() == 0:
        logging.warning(f"{error}; the gradient scaler has skipped it, and the training goes on")


def check_scale(scaler: Any, steps: int) -> None:
    """Raise NonFiniteError if a scaler that has skipped the latest `steps` has a scale below `LEAST_SCALE`."""
    if scaler is not None and scaler.is_enabled() and (scale := scaler.get_scale()) < LEAST_SCALE:
        raise NonFiniteError(f"the gradient scaler has skipped the last {steps} step(s); its scale is {scale:g}")
