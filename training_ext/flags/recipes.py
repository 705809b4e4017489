"""Recipes: the flags of a training as defaults, which the command line overrides; published ones, and the user's.

A recipe is a YAML mapping, one of those in `published` or the user's own:

    source: NeuCLIP, Tables 1, 3 and 4          # where the values are from
    data: CC12M, 9,187,328 pairs                # the train data
    samples: 9187328                            # its number of pairs, for --dry-run
    score: DataComp average 31.89               # the published result
    notes: [what the sources leave open, and where they disagree]
    global_batch_size: 2048                     # is divided by processes and --accum-freq
    flags: {loss: neuclip, lr: 4e-4}            # the command's flags, with underscores

Only `flags` is required.
"""

import argparse
import json
import re
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from open_clip_ext.errors import InputError, did_you_mean, one_line
from open_clip_ext.options import flag_of

PUBLISHED = Path(__file__).parent / "published"
NOT_IN_A_RECIPE = ("help", "list_losses", "list_recipes", "recipe", "dry_run", "seams")
# Of a training's start; a checkpoint has what they lead to.
OF_A_START = ("tau_init", "tau_start", "pretrained")


@dataclass(frozen=True)
class Recipe:
    """A recipe.

    Args:
        name: as given to `--recipe`.
        flags: values by the flags' names with underscores; None stands for the flag's default.
        source, data, score, notes: text for the reader.
        samples: number of pairs in the train data.
        global_batch_size: pairs per optimizer step, over all processes and accumulated batches.
    """

    name: str
    flags: Mapping[str, Any]
    source: str = ""
    data: str = ""
    score: str = ""
    notes: tuple[str, ...] = ()
    samples: int | None = None
    global_batch_size: int | None = None

    def batch_size(self, processes: int, accum_freq: int) -> int | None:
        """Value for `--batch-size`: pairs per process and batch; None if the recipe has no global batch.

        Raises:
            InputError: the global batch cannot be divided evenly.
        """
        if self.global_batch_size is None:
            return None
        parts = processes * accum_freq
        if self.global_batch_size % parts:
            raise InputError(
                f"{self.name!r} has a global batch of {self.global_batch_size}, which is not divisible by "
                f"{processes} process(es) x --accum-freq {accum_freq}; change one of the two, or give --batch-size",
                "--recipe",
            )
        return self.global_batch_size // parts

    def changes(self, recipe: Mapping[str, Any], args: Namespace) -> str:
        """What `recipe`, of a run that resumes this one, changes: "--rho 3 -> 4, --wd 0.2 -> 0.5"; "" if nothing.

        A flag that this one does not name had no value, or a default of another version.
        """
        old = {"global_batch_size": self.global_batch_size, **self.flags}
        new = {"global_batch_size": recipe["global_batch_size"], **recipe["flags"]}
        flag_names = vars(args).keys() - args.absent_flags | {"global_batch_size"}
        changed = []
        for name in {**old, **new}:
            value, now = old.get(name), new.get(name)
            if name in flag_names and (name in old or name in args.given_flags) and _plain(value) != _plain(now):
                unused = " (of a start, not used)" if name.startswith(OF_A_START) else ""
                label = "global batch" if name == "global_batch_size" else flag_of(name)  # a recipe's key, no flag
                changed.append(f"{label} {_value_text(value)} -> {_value_text(now)}{unused}")
        return ", ".join(changed)


TYPES: dict[str, tuple[type, str]] = {
    "source": (str, "a text"), "data": (str, "a text"), "score": (str, "a text"), "notes": (list, "a list of texts"),
    "samples": (int, "a whole number >= 1"), "global_batch_size": (int, "a whole number >= 1"),
    "flags": (dict, "a mapping of flags"),
}  # fmt: skip


def names() -> list[str]:
    """Names of the published recipes."""
    return sorted(path.stem for path in PUBLISHED.glob("*.yaml"))


