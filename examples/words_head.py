"""A component in a package of its own: the image also predicts the tokens of its caption, each with an equal part.

`--token-head` has SuperCLIP's weights of the tokens. The package names the class in its pyproject.toml,

    [project.entry-points."open_clip_ext.components"]
    words_head = "words_head:WordsHead"

and `python -m open_clip_ext.main --words-head 1 --loss neuclip ...` trains with it.
"""

from typing import Any

from torch import Tensor, nn

from open_clip_ext.options import POSITIVE, option
from training_ext.core.component import Component


class WordsHead(Component):
    """Adds weight * cross-entropy of the caption's tokens, each with an equal part, given the vision tower's output."""

    name, switch = "words_head", "words_head"
    words_head: float | None = option(
        None, "add a head that predicts the caption's tokens from the image, with this weight", **POSITIVE
    )

    def wrap_model(self, model: Any) -> None:
        text = getattr(model, "text", model)
        width = model.visual.output_dim
        model.words_head = nn.Linear(width, text.vocab_size, device=model.logit_scale.device)
        self._head = model.words_head
        model.visual.register_forward_hook(lambda module, args, output: setattr(self, "_features", output))

    def losses(self, batch: dict[str, Tensor], output: dict[str, Tensor]) -> dict[str, Tensor]:
        log_probabilities = self._head(self._features.float()).log_softmax(dim=1)  # (b, vocabulary)
        has_token = log_probabilities.new_zeros(log_probabilities.shape).scatter_(1, batch["text"], 1.0)
        has_token[:, 0] = 0.0  # padding
        target = has_token / has_token.sum(dim=1, keepdim=True)
        assert self.words_head is not None
        return {"words": -self.words_head * (target * log_probabilities).sum(dim=1).mean()}

    def export(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: weight for name, weight in weights.items() if not name.startswith("words_head.")}
