"""`Seam`: one row of the table of replaced names in `seams`."""

import importlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from inspect import isclass, isfunction
from typing import Any

from training_ext.core.patching import look_up
from training_ext.core.seam import names_in, parts_of
from training_ext.openclip.hosts import Host

RUN = "run"  # the scope of a whole run
# Names in braces are fields of `hosts.Host`.
MAIN, TRAIN, SHARDS, DATA = "{main}", "{train}", "{shards}", "open_clip_train.data"


@dataclass(frozen=True)
class Seam:
    """One replaced name.

    Args:
        module, path: the name; with a dotted path only this module sees the replacement.
        why: what OpenCLIP cannot do without it.
        contract: what the replacement relies on, to be checked when OpenCLIP changes.
        replacement: maps the original and the session to the replacement.
        scopes: when it is in place: the whole run, or while the train or validation data set is built.
        for_ext_loss: whether only a training with one of this package's losses needs it,
        for_components: or with a component that trains.
        may_be_off: whether a run goes on without it, after a warning, where OpenCLIP no longer has the name,
        needed_by: unless one of these flags is given.
        loop: LEGACY or TASKS of `hosts` if only that loop has the name; None for both.
    """

    module: str
    path: str
    why: str
    contract: str
    replacement: Callable[[Any, Any], Any]
    scopes: tuple[str, ...] = (RUN,)
    for_ext_loss: bool = False
    for_components: bool = False
    loop: str | None = None
    may_be_off: bool = False
    needed_by: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.module}.{self.path}"

    def is_there(self) -> bool:
        """Whether the installed OpenCLIP has the name."""
        try:
            look_up(self.module, self.path)
        except (AttributeError, ImportError):
            return False
        return True

    def is_used(self) -> bool:
        """Whether the installed OpenCLIP has the name; one that is not its own, a function that looks it up."""
        if not self.is_there():
            return False
        module = importlib.import_module(self.module)
        if self.path in vars(module):
            return True
        members = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
        methods = [value for kind in members if isclass(kind) for value in vars(kind).values()]
        functions = filter(isfunction, [*members, *methods])
        return any(parts_of(self.path) <= names_in(function.__code__) for function in functions)

    def of(self, host: Host) -> "Seam":
        """The row with the names of the installed OpenCLIP filled in."""
        names = asdict(host)
        return replace(self, module=self.module.format(**names), path=self.path.format(**names))
