"""`Seam`: one name of OpenCLIP's that is replaced while a run trains, and what the replacement relies on."""

import dis
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from training_ext.core.patching import look_up, replaced

MAIN, TRAIN, DATA = "open_clip_train.main", "open_clip_train.train", "open_clip_train.data"
RUN, TRAIN_DATA, VAL_DATA = "run", "train data", "validation data"
"""When a name is replaced: during the whole run, or while a data set is built."""


@dataclass(frozen=True)
class Seam:
    """One replaced name.

    Args:
        module, path: the name; with a dotted path only this module sees the replacement.
        why: what OpenCLIP cannot do without it.
        contract: what the replacement relies on; `used_by` and `parameters` are the part that is checked at the start.
        replacement: maps the original and the owner, the `Run` or a component, to the replacement.
        used_by: the function that looks the name up, itself or in one of its module that it calls, as
            "module:function".
        parameters: names of parameters of the original that the replacement relies on.
        layer: where several replace the same name, those of a higher layer get the lower ones' replacement as original.
        scopes: of RUN, TRAIN_DATA and VAL_DATA.
    """

    module: str
    path: str
    why: str
    contract: str
    replacement: Callable[[Any, Any], Any]
    used_by: str = f"{MAIN}:main"
    parameters: tuple[str, ...] = ()
    layer: int = 0
    scopes: tuple[str, ...] = (RUN,)

    @property
    def name(self) -> str:
        return f"{self.module}.{self.path}"

    def broken(self) -> str | None:
        """What of the contract the installed OpenCLIP does not keep, in words; None if it keeps it."""
        try:
            original = look_up(self.module, self.path)
        except (AttributeError, ImportError):
            return f"there is no {self.name}"
        module, _, function = self.used_by.partition(":")
        try:
            user = look_up(module, function)
        except (AttributeError, ImportError):
            return f"there is no {module}.{function}"
        if not parts_of(self.path) <= names_used(inspect.unwrap(user)):
            return f"{module}.{function} does not use {self.path}"
        if self.parameters:
            known = inspect.signature(original).parameters
            unknown = [name for name in self.parameters if name not in known]
            if unknown and not any(kind.kind is kind.VAR_KEYWORD for kind in known.values()):
                return f"{self.name} takes no {unknown[0]}"
        return None


def names_used(function: Any) -> set[str]:
    """`names_in` a function and in those of its module that it calls, since OpenCLIP divides long ones."""
    users = [function]
    names: set[str] = set()
    for user in users:  # which grows
        used = names_in(user.__code__)
        names |= used
        for other in map(user.__globals__.get, used):
            if isinstance(other, FunctionType) and other.__module__ == user.__module__ and other not in users:
                users.append(other)
    return names


@cache
def names_in(code: CodeType) -> frozenset[str]:
    """Global and imported names that a function uses, and attributes with a dot before them; also within it."""
    names = {
        f".{step.argval}" if "ATTR" in step.opname or "METHOD" in step.opname else step.argval
        for step in dis.get_instructions(code) if step.opcode in dis.hasname
    }
    return frozenset(names).union(*(names_in(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def parts_of(path: str) -> set[str]:
    """A dotted path as the names of `names_in`."""
    first, *attributes = path.split(".")
    return {first, *(f".{name}" for name in attributes)}


def replacements(owned: Iterable[tuple[Seam, Any]], scope: str) -> dict[tuple[str, str], Any]:
    """What replaces each (module, path) in `scope`.

    Args:
        owned: seams with their owners.
    """
    values: dict[tuple[str, str], Any] = {}
    for seam, owner in sorted(owned, key=lambda pair: pair[0].layer):
        if scope in seam.scopes:
            place = seam.module, seam.path
            original = values[place] if place in values else look_up(*place)
            values[place] = seam.replacement(original, owner)
    return values


@contextmanager
def in_place(owned: Iterable[tuple[Seam, Any]], scope: str) -> Iterator[None]:
    """Replace the names of `scope` within the block."""
    with replaced(replacements(owned, scope)):
        yield
