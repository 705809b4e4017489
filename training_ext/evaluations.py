"""`Evaluations`: OpenCLIP's evaluations of a run, of the weights that it starts from, too, and what features add."""

import logging
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from open_clip_train.distributed import is_master

from open_clip_ext.files import is_full
from open_clip_ext.retrieval import validation_metrics
from training_ext.data.data_seams import DataSeams
from training_ext.data.metrics import is_due
from training_ext.data.seeding import kept_random_state
from training_ext.feature import Evaluation, Feature
from training_ext.openclip.hosts import host, starts_from_weights
from training_ext.run import Features


class Evaluations:
    """The functions that replace OpenCLIP's in an evaluation.

    Args:
        unwrapped: returns the model within what OpenCLIP evaluates.

    Attributes:
        tokenizer, transform: of the validation data, once they are built.
        by_epoch: the metrics of each evaluation, on process 0.
    """

    tokenizer: Any = None
    transform: Any = None

    def __init__(self, features: Features, data: DataSeams, unwrapped: Callable[[Any], torch.nn.Module]):
        self.features = features
        self.data = data
        self.unwrapped = unwrapped
        self.by_epoch: list[dict[str, float]] = []

    def evaluate(
        self, original: Callable, model: Any, data: dict[str, Any], epoch: int, args: Namespace, **kwargs: Any
    ) -> dict[str, Any]:
        try:
            metrics = original(model, data, epoch, args, **kwargs)
        except OSError as error:  # do not lose the training for a log
            if not is_full(error):
                raise
            logging.warning(f"The evaluation after epoch {epoch} is lost: {error.strerror}: {error.filename or ''}")
            return {}
        if metrics:
            self.by_epoch.append({name: float(value) for name, value in metrics.items()})
            if args.loss is not None:
                self.features.tell(Feature.evaluated, epoch, metrics, self.unwrapped(model), data)
        return metrics

    def of_start(self, model: Any, data: dict[str, Any], tb_writer: Any) -> None:
        """Evaluate the weights that the training starts from, if any; the random state stays as it is."""
        args = self.features.run.args
        if not starts_from_weights(args) and not args.resume:
            return
        if not self.features.metrics():
            if is_master(args):
                logging.warning(
                    "Nothing is evaluated, so you will not see whether the model gets worse; give --val-data"
                )
            return
        evaluate = host().main_module.evaluate
        with kept_random_state(args.device):
            evaluate(model, data, 0, args, tb_writer=tb_writer, tokenizer=self.tokenizer)
        if args.distributed and not args.horovod:
            dist.barrier()  # process 0 evaluates

    def zero_shot(
        self, original: Callable, model: Any, data: dict[str, Any], epoch: int, args: Namespace, tokenizer: Any = None
    ) -> dict[str, float]:
        data = {name: info for name, info in data.items() if info is not None}
        metrics = original(model, data, epoch, args, tokenizer=tokenizer)
        if not self.features.run.shards_model and is_due(args, epoch):
            found = Evaluation(epoch, self.unwrapped(model), data, self.transform, tokenizer, self.data.workers)
            for feature in self.features:
                metrics = metrics | feature.scores(found)
        return metrics

    def clip_metrics(self, image_features: Any, text_features: Any, **unused: Any) -> dict[str, Any]:
        given = image_features, text_features
        image, text = (torch.cat(features) if isinstance(features, list) else features for features in given)
        device = torch.device(self.features.run.args.device)
        on_gpu = device.type == "cuda"  # others may lack float64
        pictures = self.data.val_pictures()
        of = None if pictures is None else torch.from_numpy(pictures.of)
        return validation_metrics(image, text, of, device if on_gpu else image.device)
