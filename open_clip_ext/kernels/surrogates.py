"""The surrogates' values in the memory of their argument."""

from torch import Tensor

from open_clip_ext.surrogates import Identity, PowerHinge, Surrogate


def is_linear(surrogate: Surrogate) -> bool:
    """Whether l(x) = x, so that 1 / tau can be put into one of the factors of a product of matrices."""
    return type(surrogate) is Identity


def value_(surrogate: Surrogate, gap: Tensor) -> Tensor:
    """l(x), written over `gap` where its form is known here."""
    if is_linear(surrogate):
        return gap
    if type(surrogate) is PowerHinge:
        return gap.add_(surrogate.margin).clamp_(min=0).pow_(surrogate.power)
    return surrogate.value(gap)
