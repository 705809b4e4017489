"""Replace names that OpenCLIP's modules look up, for the duration of a `with` block."""

import builtins
import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from typing import Any, ClassVar


class StandIn:
    """Has the attributes of the object in its attribute `stands_for`, besides its own."""

    stands_for: ClassVar[str]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # while a copy or a pickle is being made
            raise AttributeError(name)
        return getattr(vars(self)[self.stands_for], name)


class Overlay(StandIn):
    """Stands in for a module: has the module's names, except those that are set in `vars` of the overlay.

    Only the code that holds the overlay sees these; the module itself stays as it is.
    """

    stands_for = "_original"

    def __init__(self, original: Any):
        vars(self)["_original"] = original

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._original, name, value)


def look_up(module: str, path: str) -> Any:
    """The object at the dotted `path` in `module`, or else the built-in of this name, as the module's code finds it.

    Raises:
        AttributeError, ImportError: there is none.
    """
    found: Any = importlib.import_module(module)
    if not hasattr(found, path) and hasattr(builtins, path):
        return getattr(builtins, path)
    return attrgetter(path)(found)


@contextmanager
def replaced(replacements: dict[tuple[str, str], Any]) -> Iterator[None]:
    """Replace each (module, dotted path) by its value within the block, and restore the original afterwards.

    A path of several names (`torch.save` below `open_clip_train.main`) replaces the first of them by an overlay, so
    that only this module sees the change. A built-in name becomes a name of the module within the block.
    """
    with ExitStack() as undo:

        def put(holder: Any, name: str, value: Any) -> None:
            names = vars(holder)
            if name in names:
                undo.callback(names.__setitem__, name, names[name])
            else:
                undo.callback(names.pop, name)
            names[name] = value

        for (module_name, path), value in replacements.items():
            holder: Any = importlib.import_module(module_name)
            *parents, last = path.split(".")
            for name in parents:
                if not isinstance(getattr(holder, name), Overlay):
                    put(holder, name, Overlay(getattr(holder, name)))
                holder = getattr(holder, name)
            put(holder, last, value)
        yield
