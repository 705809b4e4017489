"""NeuCLIP's prototypes against `open_clip_ext.equations` in float64, with restarts, ring buffer and growth."""

import pytest
import torch
from numerics import unit
from torch.nn.functional import normalize

from open_clip_ext import create_loss
from open_clip_ext.equations import (
    batch_g,
    gaps,
    neuclip,
    neuclip_algorithm_1,
    neuclip_alpha,
    neuclip_separate,
    neuclip_w,
    unicl_shift,
)
from open_clip_ext.kernels import streaming
from open_clip_ext.normalizers import Prototypes, prototypes


class Reference:
    """The same steps with autograd, AdaGrad from its formula, and plain lists as the ring buffer."""

    def __init__(self, m, restart_every, updates, lr, eps, tau, wd=0.0, accumulator=0.0, fit=None, keyed=False):
        self.m, self.restart_every, self.updates, self.lr, self.eps, self.tau = m, restart_every, updates, lr, eps, tau
        self.wd, self.start, self.ring, self.head, self.w, self.t = wd, accumulator, [], 0, None, 0
        self.fit, self.keyed = fit or (lambda g, alpha: neuclip(g, tau, alpha, 0.0, eps)), keyed

    def step(self, e1, e2, key=None):
        """`key`, (B,): samples and prototypes with the anchor's own do not count."""
        key = torch.arange(len(e1)) if key is None else key
        for pair in list(zip(e1, e2, key, strict=True))[-self.m :]:
            self.ring[self.head : self.head + 1] = [pair]
            self.head = (self.head + 1) % self.m
        latest = torch.stack([torch.stack([b for _, b, _ in self.ring]), torch.stack([a for a, _, _ in self.ring])])
        latest_keys = torch.stack([k for _, _, k in self.ring])
        if self.w is None:
            self.accumulator = torch.full((2, self.m, e1.shape[1]), self.start, dtype=torch.float64)
        if self.t == 0 or (self.restart_every and self.t % self.restart_every == 0):
            self.w, self.keys = latest.clone(), latest_keys
        elif latest.shape[1] > self.w.shape[1]:
            self.keys = torch.cat([self.keys, latest_keys[self.w.shape[1] :]])
            self.w = torch.cat([self.w, latest[:, self.w.shape[1] :]], dim=1)
        g = self.g_of_batch(e1, e2, key)
        for _ in range(self.updates):
            w = self.w.clone().requires_grad_()
            alpha = self.alpha(w, e1, e2, key)
            (gradient,) = torch.autograd.grad(self.fit(g, alpha), w)
            gradient = gradient + self.wd * self.w
            accumulator = self.accumulator[:, : w.shape[1]]
            accumulator += gradient**2
            self.w = self.w - self.lr * gradient / (accumulator.sqrt() + 1e-10)
        self.t += 1

    def alpha(self, w, e1, e2, key):
        if not self.keyed:
            return neuclip_alpha(*w, e1, e2, self.tau, self.eps)
        e, w = torch.stack([e1, e2]), w / w.norm(dim=2, keepdim=True)
        counts = key[:, None] != self.keys
        g = self.g(e @ w.mT - (e1 * e2).sum(dim=1)[:, None], counts)
        return (self.eps + torch.where(counts.any(dim=1), g, self.g_of_batch(e1, e2, key).detach())).log()

    def g_of_batch(self, e1, e2, key):
        if not self.keyed:
            return batch_g(gaps(e1, e2), self.tau)
        s = e1 @ e2.T
        return self.g(torch.stack([s, s.T]) - s.diagonal()[:, None], key[:, None] != key)

    def g(self, gaps, counts):
        """Mean over those that count, 0 where there is none."""
        return ((gaps / self.tau).exp() * counts).sum(dim=2) / counts.sum(dim=1).clamp(min=1)


