"""`recover_statistics` with models and optimizers of any kind; the equations are in test_statistics_recovery."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

from open_clip_ext import InputError, NonFiniteError, create_loss, recover_statistics

ROWS = 24


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.towers = nn.ModuleList([nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)) for _ in range(2)])
        self.logit_scale = nn.Parameter(torch.tensor(2.7))

    def forward(self, images, texts):
        features = [normalize(tower(x), dim=1) for tower, x in zip(self.towers, (images, texts), strict=True)]
        return {"image_features": features[0], "text_features": features[1], "logit_scale": self.logit_scale.exp()}


class Loop:
    def __init__(self, loss="fastclip-v3", optimizer=torch.optim.AdamW, **settings):
        torch.manual_seed(0)
        self.model = TwoTowers()
        self.optimizer = optimizer(self.model.parameters(), lr=1e-2)
        self.loss = create_loss(loss, num_samples=ROWS, epochs=4, **settings)
        self.data = [(*torch.randn(2, 8, 6), rows) for rows in torch.arange(ROWS).split(8)]

    def recover(self, **more):
        given = dict(model=self.model, optimizer=self.optimizer, loss=self.loss, batches=self.data, epochs=2)
        return recover_statistics(**(given | more))

    def step(self, batch):
        value = self.loss(**self.model(*batch[:2]), index=batch[2])
        self.optimizer.zero_grad()
        value.backward()
        self.optimizer.step()

    def step_without_loss(self, batch):
        self.optimizer.zero_grad()
        self.model(*batch[:2])["image_features"].sum().backward()
        self.optimizer.step()

    def schedule(self, batch):
        self.optimizer.param_groups[0]["lr"] = 1e-3
        self.step(batch)


def snapshot(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_the_recovery_has_the_identity_unless_told_otherwise():
    """TuneCLIP's Algorithm 1; what it recovers with the loss's own surrogate is that of the training."""
    recovered = {}
    for loss, surrogate in (("identity", "identity"), ("hinge", "identity"), ("hinge", "hinge")):
        loop = Loop("tuneclip", surrogate=loss)
        loop.recover(surrogate=surrogate)
        recovered[loss, surrogate] = loop.loss.full_state()["state.log_u"]
        assert loop.loss.surrogate.name == loop.loss.full_state()["surrogate"] == loss
    assert torch.equal(recovered["identity", "identity"], recovered["hinge", "identity"])
    # The hinge is never negative, up to float32's rounding of a mean of exp(0).
    assert recovered["hinge", "hinge"].ge(-1e-6).all() and not recovered["hinge", "identity"].ge(-1e-6).all()


def test_the_bias_of_a_model_reaches_the_loss():
    class Biased(TwoTowers):
        def forward(self, images, texts):
            outputs = {**super().forward(images, texts), "logit_bias": self.logit_bias}
            return tuple(outputs.values()) if self.is_traced else outputs

    moments = []
    for is_traced in (False, True):
        loop = Loop("siglip-chunked")
        loop.model.__class__, loop.model.is_traced = Biased, is_traced
        loop.model.logit_bias = nn.Parameter(torch.tensor(-10.0))
        loop.optimizer = torch.optim.AdamW(loop.model.parameters(), lr=1e-2)
        loop.recover()
        moments.append([loop.optimizer.state[parameter]["exp_avg"] for parameter in loop.model.parameters()])
    assert all(moment.any() for moment in moments[0]) and all(map(torch.equal, *moments))


def test_weights_and_batch_norm_stand_still_and_statistics_move():
    """Also where the model holds the loss."""
    loop = Loop()
    loop.model.loss = loop.loss
    before = snapshot(loop.model.towers)
    assert loop.recover() == 2
    assert all(torch.equal(tensor, before[name]) for name, tensor in loop.model.towers.state_dict().items())
    assert {int(state["step"]) for state in loop.optimizer.state.values()} == {6}
    assert all(state["exp_avg_sq"].any() for state in loop.optimizer.state.values())
    assert loop.loss.full_state()["state.log_u"].isfinite().all() and loop.loss.steps == 6
    assert loop.optimizer.param_groups[0]["lr"] == 1e-2
    loop.loss.set_epoch(2)
    loop.step(loop.data[0])
    assert not torch.equal(loop.model.towers[0][0].weight, before["0.0.weight"])


def test_a_step_of_ones_own_with_a_gradient_scaler():
    loop, own = Loop(), Loop()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def step(batch):
        own.optimizer.zero_grad()
        with torch.autocast("cpu", enabled=False):
            value = own.loss(**own.model(*batch[:2]), index=batch[2])
        scaler.scale(value).backward()
        scaler.step(own.optimizer)
        scaler.update()

    loop.recover()
    own.recover(step=step)
    for state, other in zip(loop.optimizer.state.values(), own.optimizer.state.values(), strict=True):
        assert torch.equal(state["exp_avg"], other["exp_avg"]) and state["step"] == other["step"]


def test_a_loss_that_keeps_nothing_gives_the_moments_alone():
    loop = Loop()
    assert loop.recover(loss=None, step=loop.step_without_loss) == 2
    assert loop.loss.steps == 0 and loop.optimizer.state


def test_parts_of_an_epoch_are_steps():
    loop = Loop()
    assert loop.recover(epochs=1.4) == 2
    assert loop.loss.steps == 4
    loop = Loop()
    assert loop.recover(epochs=0.1) == 1
    assert loop.loss.steps == 1


class Moving(torch.optim.AdamW):
    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            self.param_groups[0]["params"][1].view(-1)[0] += 1e-6


@pytest.mark.parametrize(
    "what, parts",
    [
        (lambda loop: dict(surrogate="hinge"), ["surrogate: 'hinge' is neither 'identity' nor the loss's own"]),
        (lambda loop: dict(epochs=0), ["epochs: 0 ", "> 0"]),
        (lambda loop: dict(epochs=math.nan), ["epochs: nan", "> 0"]),
        (lambda loop: dict(epochs=0.5, batches=iter(loop.data)), ["epochs: 0.5", "whole number"]),
        (lambda loop: dict(batches=iter(loop.data)), ["batches: none in epoch 1", "DataLoader"]),
        (lambda loop: dict(loss=None), ["step:", "without a loss"]),
        (lambda loop: dict(loss=create_loss("sogclr", num_samples=9, accum_freq=4)), ["step:", "accum_freq 4"]),
        (lambda loop: dict(loss=loop.loss.eval()), ["loss:", "loss.train()"]),
        (lambda loop: dict(model=loop.model.towers), ["model:", "holds them all"]),
        (lambda loop: dict(optimizer=Moving(loop.model.parameters())), ["optimizer: Moving", "towers.0.0.weight"]),
        (lambda loop: dict(step=loop.schedule), ["step: it sets a learning rate"]),
    ],
)
def test_what_does_not_fit_leaves_the_weights_and_the_rate(what, parts):
    loop = Loop()
    before = snapshot(loop.model)
    with pytest.raises(InputError) as error:
        loop.recover(**what(loop))
    assert all(part in str(error.value) for part in parts), error.value
    assert "towers" in parts[-1] or all(torch.equal(before[key], new) for key, new in loop.model.state_dict().items())
    assert loop.optimizer.param_groups[0]["lr"] == 1e-2


@pytest.mark.parametrize("has_loss, named", [(True, "image_features"), (False, "exp_avg of towers.0.0.weight")])
def test_data_that_are_not_finite(has_loss, named):
    loop = Loop()
    loop.data[1][0][0, 0] = math.inf
    before = snapshot(loop.model)
    with pytest.raises(NonFiniteError, match=f"{named} is not finite"):
        loop.recover(**({} if has_loss else dict(loss=None, step=loop.step_without_loss)))
    # The gradient is NaN, and so is 0 times it.
    assert all(torch.equal(tensor, before[name]) for name, tensor in loop.model.state_dict().items())
