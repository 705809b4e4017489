"""Write every flag of a run to recipe.yaml in its folder, and log which flags differ from the run that is resumed."""

import logging
import os
from argparse import Namespace
from contextlib import suppress
from typing import Any

from open_clip_ext.errors import InputError
from training_ext.core.component import Component
from training_ext.flags import run_recipe


class RecipeFile(Component):
    """Writes the recipe on process 0; one that is there stays until the first save, since every checkpoint is of it
    until then."""

    name = "recipe_file"

    def __init__(self, args: Namespace):
        super().__init__(args)
        self._flags = run_recipe.resolved_flags(args) if args.loss is not None else {}  # before OpenCLIP adds to them
        self._before: Any = None  # the recipe of the run that is resumed
        self._recipe: dict[str, Any] | None = None  # to be written

    def wanted(self) -> bool:
        return self.args.loss is not None

    def check_state(self, state: dict[str, Any], path: str) -> None:
        from training_ext.flags import recipes

        with suppress(InputError):
            experiment = os.path.dirname(os.path.dirname(os.path.abspath(path)))
            self._before = recipes.find(os.path.join(experiment, run_recipe.RECIPE))

    def begin(self, resumed: bool) -> None:
        if not self.plan.is_first:
            return
        rows = self.training.data.rows
        samples = self.args.train_num_samples if rows is None else rows.num_rows
        if self.training.loss is not None:
            self._flags |= self.training.loss.settings_of_length()
        self._recipe = run_recipe.of_run(self.args, self._flags, samples)
        if self._before is not None and (changed := self._before.changes(self._recipe, self.args)):
            logging.warning(f"Changed since the checkpoint: {changed}")
        if self._before is None or not os.path.exists(os.path.join(self.plan.folder or "", run_recipe.RECIPE)):
            self.saving()

    def saving(self) -> None:
        if self._recipe is not None and self.plan.folder is not None:
            run_recipe.save(self.plan.folder, self._recipe)
        self._recipe = None
