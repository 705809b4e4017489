"""Entries from before version 0.1 in checkpoints, which were in the optimizer's state."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from open_clip_ext import factory
from open_clip_ext.errors import InputError
from training_ext.core.state import FORMAT, PARTS

if TYPE_CHECKING:
    from training_ext.core.component import Component


def of_today(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry from before version 0.1 in the form of today; components find their state in `older`."""
    if entry.get("format") == FORMAT:
        return entry
    known = {*PARTS, *(option.name for option in factory.all_options() if option.in_state)}
    parts = {name: entry[name] for name in entry if name in known}
    own = {name: entry.get(name) for name in ("format", "loss", "num_rows", "state")}
    return {**own, "parts": parts, "older": entry}


def check_older(path: str, entry: dict[str, Any], components: "Iterable[Component]") -> None:
    """Raise InputError if only a component that the run lacks can go on from an entry from before version 0.1."""
    known = [id(value) for component in components for value in component.older_state(entry).values()]
    for name, where in (("position", "within an epoch"), ("rows", "with its rows in files of their own")):
        if entry.get(name) is not None and id(entry[name]) not in known:
            raise InputError(f"{path!r} was saved {where}, which the run's components cannot resume", "--resume")
