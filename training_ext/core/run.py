"""`Run`: one training, and the functions that replace OpenCLIP's (see `hosts`)."""

import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import open_clip
import torch
from torch import Tensor, nn

from open_clip_ext import MODEL_CONFIGS, factory
from open_clip_ext.errors import InputError
from open_clip_ext.losses import Loss
from training_ext.core import hosts
from training_ext.core.component import Components
from training_ext.core.flags import OPEN_CLIP_TAU_MIN, parse
from training_ext.core.loss import TrainingLoss, add_losses, build_loss
from training_ext.core.optimizer import GivenSettings, regroup
from training_ext.core.rows import TrainData
from training_ext.core.seam import RUN, Seam, in_place
from training_ext.core.state import State
from training_ext.core.temperature import TemperatureGroup, train_temperature, trains_logit_scale


class Run:
    """One training.

    Args:
        args: the command line, see `flags.parse`.
        components: what it can do besides training.
        host: the module of `hosts` with the seams of the installed OpenCLIP.

    Attributes:
        loss: of this package, from the first epoch on; None with OpenCLIP's own.
    """

    def __init__(self, args: Namespace, components: Components, host: ModuleType):
        self.args = args
        self.components = components
        self.host = host
        self.loss: Loss | None = None
        self.state = State(args, components, host.HAS_TASKS)
        needs_rows = args.uses_ext_loss and any(p.needs_index for p in factory.parts_of(args.loss, vars(args)))
        self.data = TrainData(needs_rows, partial(in_place, list(self.seams())), self.begin_epoch, self.end_epoch)
        self.model: nn.Module | None = None  # without wrappers
        self.temperature: TemperatureGroup | None = None
        self.adds_losses = self._has_begun = False
        self._settings: GivenSettings
        self._epoch = 0

    def seams(self) -> Iterator[tuple[Seam, Any]]:
        """Every seam of the run with its owner."""
        yield from ((seam, self) for seam in self.host.SEAMS)
        yield from ((seam, component) for component in self.components for seam in component.seams)

    # Model and optimizer

    def create_model(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        model, *transforms = original(*args, **kwargs)
        if self.model is None:  # a second one is frozen, to learn from
            self.model = model
            for component in self.components:
                component.wrap_model(model)
            self.adds_losses = add_losses(model, self.components)
            if self.args.uses_ext_loss:
                self._prepare_temperature(model)
        return model, *transforms

    def _prepare_temperature(self, model: Any) -> None:
        if self.args.tau_init is not None:
            with torch.no_grad():
                model.logit_scale.fill_(-math.log(self.args.tau_init))
        if self.args.precision in ("pure_bf16", "pure_fp16") and not getattr(self.args, "fsdp", False):
            # In 16 bits a step is less than the spacing of numbers, so tau and SigLIP's bias would not move.
            for parameter in (model.logit_scale, getattr(model, "logit_bias", None)):
                if parameter is not None:
                    parameter.data = parameter.data.float()
        train_temperature(model, self.args)

    def create_optimizer(self, original: Callable, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Replaces a constructor of optimizers whose parameters are those of `self.model`."""
        assert self.model is not None
        return self.prepare_optimizer(original(*args, **kwargs), self.model)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, model: Any) -> torch.optim.Optimizer:
        """Give components and the temperature their groups, and keep the settings that a checkpoint replaces.

        Args:
            model: without wrappers, with the parameters that are trained.
        """
        inner = getattr(optimizer, "_base_optimizer", optimizer)  # timm's Lookahead calls no hooks of its own
        regroup(inner, model, self.components)
        if trains_logit_scale(self.args):
            schedule = self.args.lr_tau, self.args.lr_tau_scheduler, self.args.lr
            self.temperature = TemperatureGroup(inner, model.logit_scale, *schedule)
        self._settings = GivenSettings(inner, self.args)
        return optimizer

    def assign_learning_rate(self, original: Callable, optimizer: torch.optim.Optimizer, new_lr: float) -> None:
        new_lr = float(new_lr)  # before OpenCLIP 2.30 a NumPy scalar, which checkpoints may not contain
        if self.temperature is None:
            self.host.assign_model_rate(original, optimizer, new_lr)
        else:
            self.temperature.assign(partial(self.host.assign_model_rate, original), optimizer, new_lr)

    def logged_learning_rate(self, original: Callable, optimizer: torch.optim.Optimizer) -> float:
        """Replaces OpenCLIP 4's function, which gives the largest rate of all groups: without the temperature's."""
        if self.temperature is None:
            return original(optimizer)
        groups = [group for group in optimizer.param_groups if group is not self.temperature.group]
        return original(SimpleNamespace(param_groups=groups))

    def highest_scale(self) -> float | None:
        """Where logit_scale is clamped after each step, log(1 / tau); None if the loss does not learn it."""
        if not self.args.uses_ext_loss:
            return -math.log(OPEN_CLIP_TAU_MIN)
        return -math.log(self.args.tau_min) if trains_logit_scale(self.args) else None

    # Loss

    def create_loss(self, original: Callable, args: Namespace) -> Any:
        if self.args.uses_ext_loss:
            return TrainingLoss(self.loss_of, self.adds_losses)
        return TrainingLoss(original(args), True) if self.adds_losses else original(args)

    def loss_of(self, output_dict: bool = True, **output: Any) -> dict[str, Tensor]:
        """This package's loss of a model's output for the batches since the last step."""
        assert self.loss is not None
        return self.loss(**output, index=self.data.loader.rows(), output_dict=True)

    def begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        args, rows = self.args, self.data.num_rows
        if self.loss is None and args.uses_ext_loss:
            batch = args.batch_size * args.accum_freq * args.world_size
            self.loss = build_loss(args, rows, args.device, self.data.samples_per_epoch, batch)
        if not self._has_begun:
            self._has_begun = True
            self.state.load_into(self.loss, rows)
            self._settings.put_back()
            if self.temperature is not None:
                self.temperature.begin(args.skip_scheduler)
        if self.loss is not None:
            self.loss.set_epoch(epoch)

    def end_epoch(self) -> None:
        """Every process: the last step of the epoch is done, and OpenCLIP is about to evaluate and to save.

        Raises:
            NonFiniteError: a value of an earlier step was not finite.
        """
        if self.loss is not None:
            self.loss.raise_if_not_finite()
        self.state.gather(self.loss, self.data.num_rows, self._epoch + 1)


def start(argv: list[str]) -> Run | None:
    """Train with the components that the command line names; None if it only asks for a listing.

    Raises:
        InputError: bad input, or OpenCLIP ended early; the message is one line.
        NonFiniteError: the training met a NaN or an infinity.
    """
    host = hosts.installed()
    open_clip.add_model_config(MODEL_CONFIGS)
    args, classes = parse(argv)
    components = Components(classes, args, named=True)
    run = Run(args, components, host)
    for seam, owner in run.seams():
        if owner is run and (broken := seam.broken()) is not None:
            version = hosts.open_clip_version()
            raise InputError(f"open_clip_torch {version} is installed, where {broken}; it runs with {host.RANGE}")
    if args.seams:
        print(listing(run))
        return None
    if args.uses_ext_loss:
        host.check_flags(args)
    run.state.check()
    completed = False
    try:
        with in_place(run.seams(), RUN):
            if run.host.main().main([]):
                raise InputError("OpenCLIP ended before it trained; the reason is in its own output above")
        completed = True
    finally:
        for component in components:
            component.end(completed)
    return run


def listing(run: Run) -> str:
    """The replaced names by owner, each with why."""
    lines = []
    for title, owner in (("core", run), *((component.name, component) for component in run.components)):
        seams = [seam for seam, of in run.seams() if of is owner]
        lines += [f"{title}: {len(seams)} names", *(f"  {seam.name}\n      {seam.why}" for seam in seams)]
    return "\n".join(lines)
