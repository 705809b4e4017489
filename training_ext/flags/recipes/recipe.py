"""Read recipe files, and turn a recipe into command-line arguments.

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
import difflib
import shutil
import textwrap
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from open_clip_ext.errors import InputError
from open_clip_ext.options import flag_of

PUBLISHED = Path(__file__).parent / "published"
NOT_IN_A_RECIPE = ("help", "list_losses", "list_recipes", "recipe", "dry_run", "seams")


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
    notes: tuple[str, ...] = field(default_factory=tuple)
    samples: int | None = None
    global_batch_size: int | None = None

    def without(self, flags: Collection[str]) -> "Recipe":
        """This recipe without some of its flags."""
        return replace(self, flags={name: value for name, value in self.flags.items() if name not in flags})

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


def names() -> list[str]:
    """Names of the published recipes."""
    return sorted(path.stem for path in PUBLISHED.glob("*.yaml"))


def find(name: str) -> Recipe:
    """The published recipe of this name, or the recipe in a file whose name ends in .yaml or .yml.

    Raises:
        InputError: there is no such recipe, or the file is not one.
    """
    if name.endswith((".yaml", ".yml")):
        return read(Path(name), name)
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"did you mean {near[0]}?" if near else "see --list-recipes, or give a file that ends in .yaml"
        raise InputError(f"{name!r} is unknown; {hint}", "--recipe")
    return read(PUBLISHED / f"{name}.yaml", name)


TYPES: dict[str, tuple[type, str]] = {
    "source": (str, "a text"), "data": (str, "a text"), "score": (str, "a text"), "notes": (list, "a list of texts"),
    "samples": (int, "a whole number >= 1"), "global_batch_size": (int, "a whole number >= 1"),
    "flags": (dict, "a mapping of flags"),
}


def read(path: Path, name: str) -> Recipe:
    """Read the recipe in a file; `name` is what --recipe gave.

    Raises:
        InputError: the file cannot be read or is not a recipe.
    """
    try:
        declared: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{name!r} cannot be read: {error.strerror}", "--recipe") from None
    except (yaml.YAMLError, UnicodeError, ValueError, RecursionError) as error:
        raise InputError(f"{name!r} is not YAML: {' '.join(str(error).split())[:200]}", "--recipe") from None
    if not isinstance(declared, dict) or "flags" not in declared:
        raise InputError(f"{name!r} is not a mapping with the key 'flags'; see docs/recipes.md", "--recipe")
    for key, value in declared.items():
        if key not in TYPES:
            known = ", ".join(TYPES)
            raise InputError(f"{name!r}: {key!r} is not one of {known}; flags belong under 'flags'", "--recipe")
        kind, expected = TYPES[key]
        fits = type(value) is kind
        if key == "notes":
            fits = fits and all(isinstance(note, str) for note in value)
        elif kind is int:
            fits = fits and value >= 1
        if not fits:
            raise InputError(f"{name!r}: {key} is {value!r}; it must be {expected}"[:290], "--recipe")
    if "global_batch_size" in declared and declared["flags"].get("batch_size") is not None:
        text = f"{name!r} has both global_batch_size and the flag batch_size; keep one of the two"
        raise InputError(text, "--recipe")
    return Recipe(name, **{**declared, "notes": tuple(declared.get("notes", ()))})


def arguments(recipe: Recipe, actions: Iterable[argparse.Action]) -> list[str]:
    """The recipe's flags as command-line arguments.

    Args:
        actions: the command's flags, as argparse has them.

    Raises:
        InputError: a key is no flag, or its value has the wrong type.
    """
    flags = {action.dest: action for action in actions if action.dest not in NOT_IN_A_RECIPE}
    given: list[str] = []
    for key, value in recipe.flags.items():
        where = f"--recipe: {recipe.name!r}: {key}"
        if key not in flags:
            near = difflib.get_close_matches(str(key), flags, n=1)
            raise InputError(f"{where} is not a flag" + (f"; did you mean {near[0]}?" if near else "; see --help"))
        if value is None:
            continue
        action, flag = flags[key], flag_of(key)
        if action.nargs == 0:
            if not isinstance(value, bool):
                raise InputError(f"{where} is {value!r}; it must be true or false")
            given += [flag] if value else []
        elif action.nargs is not None:
            given += [flag, *_values(value, where)]
        elif isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise InputError(f"{where} is {value!r}; {flag} takes one number or text"[:300])
        else:
            given.append(f"{flag}={value}")  # one argument, so that a value such as -1 is not read as a flag
    return given


def _values(value: Any, where: str) -> list[str]:
    """Arguments of a flag that takes several values; a mapping, as for --aug-cfg, becomes key=value."""
    if isinstance(value, dict):
        value = [f"{key}={item}" for key, item in value.items()]
    if not isinstance(value, list) or any(type(item) not in (str, int, float) for item in value):
        raise InputError(f"{where} is {value!r}; it must be a list or a mapping of numbers and texts"[:300])
    return [str(item) for item in value]


def listing() -> str:
    """The text of `--list-recipes`: name, data, published score and source, wrapped to the terminal."""
    width = min(100, shutil.get_terminal_size().columns)
    lines = []
    for name in names():
        recipe = find(name)
        lines.append(name)
        for label, text in (("data", recipe.data), ("score", recipe.score), ("source", recipe.source)):
            lines.append(textwrap.fill(text, width, initial_indent=f"    {label:8}", subsequent_indent=" " * 12))
    return "\n".join(lines)
