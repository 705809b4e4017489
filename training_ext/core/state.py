"""This package's state in OpenCLIP's checkpoints: one key beside OpenCLIP's own, of tensors, numbers and strings."""

import math
import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from open_clip_ext.errors import InputError
from open_clip_ext.files import whole_file
from open_clip_ext.losses import Loss
from training_ext.core.component import Component, Components, is_resumed, overrides

KEY = "open_clip_ext"
FORMAT = 5  # before it the entry was in the optimizer's state
CHECKPOINTS, WEIGHTS = "checkpoints", "weights"  # folders of a run


class State:
    """Takes our entry out of the checkpoint that is resumed, and adds it to those that OpenCLIP writes.

    Args:
        has_tasks: whether OpenCLIP's loop is that of tasks.

    Attributes:
        resumed: the entry of the resumed checkpoint, until it is loaded.
    """

    def __init__(self, args: Namespace, components: Components, has_tasks: bool):
        self.args = args
        self.has_tasks = has_tasks
        self.components = components
        self.resumed: dict[str, Any] | None = None
        self._next: dict[str, Any] | None = None

    # Resuming

    def check(self) -> None:
        """Refuse a local checkpoint that does not fit, before anything is written; its tensors stay on disk.

        Raises:
            InputError: see `_check`; or there is no such file; or this run's checkpoints would lack its state.
        """
        args, path = self.args, self.args.resume
        has_state = args.uses_ext_loss or any(map(is_resumed, self.components))
        if has_state and getattr(args, "fsdp", False) and args.fsdp_checkpoint == "sharded":
            raise InputError("'sharded' would leave out the state of the loss; give full", "--fsdp-checkpoint")
        if path in (None, "latest") or "://" in path:
            return
        if os.path.isdir(path):
            raise InputError(f"{path!r} is a folder, of FSDP's sharded state; give a file epoch_N.pt", "--resume")
        if not os.path.exists(path):
            raise InputError(f"there is no {path!r}", "--resume")
        with _in_one_line(path):
            self._check(torch.load(path, map_location="cpu", mmap=True, weights_only=True))

    def load(self, original: Callable, path: str, **options: Any) -> Any:
        """Replaces OpenCLIP's `pt_load`, which reads --resume before it creates the data."""
        with _in_one_line(path):
            loaded = original(path, **options)
        self.resumed = self._check(loaded)
        if isinstance(loaded, dict):
            loaded.pop(KEY, None)
            loaded.get("optimizer", {}).pop(KEY, None)
            self._fit(loaded)
        return loaded

    def _check(self, loaded: Any) -> dict[str, Any] | None:
        """Our entry of a loaded checkpoint; None of a file of weights alone.

        Raises:
            InputError: it is of another loss, or of other components or their settings; or only a component can resume
                it.
        """
        args, path = self.args, self.args.resume
        if not isinstance(loaded, dict) or "epoch" not in loaded:
            for one in self.components:
                if overrides(one, Component.wrap_model):
                    raise InputError(f"{path!r} has no weights of {one.name}; give it as --pretrained", "--resume")
            return None
        check_optimizer(path, loaded, self.has_tasks, self.has_tasks and bool(args.fsdp))
        entry = loaded.get(KEY, loaded.get("optimizer", {}).get(KEY, {}))
        own = "OpenCLIP's own loss"
        trained = f"--loss {entry['loss']}" if entry.get("state") else own
        given = f"--loss {args.loss}" if args.uses_ext_loss else own
        if trained != given:
            raise InputError(
                f"{path!r} was trained with {trained}, not with {given}; give --pretrained PATH to start from its "
                "weights",
                "--resume",
            )
        if entry.get("position") is not None or entry.get("rows") is not None:
            where = "within an epoch" if entry.get("position") is not None else "with its rows in files of their own"
            raise InputError(f"{path!r} was saved {where}, which a run with --bare cannot resume", "--resume")
        check_components(path, entry, self.components)
        return entry or None

    def _fit(self, loaded: dict[str, Any]) -> None:
        """Let the weights' names fit the model, and --tau-init hold for weights alone."""
        args = self.args
        weights = loaded.get("state_dict", {} if "epoch" in loaded else loaded)
        # OpenCLIP 3 removes the prefix of DistributedDataParallel for one process, but does not add it for several.
        prefix = "module." if args.distributed and not self.has_tasks else ""
        renamed = {prefix + name.removeprefix("module."): value for name, value in weights.items()}
        weights.clear()
        weights.update(renamed)
        if weights is loaded and args.uses_ext_loss and args.tau_init is not None:
            scale = f"{prefix}logit_scale"
            weights[scale] = torch.full_like(weights[scale], -math.log(args.tau_init))

    def load_into(self, loss: Loss | None, num_rows: int) -> None:
        """Load the state of loss and components, if the run resumes.

        Raises:
            InputError: the train data have another number of rows, or the state is of other settings.
        """
        entry, self.resumed = self.resumed, None
        if entry is None:
            return
        path = self.args.resume
        if loss is not None:
            if entry["num_rows"] != num_rows:
                raise InputError(f"{path!r} was trained on {entry['num_rows']} rows, not on {num_rows}", "--resume")
            with _in_one_line(path):
                loss.load_full_state(entry["state"])
        load_components(entry, self.components)

    # Saving

    def gather(self, loss: Loss | None, num_rows: int, epochs: int) -> None:
        """Collect the state, of which every process has a part, if OpenCLIP saves after `epochs` epochs."""
        args = self.args
        of_components = gather_components(self.components)
        if (loss is None and not of_components) or not is_saved(args, epochs):
            self._next = None
            return
        self._next = {"format": FORMAT, "loss": args.loss, "num_rows": num_rows, **of_components}
        self._next["state"] = {} if loss is None else loss.full_state()

    def save(self, original: Callable, content: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        """Replaces main's `torch.save`: adds our entry; the file is complete or absent."""
        if not isinstance(content, dict) or "optimizer" not in content:
            return original(content, path, *args, **kwargs)
        _write(original, content if self._next is None else {**content, KEY: self._next}, path)
        export(original, content, path, self.components)


def check_components(path: str, entry: dict[str, Any], components: Components) -> None:
    """Raise InputError if a checkpoint with this entry was trained with other components that it needs."""
    had = entry.get("components", {})
    have = [component.name for component in components if is_resumed(component)]
    for name in [*had, *have]:
        if (name in had) != (name in have):
            was = "with" if name in had else "without"
            raise InputError(f"{path!r} was trained {was} the component {name}; train {was} it", "--resume")
    given = settings_of(components)
    for flag, value in entry.get("settings", {}).items():
        if given.get(flag, value) != value:
            raise InputError(f"{path!r} was trained with {value}, which --resume keeps", flag)


def settings_of(components: Components) -> dict[str, Any]:
    """What a resumed run needs alike, by flag: the components' options that their weights or state depend on."""
    return {o.flag: getattr(component, o.name) for component in components for o in component.options if o.in_state}


def gather_components(components: Components) -> dict[str, dict[str, Any]]:
    """What a checkpoint has of components that it needs; empty without any. Every process calls this."""
    states = {component.name: component.state_dict() for component in components if is_resumed(component)}
    return {"components": states, "settings": settings_of(components)} if states else {}


def load_components(entry: dict[str, Any], components: Components) -> None:
    states = entry.get("components", {})
    for component in components:
        if component.name in states:
            component.load_state_dict(states[component.name])


def export(save: Callable, content: dict[str, Any], path: str, components: Components) -> None:
    """Write weights that plain OpenCLIP loads, in the folder `weights` beside the checkpoint's, if a component changes
    the model."""
    exporting = [component for component in components if overrides(component, Component.export)]
    if exporting:
        weights = {name.removeprefix("module."): value for name, value in content["state_dict"].items()}
        for component in exporting:
            weights = component.export(weights)
        folder, name = os.path.split(path)
        folder = os.path.join(os.path.dirname(folder), WEIGHTS)
        os.makedirs(folder, exist_ok=True)
        # OpenCLIP renames its tmp.pt when it is written.
        _write(save, weights, os.path.join(folder, "epoch_latest.pt" if name == "tmp.pt" else name))


def check_optimizer(path: str, loaded: dict[str, Any], has_tasks: bool, by_name: bool) -> None:
    """Raise InputError unless the optimizer of a checkpoint has this loop's order of parameters.

    Args:
        has_tasks: whether the loop is that of tasks.
        by_name: whether FSDP gives the parameters by their names.
    """
    from_tasks = "global_step" in loaded
    if from_tasks != has_tasks:
        raise InputError(
            f"{path!r} was written with open_clip_torch {4 if from_tasks else 3}, whose optimizer has another order; "
            "resume it with that, or give it as --pretrained for its weights only",
            "--resume",
        )
    groups = loaded.get("optimizer", {}).get("param_groups", [])
    sharded = any(isinstance(name, str) for group in groups for name in group["params"])
    if sharded != by_name:
        right = "train with it on several processes" if sharded else "leave it out"
        raise InputError(
            f"{path!r} was written {'with' if sharded else 'without'} --fsdp; {right}, or give the file as "
            "--pretrained for its weights only",
            "--resume",
        )


def is_saved(args: Namespace, epochs: int) -> bool:
    """Whether OpenCLIP writes a checkpoint after `epochs` epochs."""
    every = args.save_frequency
    numbered = epochs == args.epochs or (every > 0 and epochs % every == 0)
    return bool(args.logs) and args.logs.lower() != "none" and (numbered or args.save_most_recent)


def _write(save: Callable, content: Any, path: str) -> None:
    with whole_file(path) as file:
        save(content, file)


@contextmanager
def _in_one_line(path: str) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines() or [repr(error)]
        raise InputError(f"{path!r} cannot be resumed: {reason[0][:200]}", "--resume") from None