@pytest.mark.parametrize("updates", [1, 3])
@pytest.mark.parametrize("opt", ["sgd", "adagrad"])
def test_algorithm_1_as_the_paper_has_it(opt, updates):
    """Batches that hold m pairs and more; tau falls, as AdaGrad sees Eq. 12's factor tau only while it changes."""
    eps, m = 1e-6, 6
    loss = create_loss(
        "neuclip", npn_prototypes=m, npn_restart_every=2, npn_updates=updates, npn_opt=opt, npn_lr=0.1, loss_eps=eps
    )
    w1, w2 = (torch.zeros(m, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    optimizer = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[opt]([w1, w2], lr=0.1)
    generator = torch.Generator().manual_seed(0)
    for t, tau in enumerate(torch.tensor([0.2, 0.15, 0.1, 0.08, 0.07]).double()):
        e1, e2 = unit(generator, m + 2, 8), unit(generator, m + 2, 8)
        loss(e1, e2, 1 / tau)
        neuclip_w(w1, w2, optimizer, e1, e2, tau, t=t, T_r=2, T_u=updates, eps=eps)
        expected = torch.stack([w1, w2]).detach()
        torch.testing.assert_close(loss.full_state()["state.weight"], expected, rtol=1e-6, atol=1e-8)


def test_algorithm_1_trains_two_encoders_as_the_loss_does():
    """All twelve lines: the encoders after five steps, and tau's gradient of the last."""
    eps, m, size, rho, tau = 1e-6, 4, 6, 3.0, 0.2
    generator = torch.Generator().manual_seed(0)
    images, texts = unit(generator, 20, 5), unit(generator, 20, 7)
    plain, fast = ([torch.nn.Linear(k, 8, bias=False).double() for k in (5, 7)] for _ in range(2))
    for one, other in zip(plain, fast, strict=True):
        one.weight.data = unit(generator, *one.weight.shape)
        other.weight.data = one.weight.data.clone()

    learned = torch.tensor(tau).double().requires_grad_()
    groups = [{"params": [encoder.weight for encoder in plain]}, {"params": [learned], "lr": 0.0}]
    w1, w2 = (torch.zeros(m, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    optimizers = torch.optim.SGD(groups, lr=0.1), torch.optim.SGD([w1, w2], lr=0.1)
    torch.manual_seed(1)
    values = neuclip_algorithm_1(
        *plain, images, texts, learned, optimizers[0], w1, w2, optimizers[1], size, T=5, T_r=3, T_u=2, rho=rho, eps=eps
    )

    network = {"npn_prototypes": m, "npn_restart_every": 3, "npn_updates": 2, "npn_opt": "sgd", "npn_lr": 0.1}
    loss = create_loss("neuclip", rho=rho, loss_eps=eps, **network)
    log_scale = (1 / learned.detach()).log().requires_grad_()
    optimizer = torch.optim.SGD([encoder.weight for encoder in fast], lr=0.1)
    torch.manual_seed(1)
    for _ in range(5):
        batch = torch.randperm(20)[:size]
        pair = [normalize(encode(data[batch]), dim=1) for encode, data in zip(fast, (images, texts), strict=True)]
        optimizer.zero_grad()
        log_scale.grad = None
        loss(*pair, log_scale.exp()).backward()
        optimizer.step()
    for one, other in zip(plain, fast, strict=True):
        torch.testing.assert_close(other.weight, one.weight, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(log_scale.grad, -learned.detach() * learned.grad, rtol=1e-7, atol=1e-9)
    assert len(values) == 5


@pytest.mark.parametrize("max_rise", [10.0, 0.0, 1e30])
def test_updates_that_raise_the_objective_are_undone(max_rise):
    """AdaGrad at 1.0 from nothing; the embeddings are close to each other. No weight reaches its bound."""
    eps, m, updates, tau = 1e-14, 6, 2, torch.tensor(0.15).double()
    loss = create_loss(
        "neuclip", npn_prototypes=m, npn_restart_every=4, npn_updates=updates, npn_lr=1.0, npn_max_rise=max_rise,
        loss_eps=eps,
    )
    weights = [torch.zeros(m, 8, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    optimizer = torch.optim.Adagrad(weights, lr=1.0)
    generator = torch.Generator().manual_seed(0)
    common, undone = unit(generator, 1, 8), []
    for t in range(10):
        e1, e2 = (normalize(common + 0.5 * unit(generator, m + 2, 8), dim=1) for _ in range(2))
        loss(e1, e2, 1 / tau)
        if t % 4 == 0:
            neuclip_w(*weights, optimizer, e1, e2, tau, t=0, T_r=1, T_u=0, eps=eps)
        before = [weight.detach().clone() for weight in weights]
        objectives = []
        for _ in range(updates):
            alpha = neuclip_alpha(*weights, e1, e2, tau, eps)
            objectives.append(neuclip(batch_g(gaps(e1, e2), tau), tau, alpha, rho=0.0, eps=eps).item() / tau.item())
            neuclip_w(*weights, optimizer, e1, e2, tau, t=1, T_r=2, T_u=1, eps=eps)
        undone.append(objectives[-1] > objectives[0] + max_rise)
        if undone[-1]:
            for weight, old in zip(weights, before, strict=True):
                weight.data.copy_(old)
                optimizer.state[weight]["sum"] *= 4
        state, expected = loss.full_state(), torch.stack([weight.detach() for weight in weights])
        torch.testing.assert_close(state["state.weight"], expected, rtol=1e-6, atol=1e-8)
        assert loss.diagnostics()["npn_unified_before"].item() == pytest.approx(objectives[0], rel=1e-9)
    assert (0 < sum(undone) < 10) if max_rise < 1e30 else not any(undone)


@pytest.mark.parametrize("batches", [[6] * 7, [9, 4, 3, 9, 2, 8, 5], [2] * 7, [4] * 7])
@pytest.mark.parametrize("restart_every", [0, 3])
@pytest.mark.parametrize("objective, wd, accumulator", [("unified", 0.0, 0.0), ("l2-log", 0.1, 0.5)])
def test_prototypes_follow_algorithm_1(batches, restart_every, objective, wd, accumulator):
    """m = 6 with batches larger, equal and smaller, and of changing size; by either objective of the network."""
    tau, eps, m = torch.tensor(0.2).double(), 1e-6, 6
    options = dict(npn_prototypes=m, npn_restart_every=restart_every, npn_updates=2, npn_lr=0.1, loss_eps=eps)
    loss = create_loss("neuclip", **options, npn_objective=objective, npn_wd=wd, npn_initial_accumulator=accumulator)
    fit = (lambda g, alpha: neuclip_separate(g, alpha, eps)) if objective == "l2-log" else None
    reference = Reference(m, restart_every, 2, 0.1, eps, tau, wd, accumulator, fit)
    generator = torch.Generator().manual_seed(0)
    for batch in batches:
        e1, e2 = unit(generator, batch, 8), unit(generator, batch, 8)
        loss(e1, e2, 1 / tau)
        reference.step(e1, e2)
        if fit is not None:
            expected = fit(batch_g(gaps(e1, e2), tau), loss._last[2]).item()
            assert loss.diagnostics()["npn_l2_log_after"].item() == pytest.approx(expected)
        state = loss.full_state()
        active = int(state["state.active"])
        assert active == reference.w.shape[1]
        torch.testing.assert_close(state["state.weight"][:, :active], reference.w, rtol=1e-6, atol=1e-8)


# After the first restart all 8 prototypes are of key 4.
KEYS = [
    [1, 2, 3, 4, 5, 1], [1, 6, 2, 2, 1, 7], [4] * 6, [4] * 6, [4, 1, 4, 2, 2, 3], [4, 3, 3, 3, 8, 9], [1, 2, 3, 4, 5, 6]
]  # fmt: skip


@pytest.mark.parametrize("name", ["key", "positive_key"])
@pytest.mark.parametrize("parts", ["whole", "parts"])
def test_a_prototype_does_not_count_for_the_key_that_it_was_drawn_from(parts, name, monkeypatch):
    """8 prototypes with restarts and batches of 6, in two of which nothing counts; and after a state is loaded. With
    positives the prototypes are the same, and the objective has their mean."""
    if parts == "parts":
        monkeypatch.setattr(streaming, "CPU_TILE", (3, 4))
        monkeypatch.setattr(streaming, "CPU_PART", 1)
    tau, eps = torch.tensor(0.2).double(), 1e-3
    options = dict(npn_prototypes=8, npn_restart_every=3, npn_updates=2, npn_lr=0.1, loss_eps=eps)
    # Where the prototypes are the batch itself the gradient is 0, and AdaGrad would make steps of its rounding.
    options |= dict(npn_initial_accumulator=0.5, rho=0.0)
    loss = create_loss("neuclip", **options)
    reference = Reference(8, 3, 2, 0.1, eps, tau, accumulator=0.5, keyed=True)
    generator = torch.Generator().manual_seed(0)
    for key in map(torch.tensor, KEYS):
        e1, e2 = (unit(generator, 6, 8).requires_grad_() for _ in range(2))
        scale = (1 / tau).requires_grad_()
        value = loss(e1, e2, scale, **{name: key})
        reference.step(e1.detach(), e2.detach(), key)
        state, active = loss.full_state(), len(reference.keys)
        torch.testing.assert_close(state["state.weight"][:, :active], reference.w, rtol=1e-6, atol=1e-8)
        assert torch.equal(state["state.keys"][:active], reference.keys)
        alpha = reference.alpha(reference.w, e1, e2, key)
        torch.testing.assert_close(loss._last[2], alpha.detach(), rtol=1e-6, atol=1e-8)
        reference.tau = 1 / scale
        alpha, g = reference.alpha(reference.w, e1, e2, key), reference.g_of_batch(e1, e2, key)
        x = unicl_shift(e1, e2, reference.tau, key) * (name == "positive_key")
        objective = neuclip(g * x.exp(), reference.tau, alpha + x, 0.0, eps * x.detach().exp())
        reference.tau = tau
        torch.testing.assert_close(value, objective, rtol=1e-6, atol=1e-8)
        expected = torch.autograd.grad(objective, [e1, e2, scale])
        for actual, wanted in zip(torch.autograd.grad(value, [e1, e2, scale]), expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-6, atol=1e-8)
        other = create_loss("neuclip", **options)
        other.load_full_state(state)
        loss = other


def test_prototypes_that_are_the_batch_stay_where_they_are_with_keys():
    """The gradient is rounding error there, of which AdaGrad makes steps of its rate; the next batch has a true one."""
    generator = torch.Generator().manual_seed(0)
    loss = create_loss("neuclip", npn_prototypes=12, npn_restart_every=100)
    for start in (0, 6):
        e1, e2 = unit(generator, 6, 8).float(), unit(generator, 6, 8).float()
        loss(e1, e2, torch.tensor(5.0), key=torch.arange(start, start + 6))
        weight = loss.normalizer.weight[:, start : start + 6]
        assert torch.equal(weight, torch.stack([e2, e1])) == (start == 0)


def test_a_restart_takes_the_other_side_and_keeps_the_optimizers_state_unless_told_otherwise():
    """Texts for image anchors and images for text anchors; in another type of embeddings half-way, too."""
    for reset, steps in ((False, 40.0), (True, 20.0)):
        loss = create_loss("neuclip", npn_prototypes=3, npn_restart_every=2, npn_reset_optimizer=reset)
        still = create_loss("neuclip", npn_prototypes=3, npn_updates=0)
        generator = torch.Generator().manual_seed(0)
        for number in range(4):
            e1, e2 = (unit(generator, 5, 8).to(torch.float32 if number < 2 else torch.float64) for _ in range(2))
            loss(e1, e2, torch.tensor(10.0))
            if number == 0:
                still(e1, e2, torch.tensor(10.0))
                assert torch.equal(still.full_state()["state.weight"], torch.stack([e2[-3:], e1[-3:]]))
        assert loss.full_state()["state.adagrad:weight:step"] == steps


@pytest.mark.parametrize(
    "processes, pairs, device, m, settings, splits",
    [
        (8, 16384, "meta", 4096, {}, True), (8, 8192, "meta", 4096, {}, False), (2, 32768, "meta", 4096, {}, False),
        (8, 8192, "meta", 4096, {"kernels": "eager"}, True), (8, 4096, "meta", 4096, {"kernels": "eager"}, False),
        (2, 8192, "meta", 4096, {"kernels": "eager"}, True), (2, 4096, "meta", 4096, {"kernels": "eager"}, False),
        (1, 32768, "meta", 4096, {}, False), (8, 16384, "cpu", 4096, {}, False),
        (8, 16384, "meta", 512, {}, False), (8, 16384, "meta", 4096, {"npn_updates": 0}, False),
        (8, 16384, "meta", 4096, {"npn_graph": True}, False), (8, 16384, "meta", 4096, {"npn_split": False}, False),
        (8, 0, "cpu", 512, {"npn_split": True}, True), (8, 0, "meta", 4096, {}, False),
    ],
)  # fmt: skip
def test_on_several_gpus_prototypes_are_split_where_that_is_faster(
    processes, pairs, device, m, settings, splits, monkeypatch, caplog
):
    monkeypatch.setattr(prototypes, "world_size", lambda: processes)
    monkeypatch.setattr(prototypes, "has_kernels", lambda device, dtype: True)
    caplog.set_level("INFO")
    normalizer = Prototypes(npn_prototypes=m, **settings)
    if pairs:
        normalizer.limit_to(100 * pairs)
        normalizer.set_steps_per_pass(100)
    normalizer.materialize(512, torch.device(device), torch.float32)
    assert normalizer.split == splits
    by_itself = splits and "npn_split" not in settings
    assert [record.message[:14] for record in caplog.records] == ["npn_split: on,"] * by_itself
