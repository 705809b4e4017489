"""SuperCLIP, arXiv 2512.14480: the image also predicts which tokens its caption has."""

import torch
from torch import Tensor


def superclip_weights(df: Tensor, n: int) -> Tensor:
    """SuperCLIP's inverse document frequency of every token, (V,): log((n + 1) / (1 + df)).

    The paper's numerator is n. With n + 1, as in the code of SuperClass (arXiv 2411.03313), a token that every caption
    has gets weight 0.

    Args:
        df: (V,), the number of captions that have the token, of n.
    """
    return ((n + 1) / (1 + df)).log()


def superclip(logits: Tensor, texts: Tensor, w: Tensor, padding: int) -> Tensor:
    """The term that SuperCLIP adds to CLIP's loss, 0-d: cross-entropy of the caption's tokens given its image.

    A caption whose tokens all have weight 0 adds nothing. `training_ext.components.token_head` computes the same.

    Args:
        logits: (B, V), a linear layer over the vision tower's output.
        texts: (B, L), tokens.
        w: (V,), see `superclip_weights`.
        padding: number of the token that fills short captions; it is no target.
    """
    y = torch.zeros_like(logits).scatter(1, texts, 1.0)  # K-hot
    y[:, padding] = 0
    target = w * y / (w * y).sum(dim=1, keepdim=True).clamp_min(1e-12)
    return -(target * logits.log_softmax(dim=1)).sum(dim=1).mean()
