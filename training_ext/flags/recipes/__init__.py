"""Recipes: the flags of a published training as defaults, which flags on the command line override."""

from training_ext.flags.recipes.recipe import Recipe, arguments, find, listing, names
from training_ext.flags.recipes.resolved import resolved_flags, save

__all__ = ["Recipe", "arguments", "find", "listing", "names", "resolved_flags", "save"]
