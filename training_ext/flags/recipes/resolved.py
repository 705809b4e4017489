"""Write the flags of a run as a recipe: those given, those of its recipe, and the defaults of the loss."""

import os
from argparse import Namespace
from typing import Any

import yaml

import open_clip_ext
from open_clip_ext import factory
from open_clip_ext.errors import InputError
from open_clip_ext.files import whole_file
from training_ext.flags.recipes.recipe import find
from training_ext.openclip.launch import world_info

RECIPE = "recipe.yaml"  # in the run's folder
# Entries of the namespace that are not flags.
NOT_FLAGS = frozenset(
    {"given_flags", "recipe_flags", "given_settings", "uses_ext_loss", "epochs_before", "loss_epochs", "absent_flags"}
)
# Of this a run only warns if the default does not fit; as a given flag it would be refused.
NOT_PINNED = frozenset({"device"})
# These belong to one run or machine.
OF_ONE_RUN = frozenset(
    {"recipe", "dry_run", "seams", "traceback", "name", "logs", "resume", "osr_save", "dist_url", "dist_backend",
     "batch_size"}
)


def resolved_flags(args: Namespace) -> dict[str, Any]:
    """The flags that repeat this run, by name with underscores, without those of one run or machine.

    The batch size is left out, see `Recipe.global_batch_size`.

    Args:
        args: as `params.parse_args` gives them.
    """
    own = {name: value for name, value in vars(args).items() if name not in NOT_FLAGS | OF_ONE_RUN | args.absent_flags}
    values = {name: value for name, value in own.items() if value is not False and value not in (None, "", {})}
    if not args.epochs_before:
        values.pop("osr_transfer", None)
    settings = set(factory.setting_names())
    kept = dict(args.given_settings) if args.loss is not None else {}
    for name in sorted(settings & values.keys() - kept.keys()):
        try:
            factory.resolve_options(args.loss, {**kept, name: values[name]}, args.loss_epochs)
        except InputError:
            continue  # has no effect beside the others, so the command would refuse it
        kept[name] = values[name]
    return {name: value for name, value in values.items() if name not in settings or name in kept}


def save(folder: str, args: Namespace, flags: dict[str, Any], samples: int | None) -> None:
    """Write the run's recipe as recipe.yaml.

    Args:
        folder: the run's folder.
        flags: result of `resolved_flags`, taken before OpenCLIP added to `args`.
        samples: number of rows of the train data, if known.
    """
    processes = world_info()[2]
    base = None if args.recipe is None else find(args.recipe)
    recipe = {
        "source": f"the run {args.name} with open_clip_ext {open_clip_ext.__version__}"
        + (f", from the recipe {base.name}" if base else ""),
        "data": args.train_data or "",
        **({"notes": list(base.notes)} if base and base.notes else {}),
        **({"samples": samples} if samples else {}),
        "global_batch_size": args.batch_size * processes * args.accum_freq,
        "flags": {name: value for name, value in flags.items() if name not in NOT_PINNED - args.given_flags},
    }
    with whole_file(os.path.join(folder, RECIPE), text=True) as file:
        yaml.safe_dump(recipe, file, sort_keys=False, allow_unicode=True, width=100)
