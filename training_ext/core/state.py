"""This package's state in OpenCLIP's checkpoints: one key beside OpenCLIP's own, of tensors, numbers and strings."""

import logging
import math
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from open_clip_ext import factory
from open_clip_ext.distributed import plain_name
from open_clip_ext.errors import InputError
from open_clip_ext.losses import Loss, NonFiniteError
from open_clip_ext.options import Option
from training_ext.core.files import atomic_save
from training_ext.core.plan import Plan, trains
from training_ext.core.temperature import whole
from training_ext.core.training import Training

if TYPE_CHECKING:
    from training_ext.core.component import Component

KEY = "open_clip_ext"
FORMAT = 5  # before it the entry was in the optimizer's state
READABLE = (2, 3, 4, FORMAT)
CHECKPOINTS, WEIGHTS = "checkpoints", "weights"  # folders of a run
PARTS = ("normalizer", "temperature")  # of a loss, that have a state
INSTEAD = "give it, or its copy in weights/ if there is one, as --pretrained to start from its weights only"


class State:
    """Takes our entry out of the checkpoint that is resumed, and adds it to those that OpenCLIP writes.

    Args:
        has_tasks: whether OpenCLIP's loop is that of tasks.

    Attributes:
        is_resumed: whether the run goes on from a checkpoint of a training.
        done: its completed epochs.
        entry: of the next checkpoint, on the processes that write it; None: it has none.
    """

    def __init__(self, args: Namespace, components: "Sequence[Component]", has_tasks: bool):
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
        has_state = args.uses_ext_loss or any(one.is_resumed() and one.state_is_needed for one in self.components)
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

    def tell_if_done(self) -> None:
        """Log at the run's end that the checkpoint was the training's last."""
        if self.is_resumed and trains(self.args) and self.done >= self.args.epochs:
            whole = f"{self.done} of {self.args.epochs} epochs"
            logging.info(f"Nothing is left to train: {self._path!r} has completed {whole}")

    def check_content(self, path: str, loaded: Any) -> None:
        """Raise InputError unless the run can go on from the content of the checkpoint `path`.

        That is: it has weights alone; or is of the same loop, loss and components with their settings, and each
        component can go on from its state.
        """
        if not isinstance(loaded, dict) or "epoch" not in loaded:
            for one in self.components:
                if one.answers("wrap_model"):
                    raise InputError(f"{path!r} has no weights of {one.name}; give it as --pretrained", "--resume")
            return
        self.done = loaded["epoch"]
        from training_ext.core.checks import check_optimizer

        check_optimizer(path, loaded, self.has_tasks, self.has_tasks and Plan(self.args).shards_model)
        self.check_entry(path, entry_of(loaded))

    def check_entry(self, path: str, entry: dict[str, Any] | None) -> None:
        """The same for our entry of it, if it has one."""
        from training_ext.core.checks import check_loss

        check_loss(path, entry, self.args)
        if self.components or (entry or {}).keys() & {"components", "older"}:
            from training_ext.core.component_state import check_states

            check_states(path, entry or {}, self.components)

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
                if not any(one.load_rows(loss, entry["state"], one.state_in(entry), path) for one in self.components):
                    loss.load_full_state(entry["state"])
        for component in self.components:
            if state := component.state_in(entry):
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
        training.check_finite()
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
        of_components = {}
        if self.components:
            from training_ext.core.component_state import gather_states

            of_components = gather_states(self.components)
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
        if self.components:
            from training_ext.core.component_state import export

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
    if not isinstance(optimizer, dict) or KEY not in optimizer:
        return None
    from training_ext.core.older import of_today

    return of_today(optimizer[KEY])


def parts_of(args: Namespace) -> dict[str, Any]:
    """The parts of the run's loss that have a state, and the settings on which its form depends."""
    return {name: getattr(args, name) for name in (*PARTS, *(option.name for option in state_options(args)))}


def state_options(args: Namespace) -> list[Option]:
    """Options of the run's loss on which the form of its state depends."""
    return [option for option in factory.options_of(factory.parts_of(args.loss, vars(args))) if option.in_state]


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
