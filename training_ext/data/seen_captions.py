"""The captions of the train data that are read before the start."""

from dataclasses import dataclass
from itertools import islice

import pandas as pd

from training_ext.data.tables import is_empty

FIRST = 1000  # captions by which the share that is longer than the context is estimated


@dataclass(frozen=True)
class SeenCaptions:
    """Captions of the train data that are read before the start, without empty ones.

    Args:
        first: the first of them, at most `FIRST`.
        repeated: how many of all that were read another pair has, too.
        where: all that were read, in words.
        images: number of lines of a csv whose image, as it is read, another line has, too.
    """

    first: list[str]
    repeated: int
    where: str
    images: int = 0


def see(captions: pd.Series, images: pd.Series | None, where: str) -> SeenCaptions:
    """The captions that were read, of these images if a caption may stand beside others of its image."""
    non_empty = captions[~captions.map(is_empty)]
    examples = [str(caption) for caption in islice(non_empty, FIRST)]
    if images is not None:
        non_empty = non_empty[~pd.DataFrame({0: non_empty, 1: images}).duplicated()]
    return SeenCaptions(examples, int(non_empty.duplicated(keep=False).sum()), where.format(len(non_empty)))
