"""How the temperature moves.

The parameter is always OpenCLIP's `logit_scale` = log(1 / tau); the models pass its exponential, 1 / tau, to the loss.
"""

from torch import Tensor

from open_clip_ext.options import Option, not_negative, positive


class LearnableTemperature:
    """One tau for both sides, learned with the encoders (neuclip.txt Eq. 1 and 13; FastCLIP's RGCL-g).

    Each side adds tau * rho, so that both together add the 2 * tau * rho of Eq. 1: a larger rho pulls tau down.

    Args:
        rho: the papers use 6.5 on CC3M, 8.5 on CC12M and 11 on DFN (neuclip.txt Table 3); larger data, larger rho.
    """

    name = "learnable"
    options = (
        Option(
            "rho", float, 8.5, "pull on the temperature; 6.5 on CC3M, 8.5 on CC12M, 11 on DFN in the papers",
            valid=not_negative, wanted="a number >= 0",
        ),
    )
    # Settings of the optimizer group that the training side makes for logit_scale, not of the loss.
    optimizer_options = (
        Option(
            "lr_tau", float, None, "learning rate of logit_scale (default: --lr / 8, neuclip.txt Table 3)",
            valid=positive, wanted="a number > 0",
        ),
        Option(
            "lr_tau_scheduler", str, "model",
            "model: the shape of the model's schedule; fastclip: no warm-up, a third once tau <= 0.03",
            choices=("model", "fastclip"),
        ),
    )

    def __init__(self, rho: float = 8.5):
        self.rho = rho

    def value(self, tau: Tensor, log_values: Tensor) -> Tensor:
        """The global objective's estimate, 0-d, from the anchors' losses over tau (2, B)."""
        return tau * (log_values + self.rho).mean(dim=1).sum()

    def gradient(self, log_values: Tensor, tau_terms: Tensor, batch: int) -> Tensor:
        """This process's part of the derivative of `value` in tau (neuclip.txt Eq. 13), 0-d.

        Args:
            log_values: of this process's anchors, (2, b).
            tau_terms: tau * exp(-alpha_i) * dg_i/dtau of the same anchors, (2, b).
            batch: B.
        """
        return (log_values + self.rho + tau_terms).sum() / batch
