"""A signal at a batch, in this process or in another that gets this object."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from training_ext.core.rows import RowLoader

ITERATE = RowLoader.__iter__


class Killed(BaseException):
    """In place of a kill: nothing catches it."""


def kill(*args: Any, **kwargs: Any) -> NoReturn:
    raise Killed


@dataclass
class StopAt:
    """In place of `RowLoader.__iter__`: the signal comes while a batch is trained on.

    Args:
        batch: its number from 1 on in this run, the recovery's batches counted.
        rank: the one process that gets the signal.
        signal: or 0 for an exception.
    """

    batch: int
    rank: int = 0
    signal: int = signal.SIGTERM
    seen: int = 0

    def __get__(self, loader: RowLoader, owner: type) -> Callable[[], Iterator[Any]]:
        def iterate() -> Iterator[Any]:
            for item in ITERATE(loader):
                self.seen += 1
                if self.seen == self.batch and int(os.environ.get("RANK", 0)) == self.rank:
                    if not self.signal:
                        raise Killed
                    os.kill(os.getpid(), self.signal)
                yield item

        return iterate
