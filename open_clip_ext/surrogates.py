"""Pairwise surrogates l, applied to a negative's similarity gap x = s_ij - s_ii.

g_i = mean over j != i of exp(l(s_ij - s_ii) / tau).
"""

from torch import Tensor

from open_clip_ext.options import AT_LEAST_0, Part, option


class Surrogate(Part):
    """Base of the surrogates."""

    def value(self, gap: Tensor) -> Tensor:
        """l(x), in the shape of `gap`, which it may overwrite; so may the caller with the result."""
        raise NotImplementedError

    def slope(self, gap: Tensor) -> Tensor | float:
        """dl/dx, a number or a new tensor in the shape of `gap`; called before `value`, which may overwrite `gap`."""
        raise NotImplementedError


class Identity(Surrogate):
    """l(x) = x: the global contrastive loss itself (NeuCLIP, Eq. 1)."""

    name = "identity"

    def value(self, gap: Tensor) -> Tensor:
        return gap

    def slope(self, gap: Tensor) -> float:
        return 1.0


def is_linear(surrogate: Surrogate) -> bool:
    """Whether l(x) = x, so that 1 / tau can be multiplied into one factor of a matrix product."""
    return type(surrogate) is Identity


class PowerHinge(Surrogate):
    """l(x) = max(x + margin, 0)^margin_power: a negative at least `margin` below the positive gets no gradient.

    This is TuneCLIP's hinged global contrastive loss (Section 4.2, Eq. 8-9). In plain PyTorch:
    `equations.tuneclip_phi`, `equations.tuneclip`.

    Args:
        margin: m, in units of similarity.
        margin_power: 2 in the equations; presumably the "margin smoothing" of Table 6.
    """

    name = "hinge"
    margin: float = option(0.1, "similarity below the positive from which a negative gets no gradient", **AT_LEAST_0)
    margin_power: float = option(
        2.0, "power of the hinge", valid=lambda value: 1 <= value <= 100, expected="from 1 to 100"
    )

    def value(self, gap: Tensor) -> Tensor:
        return gap.add_(self.margin).clamp_(min=0).pow_(self.margin_power)

    def slope(self, gap: Tensor) -> Tensor:
        if self.margin_power == 1:
            return (gap > -self.margin).to(gap)
        return (gap + self.margin).clamp_(min=0).pow_(self.margin_power - 1).mul_(self.margin_power)


SURROGATES = {surrogate.name: surrogate for surrogate in (Identity, PowerHinge)}
