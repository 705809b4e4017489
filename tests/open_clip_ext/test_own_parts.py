"""Parts of a user's own, as the base classes allow them."""

import math

import pytest
import torch
from documents import code
from numerics import unit

from open_clip_ext.losses import GlobalContrastiveLoss
from open_clip_ext.normalizers import BatchNormalizer, Normalizer, Queue
from open_clip_ext.objectives import Compositional, Unified
from open_clip_ext.options import option
from open_clip_ext.presets import LossPreset
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

    value, slope = Doubled.value, Doubled.slope


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


def test_state_per_sample_as_the_page_shows_it():
    """Against a loop over the visits of each sample."""
    (text,) = code("State per sample", "docs/extending.md")
    names = {"math": math, "torch": torch, "option": option, "LossPreset": LossPreset}
    exec(text, names)
    loss = GlobalContrastiveLoss(names["Average"](num_samples=9, average_visits=2), FixedTemperature(), Compositional)
    tau, expected = 1 / 6, {}
    for index in ([3, 1, 8, 0, 5, 2, 7], [1, 3, 4, 5, 0, 6, 2], [0, 1, 2, 3, 4, 5, 6]):
        image, text, scale = inputs()
        loss(image, text, scale, index=torch.tensor(index))
        gaps = torch.stack([image @ text.T, text @ image.T]) - (image * text).sum(dim=1)[:, None]
        weights = (gaps.detach() / tau).exp()
        others = ~torch.eye(BATCH, dtype=torch.bool)
        g = loss.eps + weights[:, others].view(2, BATCH, BATCH - 1).mean(dim=2)
        for place, row in enumerate(index):
            mean, visits = expected.get(row, (0.0, 0))
            visits = min(visits + 1, 2)
            expected[row] = (1 - 1 / visits) * mean + g[:, place] / visits, visits
    state = loss.full_state()
    for row, (mean, visits) in expected.items():
        torch.testing.assert_close(state["state.log_mean"][row].double(), mean.log(), rtol=1e-5, atol=1e-5)
        assert state["state.visits"][row].tolist() == [visits] * 2
    assert loss.diagnostics()["unvisited"] == 0 and len(expected) == 9
