"""TempNet, arXiv 2404.04575, from the authors' code: a network predicts each sample's temperature."""

from torch import Tensor
from torch.nn.functional import normalize

from open_clip_ext.equations.isogclr import isogclr


def tempnet_tau(
    e: Tensor, A: Tensor, a: Tensor, w: Tensor, log_phi: Tensor, c: Tensor, b: Tensor, tau_min: float, tau_max: float
) -> Tensor:
    """TempNet's temperatures, (B,), of one modality's embeddings e, (B, d): the authors' code without its dropout.

    Fast: `NetworkTemperature`.

    Args:
        A, a: weight, (d, d), and bias, (d,), of the layer before the prototypes.
        w: prototypes, (m, d).
        log_phi: log of the softmax temperature over prototypes, 0-d.
        c, b: weight, (m,), and bias, 0-d, of the output.
    """
    z = (e.detach() @ A.T + a).sigmoid() @ normalize(w, dim=1).T
    p = (z / log_phi.exp()).softmax(dim=1)
    return tau_min + (tau_max - tau_min) * (((p - 1 / len(w)) * z.sigmoid()) @ c + b).sigmoid()


tempnet = isogclr  # with tau from `tempnet_tau`: autograd passes the gradient in tau on to the network
