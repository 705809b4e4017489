"""Base class of the replaceable parts: a name, and options declared once as typed class attributes."""

import inspect
from collections.abc import Collection
from dataclasses import replace
from types import NoneType
from typing import Any, ClassVar, get_args

import torch

from open_clip_ext.errors import did_you_mean
from open_clip_ext.options import Option, default_value


class WithOptions:
    """Base of what declares options as class attributes, `lr: float = option(0.1, "learning rate")`, and takes them as
    keyword arguments.

    Class attributes:
        options: all options of the class and its bases, collected from their bodies.

    Raises:
        InputError: an option has the wrong type or is out of range; the message names it.
        TypeError: there is no such option.
    """

    options: ClassVar[tuple[Option, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        bases = [base.__dict__.get("options", ()) for base in reversed(cls.__mro__[1:])]
        options = {option.name: option for inherited in bases for option in inherited}
        own = {name: value for name, value in vars(cls).items() if isinstance(value, Option) or name in options}
        types = inspect.get_annotations(cls, eval_str=True) if own else {}
        for name, value in own.items():
            if isinstance(value, Option):
                kind = types[name]
                kind = next((type for type in get_args(kind) if type is not NoneType), kind)
                options[name] = replace(value, name=name, type=kind)
            else:
                options[name] = replace(options[name], default=value)
        cls.options = tuple(options.values())

    def __init__(self, **given: Any) -> None:
        super().__init__()
        known = [option.name for option in self.options]
        for name in given:
            if name not in known:
                raise TypeError(f"{type(self).__name__} has no option {name!r}{did_you_mean(name, known)}")
        for option in self.options:
            value = given.get(option.name)
            value = default_value(option.default) if value is None else option.check(value)
            setattr(self, option.name, value)

class Part(WithOptions):
    """Base of losses, normalizers, temperatures and surrogates.

        class Shifted(Normalizer):
            name = "shifted"
            shift: float = option(0.5, "what is added to every log-normalizer")

    takes `Shifted(shift=0.3)`, or the flag `--shift 0.3`, and stores the value as `self.shift`. A subclass changes the
    default with `shift = 0.1`.

    Class attributes:
        name: value of the flag that chooses the part.
        optimizer_options: settings of `logit_scale`'s optimizer group; the training command uses them, not the part.
        needs_index: whether the part keeps state per sample; its constructor then takes `num_samples` and `device`.
        follows_epochs: whether training depends on the epoch and needs `set_epoch`; an instance may change it.
    """

    name: ClassVar[str]
    optimizer_options: ClassVar[tuple[Option, ...]] = ()
    needs_index = False
    follows_epochs = False
    num_samples: int  # where `needs_index`
    epoch: int = 0

    @classmethod
    def complete(cls, settings: dict, epochs: int | None, given: Collection[str]) -> None:
        """Fill in settings that are None and follow from others; refuse given settings that have no effect.

        Args:
            settings: settings of the whole loss, by option name; changed in place.
            epochs: length of the training, if known.
            given: names of the settings that the user gave.

        Raises:
            InputError: see `options.refuse_unused`.
        """

    def set_epoch(self, epoch: int) -> None:
        """Called before each epoch, 0-based."""
        self.epoch = epoch

    def set_steps_per_pass(self, steps: int, passes: float | None = None) -> None:
        """Set defaults that depend on the length of the training; called before the first step.

        Args:
            steps: optimizer steps in one pass over the data.
            passes: in the training, if known; an epoch may be less or more than one.
        """

    def memory(self, dimension: int, processes: int) -> dict[str, int]:
        """Bytes of state on each of `processes` for embeddings of `dimension`, by purpose; without rows per sample and
        the temporary memory of a step."""
        return {}

    def limit_to(self, num_samples: int) -> None:
        """Limit every part to n = `num_samples` stored samples, so that none is stored twice; called before the first
        step if n is known."""

    def materialize(self, dimension: int, device: torch.device, dtype: torch.dtype) -> None:
        """Allocate the state that depends on the embeddings' dimension, dtype or device.

        Called once, at the first batch or when a state is loaded. Afterwards `Module.to` moves the state; a batch on
        another device or of another dtype moves it, too.
        """

    def full_state(self) -> dict[str, Any]:
        """The state as CPU tensors, all of it on process 0 under any world size. Every process must call it."""
        return {}

    def check_state(self, state: dict[str, Any], dimension: int) -> None:
        """Raise ValueError if `load_full_state` cannot load the state of embeddings of `dimension`; change nothing."""

    def load_full_state(self, state: dict[str, Any]) -> None:
        """Load the result of `full_state` under any world size; after `materialize`, if the state has a dimension."""
