"""The unified encoder objective: the encoders also minimise through the normalizers' embedding inputs.

NeuCLIP, Eq. 12. Per anchor

    tau * (exp(-alpha_i) * (eps + g_i) + alpha_i - 1 + rho),    alpha_i = alpha(W; e_1i, e_2i),

with W constant here. It is an upper bound of tau * (log(eps + g_i) + rho), met where alpha_i = log(eps + g_i), and
linear in g_i, so that a batch's g_i gives an unbiased estimate for an alpha that does not depend on the batch. Of the
two parts of its gradient the one at fixed alpha equals that of the compositional objective.

exp(L_i - alpha_i) is bounded as `pairs.MAX_LOG_WEIGHT` says. As printed: `equations.neuclip`.
"""

from torch import Tensor

from open_clip_ext.pairs import MAX_LOG_WEIGHT


class Unified:
    name = "unified"
    needs_differentiable_normalizer = True

    @staticmethod
    def log_values(log_batch: Tensor, alpha: Tensor) -> Tensor:
        """The anchors' losses divided by tau, without rho; all arguments and the result (2, B).

        Args:
            log_batch: L = log(eps + g) over the batch.
            alpha: log-normalizers.
        """
        return (log_batch - alpha).clamp(max=MAX_LOG_WEIGHT).exp() + alpha - 1

    @staticmethod
    def alpha_gradient(log_batch: Tensor, alpha: Tensor) -> Tensor:
        """Derivative of `log_values` in alpha at fixed L, (2, B)."""
        return 1 - (log_batch - alpha).clamp(max=MAX_LOG_WEIGHT).exp()
