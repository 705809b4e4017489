"""`Events`: the functions that replace OpenCLIP's where hooks of components are called, see `hosts`."""

import importlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from training_ext.core import hosts
from training_ext.core.epoch import Epoch, Evaluation
from training_ext.core.seam import Seam

if TYPE_CHECKING:
    from training_ext.core.run import Run

IMAGENET_V2 = "imagenet-v2"  # OpenCLIP's name of the data


def of_host() -> ModuleType:
    """The module with the seams for hooks in the installed OpenCLIP."""
    return importlib.import_module(f"{hosts.__name__}.{hosts.supported()}_events")


class Events:
    """OpenCLIP's model, optimizer, data, epochs and evaluations, with the hooks of the run's components."""

    def __init__(self, run: "Run"):
        self.run = run

    def seams(self) -> Iterator[tuple[Seam, Any]]:
        """The seams for the components' hooks, and their own, each with its owner."""
        for hook, seam in of_host().EVENTS.items():
            if any(component.answers(hook) for component in self.run.components):
                yield seam, self.run
        yield from ((seam, component) for component in self.run.components for seam in component.seams)

    def wrap_model(self, model: nn.Module) -> bool:
        """Let components change the model that OpenCLIP has built; returns whether any adds a loss."""
        for component in self.run.components:
            component.wrap_model(model)
        adding = [component for component in self.run.components if component.answers("losses")]
        if adding:
            from training_ext.core.added_losses import add_losses

            add_losses(model, adding)
        return bool(adding)

    def with_added(self, losses: Callable[..., dict[str, Tensor]]) -> Callable[..., dict[str, Tensor]]:
        """The losses of a model's output together with those that components add."""
        from training_ext.core.added_losses import with_added

        return partial(with_added, losses)

    def regroup(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Let components change the optimizer's groups, before its first step."""
        names = {parameter: name for name, parameter in model.named_parameters()}
        for component in self.run.components:
            optimizer.param_groups[:] = component.param_groups(list(optimizer.param_groups), names)

    def get_data(self, original: Callable, args: Namespace, transforms: Any, *rest: Any, **kwargs: Any) -> Any:
        self.run.training.transform, self.run.training.tokenizer = transforms[1], kwargs.get("tokenizer")
        data = original(args, transforms, *rest, **kwargs)
        for component in self.run.components:
            component.data_built(data)
        evaluated = data.keys() & {"val", "imagenet-val", IMAGENET_V2}
        if any(component.metrics() for component in self.run.components) and not evaluated:
            data[IMAGENET_V2] = None  # lets OpenCLIP evaluate, which it does only with validation data or ImageNet
        return data

    def train_one_epoch(
        self, train: Callable[[Epoch], Any], number: int, data: dict[str, Any], args: Namespace, **trained: Any
    ) -> None:
        """Epoch `number` of OpenCLIP's, run by `train`, within the components' `epoch`; `trained` are fields of it."""

        def train_alone(epoch: Epoch) -> None:
            self.run.is_besides = not epoch.is_training
            train(epoch)

        run: Callable[[Epoch], Any] = train_alone
        for component in reversed(self.run.components):
            run = partial(component.epoch, train=run)
        self.run.begin()
        self.run.training.scaler = trained["scaler"]
        steps = data["train"].dataloader.num_batches // args.accum_freq
        run(Epoch(
            run, number, args.epochs, number, data, before=number * steps, ahead=(args.epochs - number - 1) * steps,
            args=args, **trained,
        ))

    def evaluate(
        self, original: Callable, model: Any, data: dict[str, Any], epoch: int, args: Namespace, **kwargs: Any
    ) -> dict[str, Any]:
        metrics = original(model, data, epoch, args, **kwargs)
        if metrics:
            self.run.by_epoch.append({name: float(value) for name, value in metrics.items()})
            evaluation = Evaluation(epoch, of_host().without_wrapper(model), data, kwargs.get("tokenizer"))
            for component in self.run.components:
                component.evaluated(evaluation, metrics)
        return metrics

    def zero_shot(
        self, original: Callable, model: Any, data: dict[str, Any], epoch: int, args: Namespace, tokenizer: Any = None
    ) -> dict[str, float]:
        data = {name: info for name, info in data.items() if info is not None}  # see `get_data`
        metrics = original(model, data, epoch, args, tokenizer=tokenizer)
        evaluation = Evaluation(epoch, of_host().without_wrapper(model), data, tokenizer)
        for component in self.run.components:
            metrics = metrics | component.scores(evaluation)
        return metrics
