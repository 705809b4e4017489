"""What the tests of numbers share: unit vectors, rows that come twice, and how closely a result has to agree."""

import torch


def unit(generator, rows, dimension):
    vectors = torch.randn(rows, dimension, generator=generator, dtype=torch.float64)
    return vectors / vectors.norm(dim=1, keepdim=True)


def mean_over_equal_rows(values, index):
    """For each anchor the mean of `values`, (2, B), over the anchors of its row: what a row gets that comes twice."""
    equal = (index[:, None] == index).to(values)
    return values @ equal / equal.sum(dim=0)


def close(actual, expected, tau, nothing=False):
    """Assert that two tensors agree as closely as the type of `actual` lets them.

    An exponent (s_ij - s_ii) / tau is at most 2 / tau, and the rounding of its similarities by eps becomes a relative
    error of 2 eps / tau in its exponential. Sums over the dimension, the batch and a few visits add some such errors:
    64 of them are allowed, relative to the largest of `expected`.

    Args:
        tau: the lowest temperature.
        nothing: whether `expected` may be 0 throughout, where there is nothing to compare.
    """
    largest = expected.abs().max().item()
    assert nothing or largest > 1e-5, "nothing to compare"
    bound = 64 * torch.finfo(actual.dtype).eps * max(2 / float(tau), 1.0) * max(largest, 1e-6)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=bound)
