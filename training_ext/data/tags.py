"""`Tags`: the numbers that a train sample carries through OpenCLIP's pipeline, from where it is read to the loss.

In shards they stand in front of the caption until it is tokenized. Then they are int64 columns behind its tokens, until
`RowLoader` takes them off the batch. So OpenCLIP's decoding, loaders and collation need no change.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

SEPARATOR = "\x1f"
KEY, ROW, NUMBER = "key", "row", "number"
"""What the numbers tell: samples with the same key are no negatives of each other; the row in the data set; how many
samples the loader worker had read by then."""


@dataclass(frozen=True)
class Tags:
    """The numbers of the samples of one data set.

    Args:
        names: in the order in which they are written, that of the columns; the last one comes first in the text.
    """

    names: tuple[str, ...]

    @staticmethod
    def write(caption: bytes, number: int) -> bytes:
        """Put a number in front of a caption, and of the numbers before it."""
        return f"{number}{SEPARATOR}".encode() + caption

    def split(self, text: str) -> tuple[list[int], str]:
        """The numbers, in order, and the caption from a text with these numbers; ValueError if it has fewer."""
        *numbers, caption = text.split(SEPARATOR, len(self.names))
        if len(numbers) < len(self.names):
            raise ValueError(f"no {' and '.join(self.names)} before the caption {text!r}")
        return [int(number) for number in reversed(numbers)], caption

    def append(self, tokens: Tensor, *numbers: int) -> Tensor:
        """Append the numbers to the tokens (L,); (L + n,) int64."""
        return torch.cat([tokens.long(), torch.tensor(numbers, dtype=torch.int64)])

    def tokenizer(self, tokenizer: Callable) -> Callable[[str], Tensor]:
        """A tokenizer of such texts that appends their numbers to what OpenCLIP's `tokenizer` gives, (1, L + n)."""
        return partial(self._tokenize, tokenizer)

    def _tokenize(self, tokenizer: Callable, text: str) -> Tensor:
        numbers, caption = self.split(text)
        return self.append(tokenizer(caption)[0], *numbers)[None]

    def take(self, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Divide the tokens (b, L + n) of a batch into the captions' (b, L) and the numbers by name, (b,) each."""
        length = tokens.shape[1] - len(self.names)
        columns = tokens[:, length:].unbind(1)
        return tokens[:, :length].contiguous(), {
            name: column.contiguous() for name, column in zip(self.names, columns, strict=True)
        }
