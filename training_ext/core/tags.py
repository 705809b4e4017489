"""`Tags`: the numbers that a train sample carries through OpenCLIP's pipeline, from where it is read to the loss.

In shards they stand in front of the caption, each with its name, until it is tokenized. Then they are int64 columns
behind its tokens, until `RowLoader` takes them off the batch. So OpenCLIP's decoding, loaders and collation need no
change.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from training_ext.core.patching import StandIn

SEPARATOR = "\x1f"
ROW = "row"
"""Name of the sample's row in the data set."""


@dataclass(frozen=True)
class Tags:
    """The numbers of the samples of one data set.

    Args:
        names: in the order of the columns; in the text the order is that in which they were written, the last first.
    """

    names: tuple[str, ...] = ()

    @staticmethod
    def write(caption: bytes, **numbers: int) -> bytes:
        """Put numbers in front of a caption, and of the numbers before it."""
        return "".join(f"{name}={number}{SEPARATOR}" for name, number in numbers.items()).encode() + caption

    def split(self, text: str) -> tuple[list[int], str]:
        """The numbers, in order, and the caption from a text with these numbers; ValueError if it lacks one."""
        *tags, caption = text.split(SEPARATOR, len(self.names))
        numbers = dict(tag.split("=", 1) for tag in tags if "=" in tag)
        if missing := [name for name in self.names if name not in numbers]:
            raise ValueError(f"no {' and '.join(missing)} before the caption {text!r}")
        return [int(numbers[name]) for name in self.names], caption

    def append(self, tokens: Tensor, *numbers: int) -> Tensor:
        """Append the numbers to the tokens (L,); (L + n,) int64."""
        return torch.cat([tokens.long(), torch.tensor(numbers, dtype=torch.int64)])

    def column(self, tokens: Tensor, name: str) -> Tensor:
        """The numbers of this name, (b,), in the tokens (b, L + n) of a batch."""
        return tokens[:, self.names.index(name) - len(self.names)]

    def take(self, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Divide the tokens (b, L + n) of a batch into the captions' (b, L) and the numbers by name, (b,) each."""
        numbers = {name: self.column(tokens, name).contiguous() for name in self.names}
        return tokens[:, : tokens.shape[1] - len(self.names)].contiguous(), numbers


class TagsTokenizer(StandIn):
    """OpenCLIP's tokenizer for texts with these numbers, which it appends to the tokens of a caption; (1, L + n)."""

    stands_for = "tokenizer"

    def __init__(self, tokenizer: Any, tags: Tags):
        self.tokenizer = tokenizer
        self.tags = tags

    def __call__(self, text: str, **options: Any) -> Tensor:
        numbers, caption = self.tags.split(text)
        return self.tags.append(self.tokenizer(caption, **options)[0], *numbers)[None]
