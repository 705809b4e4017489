"""Replace names that OpenCLIP's modules look up, for the duration of a `with` block."""

import builtins
import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


class Overlay:
    """Stands in for a module: has the module's names, except those that are replaced on the overlay.

    Only the code that holds the overlay sees the replacement; the module itself stays as it is.
    """

    def __init__(self, original: Any):
        object.__setattr__(self, "_original", original)
        object.__setattr__(self, "_replaced", {})

    def __getattr__(self, name: str) -> Any:
        # `_original` is absent while a copy or a pickle of the overlay is being made.
        if name.startswith("__") or "_original" not in vars(self):
            raise AttributeError(name)
        replaced = self._replaced
        return replaced[name] if name in replaced else getattr(self._original, name)

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
    for name in path.split("."):
        found = getattr(found, name)
    return found


@contextmanager
def replaced(replacements: dict[tuple[str, str], Any]) -> Iterator[None]:
    """Replace each (module, dotted path) by its value within the block, and restore the original afterwards.

    A path of several names (`torch.save` below `open_clip_train.main`) replaces the first of them by an overlay, so
    that only this module sees the change. A built-in name becomes a name of the module within the block.
    """
    with ExitStack() as undo:
        for (module_name, path), value in replacements.items():
            holder: Any = importlib.import_module(module_name)
            *parents, last = path.split(".")
            for depth, name in enumerate(parents):
                child = holder._replaced.get(name) if isinstance(holder, Overlay) else getattr(holder, name)
                if not isinstance(child, Overlay):
                    original = getattr(holder, name)
                    child = Overlay(original)
                    if depth == 0:
                        undo.callback(setattr, holder, name, original)
                        setattr(holder, name, child)
                    else:
                        holder._replaced[name] = child
                holder = child
            if isinstance(holder, Overlay):
                undo.callback(object.__setattr__, holder, "_replaced", holder._replaced)
                object.__setattr__(holder, "_replaced", {**holder._replaced, last: value})
            else:
                if hasattr(holder, last):
                    undo.callback(setattr, holder, last, getattr(holder, last))
                else:
                    undo.callback(delattr, holder, last)
                setattr(holder, last, value)
        yield
