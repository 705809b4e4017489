"""`Run`: one training, and the functions that replace OpenCLIP's (see `hosts`)."""

import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import open_clip
import torch

from open_clip_ext import MODEL_CONFIGS
from open_clip_ext.errors import InputError
from open_clip_ext.losses import Loss
from open_clip_ext.options import flag_of
from training_ext.core import hosts
from training_ext.core.flags import OPEN_CLIP_TAU_MIN, parse
from training_ext.core.loss import LossItems, build_loss
from training_ext.core.rows import TrainData
from training_ext.core.seam import RUN, Seam, in_place
from training_ext.core.state import State
from training_ext.core.temperature import TemperatureGroup, train_temperature, trains_logit_scale
from training_ext.core.training import Training

if TYPE_CHECKING:
    from training_ext.core.component import Component


class Run:
    """One training.

    Args:
        args: the command line, see `flags.parse`.
        components: what it can do besides training, a `component.Components`.
        host: the module of `hosts` with the seams of the installed OpenCLIP.

    Attributes:
        by_epoch: metrics of every evaluation on process 0, where a component takes part in evaluations.
        is_besides: whether the epoch is not of the training, but one of a component's.
    """

    def __init__(self, args: Namespace, components: "Sequence[Component]", host: ModuleType):
        self.args = args
        self.components = components
        self.host = host
        self.data = TrainData(self)
        self.state = State(args, components, host.HAS_TASKS)
        self.training = Training(components, self._build_loss, self.data, self.state)
        for component in components:
            component.training = self.training
        self.by_epoch: list[dict[str, float]] = []
        if components:
            from training_ext.core.events import Events

            self.events = Events(self)
        self.temperature: TemperatureGroup | None = None
        self.adds_losses = self._has_begun = self.is_besides = False
        self._settings: list[dict[str, Any]]  # of the optimizer's groups, from flags

    def seams(self) -> Iterator[tuple[Seam, Any]]:
        """Every seam of the run with its owner."""
        yield from ((seam, self) for seam in self.host.SEAMS)
        if self.components:
            yield from self.events.seams()

    def prepare(self, until: ExitStack) -> None:
        """Let components take what the run needs for itself until `until` ends, before anything is read or written."""
        for component in self.components:
            component.prepare(until)

    # Model and optimizer

    def create_model(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        model, *transforms = original(*args, **kwargs)
        if self.training.model is not None:  # this one is frozen, to learn from
            self.training.reference = model
            return model, *transforms
        self.training.model = model
        self.adds_losses = bool(self.components) and self.events.wrap_model(model)
        if self.args.uses_ext_loss:
            self._prepare_temperature(model)
        for component in self.components:
            component.model_built(model)
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
        """Replaces a constructor of optimizers whose parameters are those of `training.model`."""
        return self.prepare_optimizer(original(*args, **kwargs), self.training.model)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, model: Any) -> torch.optim.Optimizer:
        """Give components and the temperature their groups, and keep the settings that a checkpoint replaces.

        Args:
            model: without wrappers, with the parameters that are trained.
        """
        inner = getattr(optimizer, "_base_optimizer", optimizer)  # timm's Lookahead calls no hooks of its own
        self.training.optimizer = inner
        inner.register_step_post_hook(self._count_update)
        if self.components:
            self.events.regroup(inner, model)
        if trains_logit_scale(self.args):
            schedule = self.args.lr_tau, self.args.lr_tau_scheduler, self.args.lr
            self.temperature = TemperatureGroup(inner, model.logit_scale, *schedule)
        self._settings = self._given_settings(inner)
        return optimizer

    def _given_settings(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        """The settings that each group was built with, for after a checkpoint is loaded, which has its own.

        The rate is one of them with --skip-scheduler only; else it is the schedule's, and belongs to the last step.
        """
        more = getattr(self.args, "opt_kwargs", None) or ()
        names = ["weight_decay", "betas", "eps", "momentum", "lr_scale", *more]
        if self.args.skip_scheduler:
            names.append("lr")
        return [{name: group[name] for name in names if name in group} for group in optimizer.param_groups]

    def _count_update(self, *_: Any) -> None:
        self.training.updated = self.training.steps + 1

    def assign_learning_rate(self, original: Callable, optimizer: torch.optim.Optimizer, new_lr: float) -> None:
        new_lr = float(new_lr)  # before OpenCLIP 2.30 a NumPy scalar, which checkpoints may not contain
        if self.temperature is None:
            self.host.assign_model_rate(original, optimizer, new_lr)
        else:
            self.temperature.assign(partial(self.host.assign_model_rate, original), optimizer, new_lr)

    def highest_scale(self) -> float | None:
        """Where logit_scale is clamped after each step, log(1 / tau); None if the step does not change it."""
        if self.is_besides:
            return None
        if not self.args.uses_ext_loss:
            return -math.log(OPEN_CLIP_TAU_MIN)
        return -math.log(self.args.tau_min) if trains_logit_scale(self.args) else None

    # Loss

    def create_loss(self, original: Callable, args: Namespace) -> Any:
        losses = self.loss_of if self.args.uses_ext_loss else original(args)
        return self.events.with_added(losses) if self.adds_losses else losses

    def loss_of(self, output_dict: bool, **output: Any) -> LossItems:
        """This package's loss of a model's output for the batches since the last step."""
        loss = self.training.loss
        assert loss is not None
        value = loss(**output, **self.data.loader.latest(), output_dict=True)["contrastive_loss"]
        return LossItems(value, loss.value_name, loss.diagnostics)

    def _build_loss(self) -> Loss:
        return build_loss(self.args, self.data.num_rows, self.args.device, self.data.samples_per_epoch)

    # Epochs

    def begin(self) -> None:
        """The first epoch of the run is about to begin: load what it resumes from."""
        if self._has_begun:
            return
        self._has_begun = True
        if self.args.uses_ext_loss:
            self.training.loss = self._build_loss()
        self.state.load_into(self.training.loss, self.data.num_rows)
        for group, settings in zip(self.training.optimizer.param_groups, self._settings, strict=True):
            group.update(settings)
        if self.temperature is not None:
            self.temperature.begin(self.args.skip_scheduler)
        for component in self.components:
            component.begin(self.state.is_resumed)

    def begin_epoch(self, epoch: int) -> None:
        self.begin()
        self._epoch = epoch
        if self.training.loss is not None and not self.is_besides:
            self.training.loss.set_epoch(math.ceil(self.args.epochs_before) + epoch)

    def end_step(self, step: int) -> None:
        """`step` steps of the epoch are done.

        Raises:
            NonFiniteError: a value of an earlier step was not finite, and the step was not skipped, or all are.
        """
        self.training.steps += 1
        self.training.skipped += self.training.updated < self.training.steps
        # Every process: wrong norms, and in `amorlip` NaN, are seen only by the process with them
        is_due = (step - 1) % self.args.log_every_n_steps == 0
        if is_due:
            self.training.check_finite()
        for component in self.components:
            component.step_done(step)
        if is_due:
            self.training.check_scale()

    def end_epoch(self) -> None:
        """Every process: the last step of the epoch is done, and OpenCLIP is about to evaluate and to save.

        Raises:
            NonFiniteError: a value of an earlier step, or a parameter, is not finite.
        """
        self.training.check_scale()
        if not self.is_besides:
            self.state.gather(self.training, self._epoch + 1)

    def train(self, advice: Callable[[BaseException], str] = lambda error: "") -> None:
        """Run OpenCLIP's main; then the components end.

        Args:
            advice: gives the end of an error's line.

        Raises:
            InputError: OpenCLIP ended before it trained, bad input, or the machine failed before the first step.
            MachineError: it failed later: a full disk, a worker that was killed.
            NonFiniteError: the training met a NaN or an infinity.
            Stopped: a component ended it after a signal.
        """
        completed = False
        try:
            with in_place(self.seams(), RUN):
                if self.host.main().main([]):
                    flag = None if self.args.remote_sync is None else "--remote-sync"
                    raise InputError("OpenCLIP ended before it trained; the reason is in its own output above", flag)
            self.state.tell_if_done()
            completed = True
        except BaseException as error:
            from training_ext.core.reported import reported

            if (described := reported(error, self, advice)) is error:
                raise
            raise described from None
        finally:
            for component in self.components:
                component.end(completed)


def check_seams(host: ModuleType) -> None:
    """Raise InputError if the installed OpenCLIP does not keep the contract of a seam that every run needs."""
    for seam in host.SEAMS:
        if (broken := seam.broken()) is not None:
            version, known = hosts.open_clip_version(), hosts.range_of(hosts.supported())
            raise InputError(f"open_clip_torch {version} is installed, where {broken}; it runs with {known}")


def start(argv: list[str]) -> Run | None:
    """Train with the components that the command line names; None if it only asks for a listing.

    Raises:
        InputError: bad input, or OpenCLIP ended early; the message is one line.
        MachineError: after the first step a full disk, or a worker that was killed.
        NonFiniteError: the training met a NaN or an infinity.
    """
    host = hosts.installed()
    check_seams(host)
    open_clip.add_model_config(MODEL_CONFIGS)
    args, classes = parse(argv)
    components: Sequence[Component] = ()
    if classes:
        from training_ext.core.component import Components

        components = Components(classes, args, named=True)
    run = Run(args, components, host)
    if args.seams:
        print(listing(run))
        return None
    for name in host.REFUSED if args.uses_ext_loss else ():
        if getattr(args, name, None) not in (None, False, "txt"):  # the last is --text-key's default
            raise InputError(f"--loss {args.loss} does not follow it; leave it out", flag_of(name))
    with ExitStack() as until:
        run.prepare(until)
        run.state.check()
        run.train()
    return run


def listing(run: Run) -> str:
    """The replaced names by owner, each with why."""
    lines = []
    for title, owner in (("core", run), *((component.name, component) for component in run.components)):
        seams = [seam for seam, of in run.seams() if of is owner]
        lines += [f"{title}: {len(seams)} names", *(f"  {seam.name}\n      {seam.why}" for seam in seams)]
    return "\n".join(lines)
