"""What components see of a run: `Training`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from open_clip_ext.losses import Loss


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
