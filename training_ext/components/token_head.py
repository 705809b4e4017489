"""SuperCLIP's token head, arXiv 2512.14480: the image also predicts which tokens its caption has."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from open_clip_ext.distributed import world_size
from open_clip_ext.options import POSITIVE, option
from training_ext.core.component import Component


class TokenHead(Component):
    """Adds a linear layer over the vision tower's output, and its cross-entropy to any loss, `equations.superclip`.

    A token's weight is its inverse document frequency over the captions of all steps before this one, on all
    processes. So the target does not depend on how a step's batch is split over processes and --accum-freq. In the
    first step, before any are counted, all weights are 1.
    """

    name, switch = "token_head", "token_head"
    layer = -1  # a step is counted before another component saves after it
    token_head: float | None = option(
        None, "add a head that predicts the caption's tokens from the image, with this weight", **POSITIVE
    )

    def wrap_model(self, model: Any) -> None:
        text, scale = getattr(model, "text", model), model.logit_scale
        model.token_head = nn.Linear(output_width(model), text.vocab_size, device=scale.device, dtype=scale.dtype)
        self._head = model.token_head
        self._padding = padding_of(text)
        # By token the number of captions that have it, then the number of captions: of earlier steps, and of this one
        self._counts = torch.zeros(text.vocab_size + 1, dtype=torch.int64, device=scale.device)
        self._of_step = self._counts.clone()
        self._features: Tensor
        model.visual.register_forward_hook(self._keep)

    def _keep(self, visual: nn.Module, args: tuple, output: Any) -> None:
        if visual.training:
            self._features = output[0] if isinstance(output, tuple) else output

    def losses(self, batch: dict[str, Tensor], output: dict[str, Tensor]) -> dict[str, Tensor]:
        tokens = batch["text"].sort(dim=1).values  # (b, L)
        is_first = torch.ones_like(tokens, dtype=torch.bool)
        is_first[:, 1:] = tokens.diff(dim=1) != 0
        is_target = is_first & (tokens != self._padding)
        if self.args.accum_freq == 1 or not torch.is_grad_enabled():  # a micro-batch passes twice
            self._of_step.scatter_add_(0, tokens.flatten(), is_target.flatten().long())
            self._of_step[-1] += len(tokens)

        logits = self._head(self._features.to(self._head.weight.dtype))  # (b, V)
        del self._features
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        log_probs = logits.gather(1, tokens) - logits.logsumexp(dim=1, keepdim=True)
        log_counts = (1 + self._counts).to(logits.dtype).log()
        weights = (log_counts[-1] - log_counts[tokens] + (self._counts[-1] == 0)) * is_target
        cross_entropy = -(weights * log_probs).sum(dim=1) / weights.sum(dim=1).clamp_min(1e-12)
        assert self.token_head is not None
        return {"token": self.token_head * cross_entropy.mean()}

    def step_done(self, step: int) -> None:
        if world_size() > 1:
            dist.all_reduce(self._of_step)
        self._counts = self._counts + self._of_step
        self._of_step.zero_()

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self._counts.cpu()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._counts = state["counts"].to(self._counts.device)

    def export(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: weight for name, weight in weights.items() if not name.startswith("token_head.")}


def output_width(model: Any) -> int:
    """d, the width of both towers' outputs. A timm image tower has no `output_dim`; the text tower then tells it."""
    text: Any = getattr(model, "text", model)
    widths = [tower.output_dim for tower in (model.visual, text) if hasattr(tower, "output_dim")]
    return widths[0] if widths else model.text_projection.shape[1]


def padding_of(text: Any) -> int:
    """The token with which a text tower's captions are filled up."""
    config = getattr(text, "config", None)  # of a tower of Hugging Face
    padding = getattr(text, "pad_id", 0) if config is None else config.pad_token_id
    return -1 if padding is None else padding
