"""Load the losses and parts that other packages register as entry points.

| group | the entry point is |
|---|---|
| `open_clip_ext.losses` | a `LossPreset` of that name |
| `open_clip_ext.normalizers` | a subclass of `Normalizer` of that name |
| `open_clip_ext.temperatures` | a subclass of `Temperature` of that name |
| `open_clip_ext.surrogates` | a subclass of `Surrogate` of that name |
"""

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from open_clip_ext.errors import InputError


def load(group: str, table: dict[str, Any], is_valid: Callable[[Any], bool], expected: str) -> None:
    """Add the entry points of a group to its table.

    Args:
        group: as in the table above.
        table: registered so far, by name.
        is_valid: predicate on a loaded object; `expected` says in words what it accepts.

    Raises:
        InputError: an entry point cannot be imported, has the wrong type or name, or its name is taken; the message
            names the package to fix or uninstall.
    """
    for point in entry_points(group=group):
        package = point.dist.name if point.dist is not None else point.value
        given = f"entry point {point.name!r} of {package} in group {group}"
        try:
            loaded = point.load()
        except Exception as error:
            raise InputError(f"{given}: {point.value!r} cannot be imported: {error!r}") from None
        if not is_valid(loaded) or loaded.name != point.name:
            raise InputError(f"{given}: {point.value!r} must be {expected} with that name")
        if table.get(point.name, loaded) is not loaded:
            raise InputError(f"{given}: the name is taken; choose another")
        table[point.name] = loaded
