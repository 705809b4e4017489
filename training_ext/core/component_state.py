"""The components' part of our entry in a checkpoint, and the weights that they write for plain OpenCLIP."""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from open_clip_ext.errors import InputError
from training_ext.core.component import Component
from training_ext.core.files import atomic_save
from training_ext.core.older import check_older
from training_ext.core.state import WEIGHTS


def check_states(path: str, entry: dict[str, Any], components: Sequence[Component]) -> None:
    """Raise InputError unless these components are those that a checkpoint with this entry needs, and can go on."""
    if "older" in entry:
        check_older(path, entry["older"], components)
    had, resumed = entry.get("components", {}), {one.name: one for one in components if one.is_resumed()}
    missing = [("with", name) for name in had if name not in resumed and name not in entry.get("optional", ())]
    new = [("without", name) for name, one in resumed.items() if name not in had and one.state_is_needed]
    for was, name in [*missing, *new]:
        raise InputError(f"{path!r} was trained {was} the component {name}; train {was} it", "--resume")
    given = settings_of(components)
    for flag, value in entry.get("settings", {}).items():
        if given.get(flag, value) != value:
            raise InputError(f"{path!r} was trained with {value}, which --resume keeps", flag)
    for component in components:
        component.check_state(component.state_in(entry), path)


def settings_of(components: Sequence[Component]) -> dict[str, Any]:
    """What a resumed run needs alike, by flag: the components' options that their weights or state depend on."""
    return {o.flag: getattr(component, o.name) for component in components for o in component.options if o.in_state}


def gather_states(components: Sequence[Component]) -> dict[str, Any]:
    """What a checkpoint has of components; empty without any. Every process calls this."""
    having = [component for component in components if component.is_resumed()]
    states = {component.name: component.state_dict() for component in having}
    states = {one.name: states[one.name] for one in having if states[one.name] or one.state_is_needed}
    optional = [one.name for one in having if one.name in states and not one.state_is_needed]
    return {"components": states, "optional": optional, "settings": settings_of(components)} if states else {}


def export(save: Callable, content: dict[str, Any], path: str, components: Sequence[Component]) -> None:
    """Write weights that plain OpenCLIP loads, in the folder `weights` beside the checkpoint's, if a component changes
    the model."""
    exporting = [component for component in components if component.answers("export")]
    if exporting:
        weights = {name.removeprefix("module."): value for name, value in content["state_dict"].items()}
        for component in exporting:
            weights = component.export(weights)
        folder, name = os.path.split(path)
        folder = os.path.join(os.path.dirname(folder), WEIGHTS)
        os.makedirs(folder, exist_ok=True)
        # OpenCLIP renames its tmp.pt when it is written.
        atomic_save(save, weights, os.path.join(folder, "epoch_latest.pt" if name == "tmp.pt" else name))
        if components[0].args.delete_previous_checkpoint:  # whose checkpoint OpenCLIP removes
            with suppress(FileNotFoundError):
                os.remove(os.path.join(folder, f"epoch_{content['epoch'] - 1}.pt"))
