"""The compositional encoder objective: the normalizers are constants.

NeuCLIP, Eq. 4 and 13 (SogCLR, FastCLIP). Per anchor the global objective is

    tau * (log(eps + g_i) + rho),    estimated by    tau * (alpha_i + rho),

and its gradient with exp(-alpha_i) in place of 1 / (eps + g_i). As printed: `equations.sogclr`,
`equations.fastclip_v3`.
"""

from torch import Tensor


class Compositional:
    name = "compositional"
    needs_differentiable_normalizer = False

    @staticmethod
    def log_values(log_batch: Tensor, alpha: Tensor) -> Tensor:
        """The anchors' losses divided by tau, without rho; all arguments and the result (2, B).

        Args:
            log_batch: L = log(eps + g) over the batch.
            alpha: log-normalizers.
        """
        return alpha

    @staticmethod
    def alpha_gradient(log_batch: Tensor, alpha: Tensor) -> Tensor | None:
        """Derivative of `log_values` in alpha at fixed L, (2, B); None where alpha is a constant."""
        return None
