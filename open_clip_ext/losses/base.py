"""Base class of the losses: the call, the checks of its arguments, and the detection of NaN and infinity."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from open_clip_ext.distributed import world_size
from open_clip_ext.errors import InputError, lost_another_process
from open_clip_ext.kernels.autograd import attach_gradients, scale_gradient
from open_clip_ext.kernels.streaming import largest
from open_clip_ext.losses.accumulation import FirstCall, Inputs
from open_clip_ext.losses.checks import (
    NOT_UNIT_VECTORS,
    FirstSteps,
    are_not_unit_vectors,
    check_batches,
    check_features,
    check_int64,
    check_logit_scale,
    check_rows,
    checked_keys,
    checked_reference,
)
from open_clip_ext.losses.state import LossState
from open_clip_ext.surrogates import Surrogate

INPUTS = ("image_features", "text_features", "logit_scale")
GRADIENTS = "the float16 gradient of the features"


class NonFiniteError(ArithmeticError):
    """A tensor of the training step was NaN or infinite; the message names the step and the first such tensor."""


class Loss(LossState):
    """Base class of the losses; takes the arguments of open_clip's `ClipLoss` and the samples' rows.

    State is updated only in training mode with gradients enabled: a validation under `torch.no_grad()` leaves it as it
    is.

    A custom loss overrides `compute`, and other methods as needed.

    Args:
        accum_freq: calls per optimizer step. OpenCLIP calls its loss that often on the same concatenated features. The
            first call updates the state; the temperature's gradient adds up to that of one call, also in a loop that
            passes logit_scale detached in all but the last. The later calls compute nothing and take the first one's
            value and gradients. So `index`, or else `one_batch_per_step`, must tell that all have the same pairs.
        validate: on every call make also the checks that wait for the device: range of `index`, unit norms, batches of
            equal sizes with pairs of their own. Otherwise the first step makes them; the norms are measured at every
            call, and `raise_if_not_finite` names the first step whose features were not unit vectors.

    Class attributes, in addition to those of `Part`; an instance may change them:
        takes_keys, takes_positives: whether samples may have a `key`, a `positive_key`, see `forward`.
        takes_bias: whether `compute` takes the logit bias.
        takes_reference: whether `forward` takes a reference model's features.
        reads_logit_scale: whether 1 / `logit_scale` is the temperature.
        trains_logit_scale: whether OpenCLIP's parameter gets a gradient.
        one_batch_per_step: whether the caller's loop is known to make all `accum_freq` calls of a step on the same
            pairs, so that it need not pass `index`.
        least_pairs: smallest number of pairs per process.
        needs_negatives: whether it is defined only for a global batch of two pairs or more.
        CHECKED: names of the tensors that `note` checks.
    """

    one_batch_per_step = False
    least_pairs = 1
    needs_negatives = True
    reads_logit_scale = True
    trains_logit_scale = True
    takes_keys = False
    takes_positives = False
    takes_bias = False
    takes_reference = False
    CHECKED: ClassVar[tuple[str, ...]] = INPUTS

    def __init__(self, accum_freq: int = 1, validate: bool = False, **options: Any):
        super().__init__(**options)
        if type(accum_freq) is not int or accum_freq < 1:
            raise InputError(f"{accum_freq!r} must be an integer of at least 1", "accum_freq")
        self.accum_freq = accum_freq
        self.validate = validate
        self.epoch = -1  # until `set_epoch`
        self._calls = 0
        self._scale_calls = 0  # of this step, in which logit_scale or logit_bias waits for a gradient
        self._is_float16 = False
        self._non_finite, self._input_errors = FirstSteps(), FirstSteps()
        self._rows_of_step: Tensor | None = None  # `index` of the first of accum_freq calls
        self._local_pairs: int | None = None  # of the latest call
        self._first_call: FirstCall | None = None  # of accum_freq, until the last

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `forward`; a caller's torch.compile breaks its graph here once, instead of dozens of times inside."""
        # Not as a decorator, which would import the compiler, two seconds, with this package.
        call = super().__call__
        return (torch.compiler.disable(call) if torch.compiler.is_compiling() else call)(*args, **kwargs)

    def set_epoch(self, epoch: int) -> None:
        """Start epoch `epoch`, 0-based; epochs of a recovery of statistics count. Required where `follows_epochs`."""
        self.epoch = epoch
        self._calls = 0

    @property
    def value_name(self) -> str:
        """The value's name in logs; losses share a name only if their values are comparable."""
        return f"{self.name}_loss"

    def description(self) -> str:
        """The parts of the loss, for the log; empty if it has none."""
        return ""

    def in_recovery(self, surrogate: Surrogate | None) -> AbstractContextManager:
        """Within the block freeze the temperatures that the loss itself updates, while their momentum still updates, as
        an optimizer's does at learning rate 0; and apply `surrogate`, if given, in place of the loss's own."""
        return nullcontext()

    def compute(
        self, image: Tensor, text: Tensor, logit_scale: Tensor, index: Tensor | None, update_state: bool
    ) -> Tensor:
        """The loss, 0-d, with its gradient.

        Args:
            image, text: (b, d) unit vectors of this process, float32 or float64; autocast is disabled.
            logit_scale: 1 / tau, 0-d, of the same dtype.
            index: rows of the samples, (b,) int64, or None.
            update_state: whether to update the state: in training with gradients, on the first of `accum_freq` calls.

        With `accum_freq` above 1 only these arguments and the loss's own parameters get a gradient.
        """
        raise NotImplementedError

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | None = None,
        index: Tensor | None = None,
        output_dict: bool = False,
        dist_image_features: Tensor | None = None,
        dist_text_features: Tensor | None = None,
        dist_logit_scale: Tensor | None = None,
        dist_logit_bias: Tensor | None = None,
        key: Tensor | None = None,
        positive_key: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Estimate of the objective, 0-d, with its gradient; in float32 whatever autocast says, or in float64 if the
        image features are.

        The gradient is of first order: a second derivative raises RuntimeError.

        Args:
            image_features, text_features: (b, d) unit vectors of any float type, b equal on every process. On CUDA,
                matrix products follow `torch.backends.cuda.matmul.allow_tf32`, which OpenCLIP sets.
            logit_scale: 1 / tau, one number (OpenCLIP's `logit_scale.exp()`).
            logit_bias: one number, SigLIP's; has no effect in the other losses, since it cancels in a softmax.
            index: rows of the samples in the data set, (b,) int64 in [0, n); required if the loss has state per sample.
            dist_image_features, dist_text_features: a frozen reference model's features of the same pairs, (b, d')
                unit vectors; required if `takes_reference`, else refused. The names are OpenCLIP's.
            dist_logit_scale, dist_logit_bias: have no effect.
            key: (b,) int64; samples with the same key, on any process, are not one another's negatives. Refused unless
                `takes_keys`. Give keys on every process or on none.
            positive_key: likewise, but samples with the same key are one another's positives (`kernels.positives`), and
                still no negatives where the loss has no positive in its denominator. Refused unless `takes_positives`.

        Raises:
            ValueError: shapes, types or `index` do not fit, or `accum_freq` needs `index`; the message names the
                argument. Or a training step of a loss that `follows_epochs` comes before `set_epoch`.
        """
        dtype = torch.promote_types(image_features.dtype, torch.float32)
        image, text = image_features.to(dtype), text_features.to(dtype)
        if not isinstance(logit_scale, Tensor):
            logit_scale = image.new_full((), logit_scale)
        self._check(image_features, text_features, logit_scale, index)
        keys = checked_keys(self, len(image), key=key, positive_key=positive_key)
        reference = checked_reference(self.takes_reference, image, dist_image_features, dist_text_features)
        trains = self.training and torch.is_grad_enabled()
        if trains and self.epoch < 0 and self.follows_epochs:
            raise ValueError("this loss follows the epoch: call its set_epoch(epoch) before each epoch")
        update_state = trains and self._calls % self.accum_freq == 0
        not_unit = are_not_unit_vectors(image_features, text_features, *reference)
        self._input_errors.note(NOT_UNIT_VECTORS, self.steps + update_state, not_unit)
        if trains:
            self._check_group(index, update_state)
        if self.validate or self.steps == 0:
            self._raise_input_errors()
        if reference:  # the inner product is then s_ij minus the reference's similarity
            image = torch.cat([image, reference[0]], dim=1)
            text = torch.cat([text, -reference[1]], dim=1)
        self._adapt(image.shape[1], image.device, dtype)
        self._is_float16 = torch.float16 in (image_features.dtype, text_features.dtype)
        with torch.autocast(image.device.type, enabled=False):
            ratio = self._gradient_ratio(trains, update_state, logit_scale, logit_bias)
            scale = scale_gradient(logit_scale.reshape(()).to(image), ratio)
            inputs: Inputs = {"image": image, "text": text, "logit_scale": scale, "index": index, **keys}
            if self.takes_bias and logit_bias is not None:
                inputs["logit_bias"] = scale_gradient(logit_bias.reshape(()).to(image), ratio)
            value = self._counted(inputs, trains, update_state)
        return {"contrastive_loss": value} if output_dict else value

    def _gradient_ratio(self, trains: bool, is_first: bool, *scalars: Tensor | None) -> float:
        """The part of the temperature's gradient that this call of a step adds.

        Each of the accum_freq calls gets the whole batch and would add the whole gradient. Loops that take the scalars'
        gradient in the last call alone, as OpenCLIP's later ones do, pass them detached in the others.
        """
        if not trains:  # no call of a step
            return 1 / self.accum_freq
        before = 0 if is_first else self._scale_calls
        self._scale_calls = before + any(s is not None and s.requires_grad for s in scalars)
        is_last = (self._calls + 1) % self.accum_freq == 0
        return (self.accum_freq - before if is_last else 1) / self.accum_freq

    def _counted(self, inputs: Inputs, trains: bool, update_state: bool) -> Tensor:
        """The value of this call; if it fails, a caller who tries again begins the step again, with its checks."""
        self._calls += trains
        self.steps += update_state
        try:
            return self._value(inputs, update_state, trains and self.accum_freq > 1)
        except BaseException as error:
            if trains:  # a state may have moved
                self._calls, self.steps = 0, self.steps - 1
            if type(error).__module__ == "torch.utils.checkpoint":  # in the backward pass, whose recomputation it ends
                raise RuntimeError(
                    "torch.utils.checkpoint computes the loss, and updates its state, a second time; leave the loss "
                    "out of the checkpointed part"
                ) from None
            if isinstance(error, RuntimeError) and lost_another_process(error):
                raise RuntimeError(
                    f"{error}\nAnother process has ended; one without an error had fewer batches: give each as many"
                ) from None
            raise

    def _value(self, inputs: Inputs, update_state: bool, shares: bool) -> Tensor:
        """The result of `compute`, or that of the step's first call where its calls share it."""
        if torch.is_grad_enabled():  # autograd refuses tensors of inference mode, as cached embeddings may be
            inputs = {name: x.clone() if x is not None and x.is_inference() else x for name, x in inputs.items()}
        if not shares:
            return self.compute(**inputs, update_state=update_state)
        first_call = self._first_call
        if update_state or first_call is None:
            first_call = self._computed(inputs, update_state)
        else:
            image, text, scale, *_ = inputs.values()
            self._non_finite.note(INPUTS, self.steps, largest(image, text, scale))
        self._first_call = first_call if self._calls % self.accum_freq else None
        return first_call.attached(inputs, self.parameters())

    def _computed(self, inputs: Inputs, update_state: bool) -> FirstCall:
        return FirstCall.of(partial(self.compute, update_state=update_state), inputs, self.parameters())

    def diagnostics(self) -> dict[str, Tensor]:
        """Values of the last call for the log: 0-d tensors, some on the device. No communication."""
        return {}

    def diagnostics_state(self) -> dict[str, Tensor | int]:
        """State of `diagnostics` from earlier steps of this epoch, on the CPU, the same on every process. Training does
        not depend on it."""
        return {}

    def load_diagnostics_state(self, state: dict[str, Tensor | int]) -> None:
        """Load the result of `diagnostics_state`, after `set_epoch`, with tensors on the features' device."""

    def note(self, problems: Tensor, names: tuple[str, ...] | None = None) -> None:
        """Record which of `names` has a problem in this step.

        Args:
            problems: for each name, or the first few of them, a bool, or a number that is not finite where there is a
                problem. The tensor may not be overwritten later.
            names: `CHECKED` by default.
        """
        self._non_finite.note(self.CHECKED if names is None else names, self.steps, problems)

    def attached(self, value: Tensor, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
        """`value` with a backward pass that gives its inputs the sum of all processes' parts of their gradients.

        Args:
            parts: pairs (input, this process's part of the gradient, which is overwritten), the features first.
        """
        if world_size() > 1:  # DistributedDataParallel averages over them
            torch._foreach_mul_([gradient for _, gradient in parts], world_size())
        self.note_gradients(*(gradient for _, gradient in parts[:2]))
        return attach_gradients(value, parts)

    def note_gradients(self, *gradients: Tensor) -> None:
        """Record a float32 gradient that overflows the features' float16; nothing else would show it."""
        if self._is_float16:
            largest = torch.stack([gradient.abs().amax() for gradient in gradients]).amax()
            self.note((largest > torch.finfo(torch.float16).max)[None], (GRADIENTS,))

    def raise_if_not_finite(self) -> None:
        """Raise if a call since the last time had bad values, and forget them. Waits for the device.

        Raises:
            NonFiniteError: a call met NaN or infinity.
            ValueError: a call had a row out of range, features that are not unit vectors, or other rows than the first
                of its `accum_freq` calls.
        """
        if (problem := self._non_finite.problem()) is None:
            self._raise_input_errors()
            return
        self._non_finite, self._input_errors = FirstSteps(), FirstSteps()  # an infinite vector is no unit vector, too
        step, tensor_name = problem
        if tensor_name == "index":
            raise ValueError(f"index: step {step} has a row outside [0, {self.num_samples})")
        raise NonFiniteError(f"step {step}: {tensor_name} is not finite")

    def _check(self, image_features: Tensor, text_features: Tensor, logit_scale: Tensor, index: Tensor | None) -> None:
        check_features(image_features=image_features, text_features=text_features)
        may_wait, pairs = self.validate or self.steps == 0, len(image_features)
        if self.needs_negatives and pairs * world_size() < 2:
            raise ValueError(f"image_features: a global batch of {pairs} pair(s) has no negatives; 2 are needed")
        if pairs < self.least_pairs:
            raise ValueError(f"image_features: {pairs} pair(s) in this process; {self.name} needs {self.least_pairs}")
        if index is not None:
            check_int64("index", index, pairs)
        check_batches(image_features, None if may_wait else self._local_pairs, index if self.training else None)
        self._local_pairs = pairs
        check_logit_scale(logit_scale, self.steps == 0 and self.reads_logit_scale, may_wait)
        if self.needs_index and index is not None and (may_wait or index.device.type == "cpu"):
            check_rows(index, self.num_samples)
        if self.needs_index and index is None:
            raise ValueError("index: this loss has state per sample and needs the samples' rows, (b,) int64")

    def _check_group(self, index: Tensor | None, is_first: bool) -> None:
        """Check that the `accum_freq` calls of a step have the same rows; on a GPU only note it, so as not to wait.

        Without the check other pairs, as of a short last group of calls, would get the gradient of an earlier batch.
        """
        if index is None:
            if self.accum_freq > 1 and not self.one_batch_per_step:
                raise ValueError(
                    f"index: accum_freq {self.accum_freq} needs each call's rows, or loss.one_batch_per_step = True, "
                    "as all calls of a step must have the same pairs; for other pairs in each call use accum_freq 1"
                )
            return
        if is_first:
            self._rows_of_step = index
            return
        expected_rows = self._rows_of_step
        message = f"index: the {self.accum_freq} calls of a step (accum_freq) must have the same rows"
        if expected_rows is not None and expected_rows.shape == index.shape and index.device.type != "cpu":
            self._input_errors.note((message,), self.steps, (expected_rows != index).any()[None])
        elif expected_rows is None or not torch.equal(expected_rows, index):
            self._calls = 0  # a caller who catches this may continue with other batches
            raise ValueError(f"step {self.steps}: {message}")

    def _raise_input_errors(self) -> None:
        if (problem := self._input_errors.problem()) is not None:
            step, message = problem
            self._input_errors = FirstSteps()
            self._calls = 0  # a caller who catches this may continue with other batches
            raise ValueError(f"step {step}: {message}" if step else message)

    def load_full_state(self, state: dict[str, Any]) -> None:
        super().load_full_state(state)
        self._calls, self._non_finite, self._input_errors = 0, FirstSteps(), FirstSteps()
