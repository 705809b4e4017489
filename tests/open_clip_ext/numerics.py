"""What the tests of numbers share: unit vectors, rows that come twice, and how closely a result has to agree."""

import torch


def unit(generator, rows, dimension):
    vectors = torch.randn(rows, dimension, generator=generator, dtype=torch.float64)
    return vectors / vectors.norm(dim=1, keepdim=True)


def mean_over_equal_rows(values, index):
    """For each anchor the mean of `values`, (2, B), over the anchors of its row: what a row gets that comes twice."""
    equal = (index[:, None] == index).to(values)
    return values @ equal / equal.sum(dim=0)


def visit(table, visited, index, gamma, update):
    """Move the batch's rows of a moving average, and return them, (2, B).

    Args:
        table: (2, n); visited: the rows that were there before; both change.
        update: from the rows and their gamma, which is 1 at a first visit, to the rows after the step.
    """
    gammas = torch.tensor([gamma if row in visited else 1.0 for row in index.tolist()], dtype=table.dtype)
    table[:, index] = mean_over_equal_rows(update(table[:, index], gammas), index)
    visited |= set(index.tolist())
    return table[:, index]


def close(actual, expected, tau, nothing=False, addend=1e-6):
    """Assert that two tensors agree as closely as the type of `actual` lets them.

    An exponent (s_ij - s_ii) / tau is at most 2 / tau, and the rounding of its similarities by eps becomes a relative
    error of 2 eps / tau in its exponential. Sums over the dimension, the batch and a few visits add some such errors:
    64 of them are allowed, relative to the largest of `expected` or, if that is larger, to `addend`.

    Args:
        tau: the lowest temperature.
        nothing: whether `expected` may be 0 throughout, where there is nothing to compare.
        addend: the size of the numbers whose sum `expected` is, where they may cancel. A loss's value is a mean of
            log-normalizers, whose errors are absolute, times tau.
    """
    largest = expected.abs().max().item()
    assert nothing or largest > 1e-5, "nothing to compare"
    bound = 64 * torch.finfo(actual.dtype).eps * max(2 / float(tau), 1.0) * max(largest, addend)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=bound)
