"""Error of the normalizers in use, estimated while training.

A few anchors of a batch are stored with their estimates, log u_i or a network's alpha_i, and compared with the samples
of the following steps. After k steps g_i is a mean over the negatives of about k batches, and its log almost exact,
except that the encoders have changed during those k steps. NeuCLIP, Appendix B.6 measures the error against the whole
data set, as `normalizers_report` does.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from open_clip_ext.batch import Batch, add_eps, log_mean_of_directions
from open_clip_ext.side_model import below
from open_clip_ext.surrogates import Surrogate


@dataclass
class StoredAnchors:
    """k anchors stored for comparison, and sums over the negatives of the steps since; images as anchors first."""

    embeddings: Tensor  # (2, k, d)
    positives: Tensor  # s_ii, (k,)
    taus: Tensor  # (2, k), as the next four
    alpha: Tensor  # log-normalizers from the estimator in use
    log_batch: Tensor  # log-normalizers from their own batch alone
    log_sum: Tensor  # of exp(l / tau) over the negatives of all steps so far
    mean: Tensor  # of l / tau over these negatives with the weights exp(l / tau)
    effective: Tensor  # effective number of negatives in their own batch, 0-d
    negatives: Tensor  # number of negatives per anchor so far, 0-d
    steps: int = 1  # number of steps so far

    def or_else(self, finite: Tensor, other: "StoredAnchors") -> "StoredAnchors":
        """A copy with the tensors of `other`, of the same shapes, unless `finite`, 0-d bool on the device."""
        chosen: dict[str, Any] = {
            name: torch.where(finite, value, vars(other)[name])
            for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **chosen)


class OnlineError:
    """Compares the normalizers of a few anchors with their normalizers over the samples of many steps.

    A sample that occurs again within these steps would be its own negative, so every epoch starts over. The anchors of
    its first step are replaced after `skip` steps and not compared: a queue may begin an epoch empty, and would then be
    judged by the one step in which it is the minibatch's own estimate. Anchors that a batch that is not
    finite would replace stay.

    Args:
        surrogate, eps, intra_modal, one_per_pair: as in the loss.
    """

    anchors = 32  # stored at a time, the first of a global batch
    window = 100  # steps after which new anchors replace them
    least = 5  # steps before which no error is reported
    skip = 5  # steps of an epoch before the first anchors that are compared

    def __init__(self, surrogate: Surrogate, eps: float, intra_modal: bool, one_per_pair: bool):
        self.surrogate = surrogate
        self.eps = eps
        self.intra_modal = intra_modal
        self.one_per_pair = one_per_pair
        self.restart()

    def restart(self) -> None:
        self._watched: StoredAnchors | None = None
        self._shown: dict[str, Tensor] = {}
        self._warm = self.skip == 0  # whether the present anchors will be compared

    @torch.no_grad()
    def observe(self, batch: Batch, alpha: Tensor) -> None:
        """Add a step's samples to the stored anchors' negatives; store new anchors where they are due.

        Args:
            batch: the global batch.
            alpha: log-normalizers in use, of all its anchors, (2, B).
        """
        before = None
        if self._watched is not None and self._watched.steps == (self.window if self._warm else self.skip):
            if self._warm:
                self._shown = self._compare(self._watched)
            self._warm = True
            before, self._watched = self._watched, None
        watched = self._watched
        kind = batch.all_image.dtype, batch.all_image.device
        if watched is None or (watched.embeddings.dtype, watched.embeddings.device) != kind:
            self._watched = self._begin(batch, alpha)
            if before is not None and before.embeddings.shape == self._watched.embeddings.shape:
                self._watched = self._watched.or_else(batch.finite, before)
            return
        exponents = self._exponents(watched.embeddings, watched.positives, watched.taus, batch)
        met, mean = log_sum_and_mean(exponents)
        both = torch.logaddexp(watched.log_sum, met)
        mean = torch.lerp(watched.mean, mean, (met - both).exp())
        watched.log_sum = torch.where(batch.finite, both, watched.log_sum)
        watched.mean = torch.where(batch.finite, mean, watched.mean)
        watched.negatives.add_(batch.finite, alpha=self._columns(batch))
        watched.steps += 1

    def _columns(self, batch: Batch) -> int:
        return batch.size * (2 if self.intra_modal else 1)

    def _begin(self, batch: Batch, alpha: Tensor) -> StoredAnchors:
        k = min(self.anchors, batch.size)
        embeddings = torch.stack([batch.all_image[:k], batch.all_text[:k]])
        positives, taus = batch.all_positives[:k].clone(), batch.all_tau[:, :k].clone()
        exponents = self._exponents(embeddings, positives, taus, batch)
        anchor = torch.arange(k, device=alpha.device)
        for start in range(0, exponents.shape[2], batch.size):
            exponents[:, anchor, anchor + start] = torch.finfo(exponents.dtype).min  # whose product with 0 is 0
        log_sum, mean = log_sum_and_mean(exponents)
        effective = (2 * log_sum - (2 * exponents).logsumexp(dim=2)).exp().mean()
        negatives = self._columns(batch) - (2 if self.intra_modal else 1)
        return StoredAnchors(
            embeddings, positives, taus, alpha[:, :k].clone(), batch.all_log_batch[:, :k].clone(), log_sum, mean,
            effective, negatives=log_sum.new_full((), negatives),
        )

    def _exponents(self, embeddings: Tensor, positives: Tensor, taus: Tensor, batch: Batch) -> Tensor:
        """l(s_ij - s_ii) / tau of k anchors against the batch, (2, k, B), or (2, k, 2 B) with intra-modal pairs."""
        columns = [(batch.all_text, batch.all_image)]  # for images and for texts as anchors
        if self.intra_modal:
            columns.append((batch.all_image, batch.all_text))
        similarities = embeddings.new_empty(*embeddings.shape[:2], len(columns) * batch.size)
        for sides, block in zip(columns, similarities.split(batch.size, dim=2), strict=True):
            for anchors, side, out in zip(embeddings, sides, block, strict=True):
                torch.mm(anchors, side.T, out=out)
        return self.surrogate.value(similarities.sub_(positives[:, None])) / taus[:, :, None]

    def _compare(self, anchors: StoredAnchors) -> dict[str, Tensor]:
        log_negatives = anchors.negatives.log()
        exact = add_eps(anchors.log_sum - log_negatives, self.eps)
        if self.one_per_pair:
            exact = log_mean_of_directions(exact)
        difference = anchors.alpha - exact
        return {
            "normalizer_mse": difference.square().mean(),
            "normalizer_bias": difference.mean(),
            "minibatch_mse": (anchors.log_batch - exact).square().mean(),
            "negatives_kl": (anchors.mean - anchors.log_sum).mean() + log_negatives,
        }

    def diagnostics(self) -> dict[str, Tensor]:
        """Errors of the log-normalizers, and how the negatives' weights are spread, 0-d each.

        `normalizer_mse` and `normalizer_bias` are of the estimator in use, `minibatch_mse` is of the batch's own
        estimate. `negatives_kl` is the mean of log N - H(p_i), the divergence of an anchor's weights p_ij, proportional
        to w_ij = exp(l_ij / tau), from equal weights of all N negatives; a learned tau rests where it is rho
        (`LearnableTemperature`). Until `least` steps they are those of the previous anchors. `effective_negatives` of
        the present anchors in their batch is (sum w)^2 / sum w^2, from 1 to the number of negatives.
        """
        if self._watched is None:
            return {}
        comparable = self._warm and self._watched.steps >= self.least
        compared = self._compare(self._watched) if comparable else self._shown
        return {**compared, "effective_negatives": self._watched.effective}

    def state(self) -> dict[str, Tensor | int]:
        """The stored anchors and the latest errors, as CPU tensors and numbers."""
        watched = {} if self._watched is None else {f"watched.{name}": v for name, v in vars(self._watched).items()}
        state = {"warm": int(self._warm)} | watched | {f"shown.{name}": value for name, value in self._shown.items()}
        return {name: v.cpu().clone() if isinstance(v, Tensor) else v for name, v in state.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Load the result of `state`."""
        self._warm = bool(state.get("warm", True))
        watched = below(state, "watched.")
        self._watched = None
        if "mean" in watched:  # states from before it start over
            log_sum = watched["log_sum"]
            negatives = torch.as_tensor(watched["negatives"], dtype=log_sum.dtype, device=log_sum.device)
            self._watched = StoredAnchors(**{**watched, "negatives": negatives.clone()})  # before, a number
        self._shown = below(state, "shown.")


def log_sum_and_mean(exponents: Tensor) -> tuple[Tensor, Tensor]:
    """log sum exp(x) and the mean of x with the weights exp(x), over the last dimension."""
    return exponents.logsumexp(dim=-1), (exponents.softmax(dim=-1) * exponents).sum(dim=-1)
