"""The surrogates' values, computed in place."""

from torch import Tensor

from open_clip_ext.surrogates import Identity, PowerHinge, Surrogate


def is_linear(surrogate: Surrogate) -> bool:
    """Whether l(x) = x, so that 1 / tau can be multiplied into one factor of a matrix product."""
    return type(surrogate) is Identity


def value_(surrogate: Surrogate, gap: Tensor) -> Tensor:
    """l(x), written over `gap` for the surrogates of this package."""
    if is_linear(surrogate):
        return gap
    if type(surrogate) is PowerHinge:
        return gap.add_(surrogate.margin).clamp_(min=0).pow_(surrogate.power)
    return surrogate.value(gap)