def find(name: str) -> Recipe:
    """The published recipe of this name, or the recipe in a file whose name ends in .yaml or .yml.

    Raises:
        InputError: there is no such recipe, or the file is not one.
    """
    is_file = name.endswith((".yaml", ".yml"))
    if not is_file and name not in names():
        near = did_you_mean(name, names(), "see --list-recipes, or give a file that ends in .yaml")
        raise InputError(f"{name!r} is unknown{near}", "--recipe")
    try:
        declared: Any = yaml.safe_load((Path(name) if is_file else PUBLISHED / f"{name}.yaml").read_text("utf-8"))
        if not isinstance(declared, dict) or "flags" not in declared:
            raise InputError("is not a mapping with the key 'flags'; see docs/recipes.md")
        for key, value in declared.items():
            if key not in TYPES:
                raise InputError(f"{key!r} is not one of {', '.join(TYPES)}; flags belong under 'flags'")
            kind, expected = TYPES[key]
            fits = type(value) is kind
            if kind is int:
                fits = fits and value >= 1
            elif key == "notes":
                fits = fits and all(isinstance(note, str) for note in value)
            if not fits:
                raise InputError(f"{key} is {value!r}; it must be {expected}"[:290])
        if "global_batch_size" in declared and declared["flags"].get("batch_size") is not None:
            raise InputError("has both global_batch_size and the flag batch_size; keep one of the two")
    except OSError as error:
        raise InputError(f"{name!r} cannot be read: {error.strerror}", "--recipe") from None
    except InputError as error:
        raise InputError(f"{name!r} {error}", "--recipe") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{name!r} is not YAML: {one_line(error)}", "--recipe") from None
    return Recipe(name, **{**declared, "notes": tuple(declared.get("notes", ()))})


def arguments(recipe: Recipe, actions: Iterable[argparse.Action]) -> list[str]:
    """The recipe's flags as command-line arguments.

    Args:
        actions: the command's flags, as argparse has them.

    Raises:
        InputError: a key is no flag, or its value has the wrong type.
    """
    flags = {action.dest: action for action in actions if action.dest not in NOT_IN_A_RECIPE}
    words: list[str] = []
    for key, value in recipe.flags.items():
        if key not in flags:
            near = did_you_mean(key, flags, "see --help")
            raise InputError(f"{recipe.name!r}: {key} is not a flag{near}", "--recipe")
        if value is None:
            continue
        action = flags[key]
        flag = flag_of(key) if flag_of(key) in action.option_strings else action.option_strings[0]
        if action.nargs == 0:
            fits, expected = isinstance(value, bool), "it must be true or false"
            can_be_off = isinstance(action, argparse.BooleanOptionalAction)
            is_on = value if can_be_off else value == action.const  # which is False for a flag that switches off
            more = [flag] if is_on else [flag_of(f"no_{key}")] if can_be_off else []
        elif action.nargs is not None:  # as --aug-cfg and --image-mean
            values = [f"{name}={item}" for name, item in value.items()] if isinstance(value, dict) else value
            fits = isinstance(values, list) and all(type(item) in (str, int, float) for item in values)
            expected = "it must be a list or a mapping of numbers and texts"
            more = [flag, *map(str, values)] if fits else []
        else:
            fits, expected = type(value) in (str, int, float), f"{flag} takes one number or text"
            more = [f"{flag}={value}"]  # one argument, so that a value such as -1 is not read as a flag
        if not fits:
            raise InputError(f"{recipe.name!r}: {key} is {value!r}; {expected}"[:300], "--recipe")
        words += more
    return words


def listing() -> str:
    """The text of `--list-recipes`: a table of names, data, models and the first number of each published score."""
    rows = [("recipe", "data", "pairs", "model", "published score")]
    for recipe in map(find, names()):
        data, score = (re.split("[,;]", text)[0] for text in (recipe.data, recipe.score))
        rows.append((recipe.name, data, f"{recipe.samples:,}", str(recipe.flags["model"]), score))
    table = [f"{name:23} {data:10} {pairs:>13}  {model:19} {score}" for name, data, pairs, model, score in rows]
    return "\n".join([*table, "", "Flags, source and notes of one: --recipe NAME --dry-run."])


def _plain(value: Any) -> str:
    """A value's text, equal before and after it was in a YAML file, which has no tuples."""
    return json.dumps(value, default=str)


def _value_text(value: Any) -> str:
    return "unset" if value is None else "set" if value is True else str(value)
