"""The printed equations against loops over the pairs, and against each other where one follows from another."""


import inspect
import math
import re
import sys
from pathlib import Path

import open_clip.loss
import pytest
import reference
import torch
from numerics import unit

from open_clip_ext import equations, list_losses
from open_clip_ext.equations import batch_g, gaps, gradient_of
from open_clip_ext.equations.__main__ import main

EPS, RHO = 1e-3, 3.0
close = torch.testing.assert_close  # of float64: 1e-7 relative


@pytest.fixture
def pairs():
    generator = torch.Generator().manual_seed(0)
    e1 = unit(generator, 5, 4)
    e2 = torch.nn.functional.normalize(e1 + 0.7 * unit(generator, 5, 4), dim=1)
    return e1.requires_grad_(), e2.requires_grad_(), torch.tensor(0.3).double().requires_grad_()


def individual(tau):
    """A temperature for each anchor, around tau, (2, 5)."""
    return (tau.detach() * torch.linspace(0.8, 1.3, 10).double().view(2, 5)).requires_grad_()


def same_gradients(actual, expected, inputs):
    found = [torch.autograd.grad(value, inputs, retain_graph=True) for value in (actual, expected)]
    for one, other in zip(*found, strict=True):
        assert other.abs().max() > 1e-3, "nothing to compare"
        close(one, other)


def test_normalizers(pairs):
    e1, e2, tau = pairs
    for taus in (tau, individual(tau)):
        close(batch_g(gaps(e1, e2), taus), reference.normalizers(e1, e2, taus))
        close(batch_g(equations.two_view_gaps(e1, e2), taus), reference.two_view_normalizers(e1, e2, taus))
    close(equations.tuneclip_phi(gaps(e1, e2), tau, 0.4), reference.hinged(e1, e2, tau, 0.4))


def test_prototypes(pairs):
    e1, e2, tau = pairs
    w1, w2 = (3 * unit(torch.Generator().manual_seed(seed), 3, 4) for seed in (1, 2))
    actual, expected = (f(w1, w2, e1, e2, tau, EPS) for f in (equations.neuclip_alpha, reference.predicted))
    close(actual, expected)
    same_gradients(actual.sum(), expected.sum(), [e1, e2, tau])


def test_clip_and_cyclip(pairs):
    e1, e2, tau = pairs
    close(equations.clip(e1, e2, tau), open_clip.loss.ClipLoss()(e1, e2, 1 / tau))
    same_gradients(equations.clip(e1, e2, tau), open_clip.loss.ClipLoss()(e1, e2, 1 / tau), [e1, e2, tau])
    for lambdas in ((0.0, 0.0), (0.25, 0.25), (0.0, 1.5), (2.0, 0.0)):
        close(equations.cyclip(e1, e2, tau, *lambdas), reference.cyclip(e1, e2, tau, *lambdas))


def test_consistency_in_the_scale_of_the_objective(pairs):
    """2 tau CyCLIP's terms, or the sum of both directions' mean tau; tau is a constant."""
    e1, e2, tau = pairs
    for taus, factor in ((tau, 2 * tau.detach()), (individual(tau), individual(tau).detach().mean(dim=1).sum())):
        actual, expected = equations.consistency(e1, e2, taus, 0.7), factor * reference.consistency(e1, e2, 0.7, 0.7)
        close(actual, expected)
        same_gradients(actual, expected, [e1, e2])
        assert torch.autograd.grad(actual, taus, allow_unused=True) == (None,)


def test_dcl(pairs):
    e1, e2, tau = pairs
    close(equations.dcl(e1, e2, tau), reference.dcl(e1, e2, tau))
    g = batch_g(gaps(e1, e2), tau)
    same_gradients(equations.dcl(e1, e2, tau), equations.fastclip_v0(g, g.detach()), pairs)
    close(equations.dcl(e1, e2, tau), equations.fastclip_v0(g, g.detach()) + 2 * torch.tensor(4.0).double().log())


def test_moving_averages():
    """Two rows, of which one is visited for the first time."""
    u, g = torch.tensor([[2.0, 0.0], [4.0, 0.0]]), torch.tensor([[6.0, 5.0], [8.0, 7.0]])
    gamma, eps = torch.tensor([0.25, 1.0]), 0.5
    close(equations.isogclr_s(u, g, gamma), torch.tensor([[3.0, 5.0], [5.0, 7.0]]))
    close(equations.tuneclip_u(u, g, gamma), torch.tensor([[3.0, 5.0], [5.0, 7.0]]))
    close(equations.sogclr_u(u, g, gamma, eps), torch.tensor([[3.125, 5.5], [5.125, 7.5]]))
    close(equations.sogclr_u(eps + u, g, gamma, eps), eps + equations.isogclr_s(u, g, gamma))


