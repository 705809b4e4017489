"""This package's state in OpenCLIP's checkpoints: one key beside OpenCLIP's own, of tensors, numbers and strings."""

import logging
import math
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from open_clip_ext import factory
from open_clip_ext.distributed import plain_name
from open_clip_ext.errors import InputError
from open_clip_ext.losses import Loss, NonFiniteError
from open_clip_ext.options import Option, default_value
from training_ext.core.component import Component, Components, is_resumed, overrides
from training_ext.core.files import atomic_save
from training_ext.core.plan import Plan, trains
from training_ext.core.temperature import whole
from training_ext.core.training import Training

KEY = "open_clip_ext"
FORMAT = 5  # before it the entry was in the optimizer's state
READABLE = (2, 3, 4, FORMAT)
CHECKPOINTS, WEIGHTS = "checkpoints", "weights"  # folders of a run
PARTS = ("normalizer", "temperature")  # of a loss, that have a state
INSTEAD = "give --pretrained PATH to start from its weights only"


class State:
    """Takes our entry out of the checkpoint that is resumed, and adds it to those that OpenCLIP writes.

    Args:
        has_tasks: whether OpenCLIP's loop is that of tasks.

    Attributes:
        is_resumed: whether the run goes on from a checkpoint of a training.
        done: its completed epochs.
        entry: of the next checkpoint, on the processes that write it; None: it has none.
    """

    def __init__(self, args: Namespace, components: Components, has_tasks: bool):
        self.args = args
        self.has_tasks = has_tasks
        self.components = components
        self.is_resumed = False
        self.done = 0
        self.entry: dict[str, Any] | None = None
        self._resumed: dict[str, Any] | None = None
        self._path = ""  # of the checkpoint

    # Resuming

    def check(self) -> None:
        """Refuse a local checkpoint that does not fit, before anything is written; its tensors stay on disk.

        Raises:
            InputError: see `check_content`; or there is no such file; or this run's checkpoints would lack its state.
        """
        args, path = self.args, self.args.resume
        has_state = args.uses_ext_loss or any(is_resumed(one) and one.state_is_needed for one in self.components)
        if has_state and getattr(args, "fsdp", False) and args.fsdp_checkpoint == "sharded":
            raise InputError("'sharded' would leave out the state of the loss; give full", "--fsdp-checkpoint")
        if path in (None, "latest") or "://" in path:
            return
        if os.path.isdir(path):
            raise InputError(f"{path!r} is a folder, of FSDP's sharded state; give a file epoch_N.pt", "--resume")
        if not os.path.exists(path):
            raise InputError(f"there is no {path!r}", "--resume")
        with in_one_line(path):
            self.check_content(path, torch.load(path, map_location="cpu", mmap=True, weights_only=True))

    def load(self, original: Callable, path: str, **options: Any) -> Any:
        """Replaces OpenCLIP's `pt_load`, which reads --resume before it creates the data."""
        with in_one_line(path):
            loaded = original(path, **options)
        if trains(self.args):
            self.check_content(path, loaded)
        if isinstance(loaded, dict):
            self.restore(take_entry(loaded), path, loaded.get("epoch"))
            self._fit(loaded)
        return loaded

    def restore(self, entry: dict[str, Any] | None, path: str, epochs: int | None) -> None:
        """Keep the entry of the checkpoint `path` until it is loaded.

        Args:
            epochs: completed in it; None: it has weights alone.
        """
        self._resumed, self._path = entry, path
        self.is_resumed, self.done = epochs is not None, epochs or 0
        if trains(self.args) and epochs is not None and epochs >= self.args.epochs:
            logging.info(f"Nothing is left to train: {path!r} has completed {epochs} of {self.args.epochs} epochs")

    def check_content(self, path: str, loaded: Any) -> None:
        """Raise InputError unless the run can go on from the content of the checkpoint `path`.

        That is: it has weights alone; or is of the same loop, loss and components with their settings, and each
        component can go on from its state.
        """
        if not isinstance(loaded, dict) or "epoch" not in loaded:
            for one in self.components:
                if overrides(one, Component.wrap_model):
                    raise InputError(f"{path!r} has no weights of {one.name}; give it as --pretrained", "--resume")
            return
        check_optimizer(path, loaded, self.has_tasks, self.has_tasks and Plan(self.args).shards_model)
        self.check_entry(path, entry_of(loaded))

    def check_entry(self, path: str, entry: dict[str, Any] | None) -> None:
        """The same for our entry of it, if it has one."""
        check_loss(path, entry, self.args)
        check_older(path, entry or {}, self.components)
        check_components(path, entry or {}, self.components)
        for component in self.components:
            component.check_state(state_of(entry, component), path)

    def _fit(self, loaded: dict[str, Any]) -> None:
        """Let the weights' names fit the model, and --tau-init hold for weights alone."""
        args = self.args
        weights = loaded.get("state_dict", {} if "epoch" in loaded else loaded)
        if not isinstance(weights, dict):
            return
        # OpenCLIP 3 removes the prefix of DistributedDataParallel for one process, but does not add it for several.
        is_wrapped = args.distributed and not self.has_tasks and not getattr(args, "horovod", False)
        prefix = "module." if is_wrapped else ""
        renamed = {prefix + str(name).removeprefix("module."): value for name, value in weights.items()}
        weights.clear()
        weights.update(renamed)
        scale = f"{prefix}logit_scale"
        if weights is loaded and args.uses_ext_loss and args.tau_init is not None and scale in weights:
            weights[scale] = torch.full_like(weights[scale], -math.log(args.tau_init))

    def load_into(self, loss: Loss | None, num_rows: int) -> None:
        """Load the state of loss and components, if the run resumes.

        Raises:
            InputError: the train data have another number of rows, or the state is of other settings.
        """
        entry, self._resumed = self._resumed, None
        if entry is None:
            return
        path = self._path
        if loss is not None:
            if loss.needs_index and entry["num_rows"] != num_rows:
                raise InputError(f"{path!r} was trained on {entry['num_rows']} rows, not on {num_rows}", "--resume")
            with in_one_line(path):
                if not any(one.load_rows(loss, entry["state"], state_of(entry, one), path) for one in self.components):
                    loss.load_full_state(entry["state"])
        for component in self.components:
            if state := state_of(entry, component):
                component.load_state_dict(state)

    # Saving

    def gather(self, training: Training, epochs: int, name: str | None = None) -> None:
        """Collect the state, of which every process has a part, for a checkpoint after `epochs` epochs.

        Args:
            name: of its file; None: OpenCLIP's of the epoch, if it writes one.

        Raises:
            NonFiniteError: a value of an earlier step, or a parameter, is not finite.
        """
        args, loss = self.args, training.loss
        self.entry = None
        if loss is not None:
            loss.raise_if_not_finite()
        if args.loss is not None:
            check_finite(training.model, f"step {loss.steps}" if loss is not None else f"epoch {epochs - 1}")
        if name is None and not Plan(args).saves_after(epochs):
            return
        for component in self.components:
            component.saving()
        state: dict[str, Any] | None = {}
        if loss is not None:
            file = os.path.join(args.checkpoint_path, name or f"epoch_{epochs}")
            found = (component.save_rows(loss, file) for component in self.components)
            state = next((state for state in found if state is not None), None) or loss.full_state()
        of_components = gather_components(self.components)
        if loss is not None or of_components:
            self.entry = {
                "format": FORMAT, "loss": args.loss, "num_rows": training.data.num_rows, "parts": parts_of(args),
                **of_components, "state": state,
            }  # fmt: skip

    def save(self, original: Callable, content: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        """Replaces main's `torch.save`: adds our entry; the file is complete or absent."""
        if not isinstance(content, dict) or "optimizer" not in content:
            return original(content, path, *args, **kwargs)
        atomic_save(original, content if self.entry is None else {**content, KEY: self.entry}, path)
        export(original, content, path, self.components)
        for component in self.components:
            component.saved(path)


def take_entry(loaded: dict[str, Any]) -> dict[str, Any] | None:
    """Remove our entry from a loaded checkpoint and return it, as `entry_of`."""
    entry = entry_of(loaded)
    loaded.pop(KEY, None)
    if isinstance(loaded.get("optimizer"), dict):
        loaded["optimizer"].pop(KEY, None)
    return entry


def entry_of(loaded: Any) -> dict[str, Any] | None:
    """Our entry of a loaded checkpoint, in the form of today; None if it has none."""
    if not isinstance(loaded, dict):
        return None
    if KEY in loaded:
        return loaded[KEY]
    optimizer = loaded.get("optimizer")
    return of_today(optimizer[KEY]) if isinstance(optimizer, dict) and KEY in optimizer else None


def of_today(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry of version 0.1 in the form of today; components find their state in `older`."""
    if entry.get("format") == FORMAT:
        return entry
    known = {*PARTS, *(option.name for option in factory.all_options() if option.in_state)}
    parts = {name: entry[name] for name in entry if name in known}
    own = {name: entry.get(name) for name in ("format", "loss", "num_rows", "state")}
    return {**own, "parts": parts, "older": entry}


def state_of(entry: dict[str, Any] | None, component: Component) -> dict[str, Any]:
    """The component's state in our entry; {} if it has none."""
    if entry is None:
        return {}
    if "older" in entry:
        return component.older_state(entry["older"])
    return entry.get("components", {}).get(component.name, {})


def check_older(path: str, entry: dict[str, Any], components: Components) -> None:
    """Raise InputError if only a component that the run lacks can go on from an entry of version 0.1."""
    older = entry.get("older", {})
    known = [id(value) for component in components for value in component.older_state(older).values()] if older else []
    for name, where in (("position", "within an epoch"), ("rows", "with its rows in files of their own")):
        if older.get(name) is not None and id(older[name]) not in known:
            raise InputError(f"{path!r} was saved {where}, which the run's components cannot resume", "--resume")


def parts_of(args: Namespace) -> dict[str, Any]:
    """The parts of the run's loss that have a state, and the settings on which its form depends."""
    return {name: getattr(args, name) for name in (*PARTS, *(option.name for option in state_options(args)))}


def state_options(args: Namespace) -> list[Option]:
    """Options of the run's loss on which the form of its state depends."""
    return [option for option in factory.options_of(factory.parts_of(args.loss, vars(args))) if option.in_state]


def check_loss(path: str, entry: dict[str, Any] | None, args: Namespace) -> None:
    """Raise InputError unless our entry of a checkpoint is of this run's loss."""
    own = "OpenCLIP's own loss"
    given = f"--loss {args.loss}" if args.uses_ext_loss else own
    if entry is None or not entry.get("state"):
        if args.uses_ext_loss:
            raise InputError(f"{path!r} was trained with {own}, not with {given}; {INSTEAD}", "--resume")
        return
    if entry["format"] not in READABLE:
        age = "a newer" if entry["format"] > FORMAT else "an older"
        wrong = f"{path!r} was written by {age} open_clip_ext (format {entry['format']})"
        raise InputError(f"{wrong}; {INSTEAD}", "--resume")
    saved = entry.get("parts", {})
    if entry["loss"] != args.loss or any(saved.get(name) != getattr(args, name) for name in PARTS):
        given += words(vars(args)) if args.uses_ext_loss else ""
        text = f"{path!r} was trained with --loss {entry['loss']}{words(saved)}, not with {given}; {INSTEAD}"
        raise InputError(text, "--resume")
    for option in state_options(args):
        # A file from before an option existed was trained with its default.
        value, before = getattr(args, option.name), saved.get(option.name, default_value(option.default))
        if value != before:
            own = option.flag
            right = f"give {before}" if not isinstance(before, bool) else f"give {own}" if before else "leave it out"
            raise InputError(f"{value}, but {path!r} has {before}; {right}", own)
    if (surrogate := entry["state"].get("surrogate", args.surrogate)) != args.surrogate:
        raise InputError(f"{args.surrogate}, but the table of {path!r} is of {surrogate}; give it", "--surrogate")


def words(parts: Mapping[str, Any]) -> str:
    return "".join(f" --{name} {parts[name]}" for name in PARTS if parts.get(name) is not None)


def check_components(path: str, entry: dict[str, Any], components: Components) -> None:
    """Raise InputError if a checkpoint with this entry was trained with other components that it needs."""
    had, resumed = entry.get("components", {}), {one.name: one for one in components if is_resumed(one)}
    missing = [("with", name) for name in had if name not in resumed and name not in entry.get("optional", ())]
    new = [("without", name) for name, one in resumed.items() if name not in had and one.state_is_needed]
    for was, name in [*missing, *new]:
        raise InputError(f"{path!r} was trained {was} the component {name}; train {was} it", "--resume")
    given = settings_of(components)
    for flag, value in entry.get("settings", {}).items():
        if given.get(flag, value) != value:
            raise InputError(f"{path!r} was trained with {value}, which --resume keeps", flag)


def settings_of(components: Components) -> dict[str, Any]:
    """What a resumed run needs alike, by flag: the components' options that their weights or state depend on."""
    return {o.flag: getattr(component, o.name) for component in components for o in component.options if o.in_state}


def gather_components(components: Components) -> dict[str, Any]:
    """What a checkpoint has of components; empty without any. Every process calls this."""
    having = [component for component in components if is_resumed(component)]
    states = {component.name: component.state_dict() for component in having}
    states = {one.name: states[one.name] for one in having if states[one.name] or one.state_is_needed}
    optional = [one.name for one in having if one.name in states and not one.state_is_needed]
    return {"components": states, "optional": optional, "settings": settings_of(components)} if states else {}


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
        atomic_save(save, weights, os.path.join(folder, "epoch_latest.pt" if name == "tmp.pt" else name))


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


def check_finite(model: Any, when: str) -> None:
    """Raise NonFiniteError if a parameter is not finite; only they show whether the last step was."""
    named = dict(model.named_parameters())
    # One wait for the device, not one for each parameter.
    finite = torch.stack([whole(parameter.isfinite().all()) for parameter in named.values()]).tolist()
    for name, is_finite in zip(named, finite, strict=True):
        if not is_finite:
            raise NonFiniteError(f"{when}: {plain_name(name)} is not finite; training cannot continue")


@contextmanager
def in_one_line(path: str) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines() or [repr(error)]
        raise InputError(f"{path!r} cannot be resumed: {reason[0][:200]}", "--resume") from None
