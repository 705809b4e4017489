"""Adam's step for values that the losses update themselves."""

from collections.abc import Sequence

from torch import Tensor

BETAS, EPS = (0.9, 0.999), 1e-8


def adam_step(
    gradient: Tensor, moments: Sequence[Tensor], count: int, betas: tuple[float, float] = BETAS
) -> tuple[Tensor, list[Tensor]]:
    """Adam's step for learning rate 1, to be subtracted; and the new first and second moment.

    Args:
        gradient: of any shape.
        moments: the old moments, of the same shape each.
        count: which step this is, from 1, for the bias correction; FastCLIP-v2 counts epochs instead.
        betas: in [0, 1).
    """
    new = [
        beta * moment + (1 - beta) * gradient**power
        for power, (beta, moment) in enumerate(zip(betas, moments, strict=True), start=1)
    ]
    mean, square = (moment / (1 - beta**count) for beta, moment in zip(betas, new, strict=True))
    return mean / (square.sqrt() + EPS), new
