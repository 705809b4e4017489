"""Classify the user's own images zero-shot after each epoch (`--zeroshot-data`), as OpenCLIP does ImageNet's.

`scoring` is imported where it is used, since most runs have no own classes.
"""

import logging
from collections.abc import Sequence
from contextlib import suppress

import torch

from open_clip_ext.errors import InputError, last_line
from open_clip_ext.options import option
from training_ext.core.component import Component
from training_ext.core.epoch import Evaluation
from training_ext.data.metrics import OWN_CLASSES, OWN_IMAGES, is_due
from training_ext.openclip.loading import load_tokenizer

FLAG = "--zeroshot-data"


class OwnClasses(Component):
    """Accuracy and balanced accuracy in [0, 1] on the user's own images."""

    name = "own_classes"
    topic = "evaluation"
    switch = "zeroshot_data"
    zeroshot_data: str | None = option(
        None,
        "classify your own images zero-shot after each epoch, with any loss: class folders of images, or shards as for "
        "open_clip_ext.evaluate",
        metavar="DIR",
    )

    def metrics(self) -> Sequence[str]:
        return tuple(OWN_CLASSES)

    def check_plan(self, metrics: list[str]) -> None:
        from training_ext.scoring.class_folders import ClassFolders, open_own_classes, warn_of_equal_classes

        assert self.zeroshot_data is not None
        if not self.args.val_frequency:
            raise InputError("has no effect with --val-frequency 0; leave out one of the two", FLAG)
        source = open_own_classes(FLAG, self.zeroshot_data)
        source.warn()
        with suppress(Exception):  # what is wrong with the tokenizer others tell
            if tokenizer := load_tokenizer(self.args):
                warn_of_equal_classes(source, tokenizer)
        if isinstance(source, ClassFolders):
            source.check_headers()

    def scores(self, evaluation: Evaluation) -> dict[str, float]:
        from training_ext.scoring.inference import Encoder
        from training_ext.scoring.scores import open_task, score
        from training_ext.scoring.tasks import own_task

        args = self.args
        if self.plan.shards_model or not is_due(args, evaluation.epoch):
            return {}
        assert self.zeroshot_data is not None
        encoder = Encoder(
            evaluation.model, self.training.transform, evaluation.tokenizer, torch.device(args.device), args.precision,
            args.batch_size, args.workers, worker_init_fn=self.training.data.worker_init,
        )
        task = own_task(self.zeroshot_data)
        try:
            source = open_task(task, self.zeroshot_data)
            found = score(encoder, task, source)
        except InputError as error:  # do not lose the training now
            logging.error(f"{FLAG} was not evaluated after epoch {evaluation.epoch}: {last_line(error)}")
            return {}
        assert found is not None
        return {log_name: found.metrics[name] for log_name, name in OWN_CLASSES.items()} | {OWN_IMAGES: found.samples}
