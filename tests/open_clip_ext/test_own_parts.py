"""Parts of a user's own, as the base classes allow them."""

import pytest
import torch
from numerics import unit

from open_clip_ext.losses import GlobalContrastiveLoss
from open_clip_ext.normalizers import BatchNormalizer, Normalizer, Queue
from open_clip_ext.objectives import Compositional, Unified
from open_clip_ext.surrogates import Identity, Surrogate
from open_clip_ext.temperatures import FixedTemperature, LearnableTemperature

BATCH, DIMENSION = 7, 5


def inputs():
    generator = torch.Generator().manual_seed(0)
    image = unit(generator, BATCH, DIMENSION)
    text = torch.nn.functional.normalize(image + 0.7 * unit(generator, BATCH, DIMENSION), dim=1)
    return image.requires_grad_(), text.requires_grad_(), torch.tensor(6.0, dtype=torch.float64, requires_grad=True)


class Linear(Normalizer):
    """alpha from the sum of both embeddings, for which autograd gives one gradient for both; with parameters."""

    name = "linear"
    differentiable = True

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(unit(torch.Generator().manual_seed(1), 2, DIMENSION))

    def forward(self, batch, updated=None):
        both = batch.image + batch.text
        return torch.stack([both @ self.weight[0], both @ self.weight[1]]) - batch.positives / batch.tau


@pytest.mark.parametrize("temperature", [LearnableTemperature(rho=2.0), FixedTemperature()])
def test_a_normalizer_may_share_and_train(temperature):
    loss = GlobalContrastiveLoss(Linear(), temperature, Unified)
    image, text, scale = inputs()
    weight = loss.normalizer.weight
    leaves = [image, text, weight] + ([scale] if temperature.trains_logit_scale else [])
    actual = torch.autograd.grad(loss(image, text, scale), leaves)

    tau, positives = 1 / scale, (image * text).sum(dim=1)
    both = image + text
    alpha = torch.stack([both @ weight[0], both @ weight[1]]) - positives / tau
    gaps = torch.stack([image @ text.T, text @ image.T]) - positives[:, None]
    others = ~torch.eye(BATCH, dtype=torch.bool)
    g = (gaps / tau).exp()[:, others].view(2, BATCH, BATCH - 1).mean(dim=2)
    value = (tau * ((-alpha).exp() * (loss.eps + g) + alpha - 1 + temperature.rho)).mean(dim=1).sum()
    for one, other in zip(actual, torch.autograd.grad(value, leaves), strict=True):
        torch.testing.assert_close(one, other)


class Doubled(Surrogate):
    name = "doubled"

    def value(self, gap):
        return 2 * gap

    def slope(self, gap):
        return 2.0


class DoubledInPlace(Doubled):
    def value(self, gap):
        return gap.mul_(2)


class DoubledByTensor(Doubled):
    def slope(self, gap):
        return torch.full_like(gap, 2.0)


class DoubledIdentity(Identity):
    """No identity any more."""

    value = Doubled.value
    slope = Doubled.slope


@pytest.mark.parametrize("surrogate", [Doubled, DoubledIdentity, DoubledInPlace])
@pytest.mark.parametrize("normalizer, objective", [("batch", Compositional), ("queue", Unified)])
def test_a_slope_may_be_a_number(surrogate, normalizer, objective):
    def gradients(own):
        parts = BatchNormalizer() if normalizer == "batch" else Queue(queue_size=20, surrogate=own)
        loss = GlobalContrastiveLoss(parts, LearnableTemperature(rho=2.0), objective, own)
        found = []
        for _ in range(2):
            leaves = inputs()
            value = loss(*leaves)
            found += [value.detach(), *torch.autograd.grad(value, leaves)]
        return found

    for one, other in zip(gradients(surrogate()), gradients(DoubledByTensor()), strict=True):
        torch.testing.assert_close(one, other)