def test_equations_4_and_13_at_any_u(pairs):
    """u is a constant: each anchor's gradient of g over its own u."""
    e1, e2, tau = pairs
    g = batch_g(gaps(e1, e2), tau)
    u = g.detach() * individual(tau).detach()
    eq4 = tau.detach() * (reference.normalizers(e1, e2, tau.detach()) / u).mean(dim=1).sum()
    for loss in (equations.sogclr(g, tau.detach(), u), equations.fastclip_v3(g, tau, u, RHO)):
        same_gradients(loss, eq4, [e1, e2])
    (d_tau,) = torch.autograd.grad(equations.fastclip_v3(g, tau, u, RHO), tau, retain_graph=True)
    close(d_tau, reference.eq13(e1, e2, tau, u, RHO))
    same_gradients(equations.fastclip_v0(g, u), (reference.normalizers(e1, e2, tau) / u).mean(dim=1).sum(), pairs)


def test_at_the_exact_normalizers_each_estimator_is_its_objective(pairs):
    """Value and gradient: NeuCLIP, Eq. 2; iSogCLR, Appendix B; TuneCLIP, Eq. 9; AmorLIP, Eq. 5."""
    e1, e2, tau = pairs
    g = batch_g(gaps(e1, e2), tau)
    exact = (EPS + g).detach()
    eq1 = equations.global_contrastive(g, tau, RHO, EPS)
    taus = individual(tau)
    g_i = batch_g(gaps(e1, e2), taus)
    appendix_b = equations.isogclr_objective(g_i, taus, RHO)
    phi = equations.tuneclip_phi(gaps(e1, e2), tau, 0.4)
    eq9 = equations.tuneclip_objective(phi, tau, EPS)
    s = 1 / tau
    z = equations.amorlip_z(e1, e2, s)
    eq5 = equations.amorlip_mle(e1, e2, s, z) / s.detach() + RHO / s
    cases = [
        (equations.sogclr(g, tau, exact), eq1 - 2 * tau * RHO, [e1, e2]),
        (equations.fastclip_v3(g, tau, exact, RHO), eq1, pairs),
        (equations.fastclip_v0(g, exact), (EPS + g).log().mean(dim=1).sum(), pairs),
        (equations.neuclip(g, tau, (EPS + g).log(), RHO, EPS), eq1, pairs),
        (equations.neuclip(g, tau, exact.log(), RHO, EPS), eq1, pairs),  # the optimum over alpha, Eq. 5 and 9
        (equations.isogclr(g_i, taus, g_i.detach(), RHO), appendix_b, [e1, e2, taus]),
        (equations.tuneclip(phi, tau, phi.detach(), EPS), eq9, [e1, e2]),
        (equations.amorlip(e1, e2, s, z, RHO), eq5, pairs),
    ]
    for estimate, objective, inputs in cases:
        close(estimate, objective)
        same_gradients(estimate, objective, inputs)


@pytest.mark.parametrize("c", [-3.0, 0.0, 10.0])
def test_scent_is_the_proximal_step(c):
    """With `scent_gamma`, u is where the derivative in nu of what the step minimises is 0, by halving an interval."""
    generator = torch.Generator().manual_seed(0)
    u, g = (torch.randn(2, 5, generator=generator, dtype=torch.float64).mul(3).exp() for _ in range(2))

    def slope(nu):
        return 1 - g * (-nu).exp() + math.exp(-c) * (1 / u - (-nu).exp())

    low, high = torch.full_like(u, -40.0), torch.full_like(u, 40.0)
    for _ in range(80):
        middle = (low + high) / 2
        low, high = low.where(slope(middle) > 0, middle), high.where(slope(middle) <= 0, middle)
    close(equations.scent_u(u, g, c, eps=0.0).log(), low, rtol=0, atol=1e-12)


def test_gaps_less_a_references(pairs):
    """DRRho-CLIP's, by loops over the pairs."""
    e1, e2, _ = pairs
    r1, r2 = (unit(torch.Generator().manual_seed(seed), 5, 3) for seed in (1, 2))
    found = equations.drrho_gaps(e1, e2, r1, r2)
    for i in range(5):
        for j in set(range(5)) - {i}:
            own = [(e1[i] @ e2[j] - e1[i] @ e2[i]) - (r1[i] @ r2[j] - r1[i] @ r2[i])]
            own += [(e1[j] @ e2[i] - e1[i] @ e2[i]) - (r1[j] @ r2[i] - r1[i] @ r2[i])]
            close(found[:, i, j - (j > i)], torch.stack(own))


