"""The gradient of `prototype_gradient` (NeuCLIP, Eq. 12) with AdaGrad's step on a GPU: two matrix products and two
kernels in place of 37 operations."""

import math
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.functional import normalize

from open_clip_ext.batch import Batch
from open_clip_ext.kernels import prototype_kernels
from open_clip_ext.kernels.log_sum import number_of_equals
from open_clip_ext.kernels.prototype_gradient import PrototypeGradient
from open_clip_ext.objectives import Objective, Unified
from open_clip_ext.surrogates import Identity

NUMBERS = 2048  # of vectors that a program of `descend` has, unless one vector has more
# Largest deviation from the single operations in `deviation`: both round factors of products to TF32, by at most 2^-10,
# but not the same ones.
BOUND = 2**-9


def sizes_of(m: int) -> dict[str, int]:
    """How a program of `weigh` holds m exponents."""
    width = triton.next_power_of_2(m)
    return {"BM": width, "num_warps": min(max(width // 512, 1), 16)}


class FusedPrototypeUpdate(PrototypeGradient):
    """The updates of a step: `write_in_directions`, then `descend`. For l(x) = x and prototypes in float32 that are all
    in use and not split.

    Args:
        lengths: the prototypes' norms before the first update, (2, m), with 1 in place of 0.
        arguments: of `PrototypeGradient`.
    """

    def __init__(self, batch: Batch, objective: type[Objective], *arguments: Any, lengths: Tensor, **more: Any):
        super().__init__(batch, objective, *arguments, **more)
        self.inverse = lengths.reciprocal()
        self.shift, self.anchor_weight = self.shift.contiguous(), self.anchor_weight.contiguous()
        self.log_batch = batch.all_log_batch.contiguous()

    def write_in_directions(self, gradient: Tensor, prototypes: Tensor) -> Tensor:
        """Write G into `gradient`, (2, m, d); 0 if the batch is not finite. Return alpha of all anchors, (2, B)."""
        alpha, m = torch.empty_like(self.log_batch), prototypes.shape[1]
        anchor_keys, keys = self.keys or (None, None)
        for part in self.parts:
            size = part.stop - part.start
            products = self.similarities[: 2 * size * m].view(2, size, m)
            torch.bmm(self.anchors[:, part], prototypes.mT, out=products)
            with torch.cuda.device_of(products):
                prototype_kernels.weigh[(2 * size,)](
                    products, self.inverse, self.shift, self.log_batch, self.anchor_weight, anchor_keys, keys, alpha,
                    self.log_eps, size, part.start, self.batch.size, m,
                    UNIFIED=self.objective is Unified, **sizes_of(m),
                )  # fmt: skip
            gradient.baddbmm_(products.mT, self.anchors[:, part], beta=0 if part.start == 0 else 1)
        return alpha

    def descend(self, gradient: Tensor, prototypes: Tensor, sums: Tensor, lr: float, decay: float, eps: float) -> None:
        """AdaGrad's step in the prototypes and its sums of squares, (2, m, d), for G."""
        assert gradient.is_contiguous() and prototypes.is_contiguous() and sums.is_contiguous()
        rows, d = self.inverse.numel(), prototypes.shape[2]
        width = triton.next_power_of_2(d)
        height = max(1, NUMBERS // width)
        with torch.cuda.device_of(prototypes):
            prototype_kernels.descend[(triton.cdiv(rows, height),)](
                gradient, prototypes, sums, self.inverse, rows, lr, decay, eps, d, BR=height, BD=width,
            )  # fmt: skip


@torch.no_grad()
def deviation(objective: type[Objective], prototypes: Tensor) -> float:
    """Largest relative deviation of an update's alpha, movement of the prototypes, here random ones in the given
    shape, and AdaGrad's sums from those of the single operations, without keys and with."""
    return max(_deviation(objective, prototypes, has_keys) for has_keys in (False, True))


def _deviation(objective: type[Objective], prototypes: Tensor, has_keys: bool) -> float:
    pairs, device, generator = 304, prototypes.device, torch.Generator().manual_seed(0)
    m, dim = prototypes.shape[1:]

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu").to(device)

    image, text = normalize(random(2, pairs, dim), dim=2)
    batch = Batch.of_process(image, text, 0.05 + 0.01 * random(2, pairs).sigmoid(), log_batch=random(2, pairs))
    keys = (torch.arange(pairs, device=device) // 3, torch.arange(m, device=device) // 3) if has_keys else None
    start = random(2, m, dim)
    start[:, : m // 2] *= 2
    lengths = start.norm(dim=2)
    counts = m if keys is None else m - number_of_equals(*keys).float()
    options: dict[str, Any] = dict(active=m, own_active=m, split=False, counts=counts, keys=keys)
    gradient = torch.full_like(start, math.nan)
    alpha = PrototypeGradient(batch, objective, Identity(), 1e-6, **options).write(gradient, start, lengths)
    least, lr, decay, eps = gradient.square().mean(), 0.1, 1e-3 * gradient.abs().mean().item(), 1e-10
    gradient += decay * start
    sums = least + gradient.square()
    expected = [alpha, -lr * gradient / (sums.sqrt() + eps), sums]
    step = FusedPrototypeUpdate(batch, objective, Identity(), 1e-6, lengths=lengths, **options)
    vectors, sums = start.clone(), least.expand_as(start).contiguous()
    alpha = step.write_in_directions(gradient.fill_(math.nan), vectors)
    step.descend(gradient, vectors, sums, lr, decay, eps)
    actual = [alpha, vectors - start, sums]
    errors = [(one - other).norm() / other.norm() for one, other in zip(actual, expected, strict=True)]
    errors.append((step.inverse * vectors.norm(dim=2) - 1).norm() / (2 * m) ** 0.5)
    return torch.stack(errors).max().item()
