"""The recipe of a run, which repeats it: `recipe.yaml` in its folder."""

from argparse import Namespace
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import yaml

import open_clip_ext
from open_clip_ext import factory
from open_clip_ext.errors import InputError
from open_clip_ext.files import whole_file
from training_ext.core.plan import global_batch

RECIPE = "recipe.yaml"  # in the run's folder
# Entries of the namespace that are not flags.
NOT_FLAGS = frozenset(
    {"given_flags", "recipe_flags", "given_settings", "uses_ext_loss", "epochs_before", "loss_epochs", "absent_flags"}
)
# These belong to one run or machine.
OF_ONE_RUN = frozenset(
    {"recipe", "dry_run", "seams", "traceback", "name", "logs", "resume", "osr_save", "dist_url", "dist_backend",
     "batch_size"}
)  # fmt: skip


def resolved_flags(args: Namespace) -> dict[str, Any]:
    """The flags that repeat this run, by name with underscores, without those of one run or machine.

    The batch size is left out, see `Recipe.global_batch_size`.

    Args:
        args: as `params.parse_args` gives them.
    """
    left_out = NOT_FLAGS | OF_ONE_RUN | args.absent_flags
    flags = {name: value for name, value in vars(args).items() if name not in left_out}
    values = {name: value for name, value in flags.items() if value not in (None, "", {})}
    given = {*args.given_settings, *args.given_flags}
    values = {name: value for name, value in values.items() if value is not False or name in given}
    if not args.epochs_before:
        values.pop("osr_transfer", None)
    settings = set(factory.setting_names())
    effective_settings = dict(args.given_settings) if args.loss is not None else {}
    for name in sorted(settings & values.keys() - effective_settings.keys()):
        try:
            factory.resolve_options(args.loss, {**effective_settings, name: values[name]}, args.loss_epochs)
        except InputError:
            continue  # has no effect beside the others, so the command would refuse it
        effective_settings[name] = values[name]
    return {name: value for name, value in values.items() if name not in settings or name in effective_settings}


def of_run(args: Namespace, flags: dict[str, Any], samples: int | None) -> dict[str, Any]:
    """The run's recipe, as in its file.

    Args:
        flags: result of `resolved_flags`, taken before OpenCLIP added to `args`.
        samples: number of rows of the train data, if known.
    """
    base = None
    if args.recipe is not None:
        from training_ext.flags.recipes import find

        base = find(args.recipe)
    if "device" not in args.given_flags:  # of a missing default a run only warns
        flags = {name: value for name, value in flags.items() if name != "device"}
    return {
        "source": f"the run {args.name} with open_clip_ext {open_clip_ext.__version__}"
        + (f", from the recipe {base.name}" if base else ""),
        "data": args.train_data or "",
        **({"notes": list(base.notes)} if base and base.notes else {}),
        **({"samples": samples} if samples else {}),
        "global_batch_size": global_batch(args),
        "flags": flags,
    }


def save(folder: str, recipe: Mapping[str, Any]) -> None:
    """Write a run's recipe as recipe.yaml; another one that is there becomes recipe_1.yaml, recipe_2.yaml, ..."""
    path = Path(folder, RECIPE)
    text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=100)
    if path.exists() and path.read_bytes() != text.encode():
        names = (Path(folder, f"recipe_{number}.yaml") for number in count(1))
        path.rename(next(name for name in names if not name.exists()))
    with whole_file(path, text=True) as file:
        file.write(text)