def test_several_positives(pairs):
    """UniCL's and the global objective by loops; and the estimator at the exact normalizers is the objective."""
    e1, e2, tau = pairs
    y = torch.tensor([4, 7, 4, 4, 1])
    exps = [(side @ other.T / tau).exp() for side, other in ((e1, e2), (e2, e1))]
    unicl, objective = 0.0, 2 * tau * RHO
    for exp in exps:
        for i in range(5):
            positives = [k for k in range(5) if y[k] == y[i]]
            negatives = [j for j in range(5) if y[j] != y[i]]
            for k in positives:
                unicl = unicl - (exp[i, k] / exp[i].sum()).log() / len(positives) / 10
                g = sum(exp[i, j] / exp[i, k] for j in negatives) / len(negatives)
                objective = objective + tau * g.log() / len(positives) / 5
    g, x = equations.unicl_g(e1, e2, tau, y), equations.unicl_shift(e1, e2, tau, y)
    estimates = [
        equations.fastclip_v3(g * x.exp(), tau, (g * x.exp()).detach(), RHO),
        equations.neuclip(g * x.exp(), tau, g.detach().log() + x, RHO, 0.0),
        equations.neuclip(g * x.exp(), tau, g.log() + x, RHO, 0.0),
    ]
    exact = equations.unicl_objective(e1, e2, tau, y, RHO)
    for actual, expected in [(equations.unicl(*pairs, y), unicl), *((one, objective) for one in (exact, *estimates))]:
        close(actual, expected)
        same_gradients(actual, expected, pairs)
    different = torch.arange(5)
    close(equations.unicl(*pairs, different), equations.clip(*pairs))
    close(equations.unicl_g(*pairs, different), batch_g(gaps(e1, e2), tau))


def test_tokens_of_captions():
    """SuperCLIP's, by loops over captions and their tokens."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    texts, padding = torch.tensor([[5, 1, 1, 2], [5, 2, 0, 0], [5, 3, 4, 1], [5, 0, 0, 0]]), 0
    captions = [{*text} - {padding} for text in texts.tolist()]
    df = [sum(token in caption for caption in captions) for token in range(6)]
    weights = equations.superclip_weights(torch.tensor(df).double(), len(captions))
    total = 0.0
    for row, caption in zip(logits, captions, strict=True):
        own = {token: math.log((4 + 1) / (1 + df[token])) for token in caption}
        for token, weight in own.items():
            log_prob = row[token] - sum(value.exp() for value in row).log()
            total = total - weight / max(sum(own.values()), 1e-12) * log_prob / len(captions)
    value = equations.superclip(logits, texts, weights, padding)
    close(value, total)
    same_gradients(value, total, [logits])
    assert weights[5] == 0  # of every caption


def test_the_separate_objective_is_least_at_the_log_normalizers(pairs):
    e1, e2, tau = pairs
    g = batch_g(gaps(e1, e2), tau)
    alpha = (EPS + g).log()
    assert equations.neuclip_separate(g, alpha, EPS) == 0
    close(equations.neuclip_separate(g, alpha - 0.5, EPS), torch.tensor(0.25).double())  # two sides of 0.5^2 / 2


def test_temperatures_of_samples():
    """iSogCLR, Algorithm 2, lines 8-9, and Adam's formula, by hand: within the bounds, clipped, and at them."""
    tau, gradient = torch.tensor([0.3, 0.3, 0.3]), torch.tensor([1.0, -100.0, 100.0])
    moved, u = equations.isogclr_tau(tau, torch.ones(3), gradient, beta1=0.5, eta=0.1, tau_0=0.2, tau_max=0.45)
    close(u, torch.tensor([1.0, -2.0, 3.0]))
    close(moved, torch.tensor([0.2, 0.45, 0.2]))
    moved, m, v = equations.fastclip_v2_tau(
        tau, torch.ones(3), torch.ones(3), gradient, epoch=0, eta=0.01, tau_0=0.0, tau_max=1.0
    )
    close((moved, m, v), (torch.tensor([0.29, 0.31, 0.29]), torch.tensor([1.0, -5, 5]), torch.tensor([1.0, 25, 25])))
    moved, m, v = equations.fastclip_v2_tau(
        tau, torch.ones(3), torch.ones(3), gradient, epoch=1, eta=0.01, tau_0=0.0, tau_max=1.0
    )
    step = torch.tensor([1.0, 0.4, 1.4]) / 0.19 / (torch.tensor([1.0, 1.024, 1.024]) / (1 - 0.999**2)).sqrt()
    close(moved, tau - 0.01 * step)


def test_amorlip(pairs):
    e1, e2, tau = pairs
    s, lam = 1 / tau, individual(tau).detach()
    for positive in (1.0, 1e-3):
        close(equations.amorlip_z(e1, e2, s, positive), reference.partition_functions(e1, e2, s, positive))
        expected = reference.amorlip_eq6(e1, e2, s, lam, positive) / s.detach() + RHO / s
        same_gradients(equations.amorlip(e1, e2, s, lam, RHO, positive), expected, pairs)
    z = equations.amorlip_z(e1, e2, s)
    close(5 * z, (s * (e1 * e2).sum(dim=1)).exp() * (1 + 4 * batch_g(gaps(e1, e2), tau)))
    eq10 = equations.amorlip_objective(lam, z, z)
    close(eq10, sum((lam[side].log() - z[side].log()).pow(2).mean() for side in range(2)) / 2)
    eq8 = equations.amorlip_objective(lam, z, z, equations.kl) - 0.1 * eq10
    close(eq8, reference.amorlip_eq9(e1, e2, s, lam))
    close(equations.amorlip_z_comb(z, lam, 0.25), 0.25 * lam + 0.75 * z)
    assert [equations.amorlip_beta(t, 4, 0.8) for t in (0, 2, 4)] == pytest.approx([0, 0.4, 0.8])


def test_divergences():
    """AmorLIP, Eq. 4 with both f is what the divergences are called for."""
    p, q = torch.tensor([0.2, 0.5, 0.3]), torch.tensor([0.6, 0.1, 0.3])
    close((p * equations.kl(q / p)).sum(), (q * (q / p).log()).sum())
    middle = (p + q) / 2
    js = ((p * (p / middle).log()).sum() + (q * (q / middle).log()).sum()) / 2
    close((p * equations.js(q / p)).sum(), js)


def test_a_gradient_without_a_value():
    x = torch.tensor(3.0, requires_grad=True)
    value = gradient_of(x**2)
    assert value == 0
    assert torch.autograd.grad(value, x) == (6,)


def table():
    """Rows of the module's table: method, functions, fast classes, test."""
    lines = equations.__doc__.split("test_*.py\n")[1].split("\n\n")[0].splitlines()[1:]
    return [[[name.strip() for name in cell.split(",")] for cell in line.split("|")] for line in lines]


def find_class(name):
    if name.startswith("open_clip."):
        return getattr(open_clip.loss, name.split(".")[-1])
    modules = [module for key, module in sys.modules.items() if key.startswith("open_clip_ext.")]
    (found,) = {getattr(module, name) for module in modules if hasattr(module, name)}
    return found


@pytest.mark.parametrize("method, functions, classes, test", table(), ids=lambda cell: cell[0])
def test_the_table_leads_to_the_fast_class_and_the_test_and_back(method, functions, classes, test):
    source = Path(__file__).with_name(f"test_{test[0]}.py").read_text()
    fast = "".join(Path(inspect.getfile(find_class(name))).read_text() for name in classes)
    for function in functions:
        assert callable(getattr(equations, function))
        assert re.search(rf"\b{function}\b", source), f"{function} is not in the test"
        assert f"`equations.{function}`" in fast, f"{classes} do not name {function}"


def test_eight_pairs(capsys):
    """The module's example has every method, and every method here is one of `--loss`."""
    main()
    shown = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert all(abs(float(value)) < 100 for value in shown.values())
    methods = {method for (method,), *_ in table()}
    assert set(shown) == methods
    variants = {"clip-chunked", "siglip-chunked", "amorlip-released", "amorlip-paper"}
    assert methods == {preset.name for preset in list_losses()} - variants


def test_the_fast_classes_that_the_equations_name_exist():
    folder = Path(equations.__file__).parent
    code = "".join(path.read_text() for path in folder.parent.rglob("*.py"))
    defined = set(re.findall(r"^ *(?:def|class) (\w+)|^ *(\w+)(?:: .*)? = ", code, re.MULTILINE))
    source = "".join(path.read_text() for path in folder.glob("*.py"))
    named = re.findall(r"Fast:((?:[\s,]|and|`[\w.]+`)+)", source)
    names = {part for text in named for name in re.findall(r"`([\w.]+)`", text) for part in name.split(".")}
    assert len(names) > 15 and names <= {name for pair in defined for name in pair}
