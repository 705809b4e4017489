"""Recovery of the optimizer's statistics before fine-tuning: TuneCLIP, Section 4.1, Algorithm 1.

A pretrained model comes without its optimizer's state. If Adam's moments and the moving averages of the normalizers
start from zero, they are wrong at first, and the first epoch of fine-tuning makes the model worse. Therefore E epochs
over the data keep the weights frozen at omega_0 and update only

    u_i <- (1 - gamma) u_i + gamma Phi(omega_0, i, B)    (n, 2), one per image and per text; the loss keeps log u
    m <- beta_1 m + (1 - beta_1) g                       in the shape of each parameter
    v <- beta_2 v + (1 - beta_2) g^2                     in the shape of each parameter

Phi(omega, i, B) = (1 / |B|) sum over j != i in B of exp((s_ij - s_ii) / tau) (before Eq. 2) is the batch's estimate of
anchor i's normalizer, and g the gradient of the loss with u (Eq. 4). Algorithm 2, the training, has a hinge of the gap
instead. With `surrogate="hinge"` the recovery has it, too.

These are ordinary steps with every learning rate 0, where AdamW changes at most the sign of a zero. This is checked
after the first step and after each epoch; zeros and BatchNorm's buffers are then restored, so that the model stays the
same to the last bit. Whatever state the loss has is recovered (a table, a network, temperatures' momentum); with a loss
without state, only the moments.

Readings fixed here:

- Adam's step counter is kept with the moments. m and v are sums over t steps, which bias correction divides by
  1 - beta^t; a counter reset to 0 would multiply the recovered m by 1 / (1 - beta_1) = 10 in the first step.
- The loss's schedules (gamma) count epochs from the start of the recovery; a partial epoch counts as a whole one.
- Phi divides by B - 1, the number of negatives, as everywhere in this package. The paper divides by B. The factor
  (B - 1) / B is the same for all samples and cancels in the gradients except for eps.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice
from math import ceil, floor, isfinite
from typing import Any

import torch
from torch import Tensor

from open_clip_ext.distributed import plain_name
from open_clip_ext.errors import InputError
from open_clip_ext.losses import Loss, NonFiniteError
from open_clip_ext.surrogates import Identity, Surrogate


def recover_statistics(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss | None,
    batches: Iterable[Any],
    epochs: float = 5,
    step: Callable[[Any], Any] | None = None,
    surrogate: str = Identity.name,
) -> int:
    """Fill the optimizer's moments and the loss's state with frozen weights, before the first step of your loop.

    Every process calls it, in training mode, with model and optimizer as they are trained (DistributedDataParallel
    included). Learning rates are set to 0 and restored afterwards; their schedule does not advance.

    Args:
        model: contains every parameter of the optimizer; put several modules into an `nn.ModuleDict`.
        optimizer: keeps moments and does not change weights at learning rate 0, as AdamW.
        loss: from `create_loss`, with `epochs` those of recovery and training together; None for a loss without state,
            which only `step` uses.
        batches: the train data, iterated anew for each epoch, in a new order if possible. Needs a length if `epochs` is
            not a whole number.
        epochs: length of the recovery, > 0, may be fractional; 5 in the paper.
        step: your loop's step on one item of `batches`, from zero_grad to optimizer.step, without a schedule of
            learning rates. Without it an item is (images, texts, rows), and `model(images, texts)` returns image
            features, text features and 1 / tau as OpenCLIP's models do, as a tuple or a dict.
        surrogate: the loss's in the recovery: "identity", as in Algorithm 1, or the name of its own.

    Returns:
        The number of epochs that the loss has counted: in epoch e of the training call `loss.set_epoch(number + e)`.

    Raises:
        InputError: an argument does not fit, the optimizer changes the weights, or its moments stay 0.
        NonFiniteError: the data or the weights contain NaN or infinity.
    """
    if not (isfinite(epochs) and epochs > 0):
        raise InputError(f"epochs: {epochs} is out of range; it must be a number > 0")
    steps = None
    if epochs != int(epochs):
        try:
            steps = len(batches)  # type: ignore[arg-type]
        except TypeError:  # also of a DataLoader over an IterableDataset, which has a __len__
            raise InputError(f"epochs: {epochs:g} with batches that have no length; give a whole number") from None
    if step is None:
        if loss is None:
            raise InputError("step: needed without a loss, to compute one")
        if loss.accum_freq > 1:
            raise InputError(f"step: needed with accum_freq {loss.accum_freq}, to call the loss that often on a batch")
        step = partial(_step, model, optimizer, loss)
    if loss is not None and not loss.training:
        raise InputError("loss: its state is not updated in evaluation mode; call loss.train()")
    loss_surrogate = getattr(loss, "surrogate", Identity()).name
    if surrogate not in (Identity.name, loss_surrogate):
        raise InputError(f"surrogate: {surrogate!r} is neither 'identity' nor the loss's own, {loss_surrogate!r}")
    weights = FrozenWeights(model)
    parameters = {*weights.names, *(loss.parameters() if loss is not None else ())}
    if not all(parameter in parameters for group in optimizer.param_groups for parameter in group["params"]):
        raise InputError("model: the optimizer has parameters that are not in it; give a module that holds them all")
    name = f"optimizer: {type(optimizer).__name__}"
    lengths: list[int | None] = [None] * int(epochs) if steps is None else [*epoch_lengths(epochs, steps)]
    frozen = zero_learning_rates(optimizer, loss, None if surrogate == loss_surrogate else Identity())
    with weights.restored_on_error(), frozen:
        for epoch, length in enumerate(lengths):
            if loss is not None:
                loss.set_epoch(epoch)
            number = -1
            for number, batch in enumerate(islice(batches, length)):
                step(batch)
                if any(group["lr"] != 0 for group in optimizer.param_groups):
                    raise InputError("step: it sets a learning rate, which is 0 here; leave the schedule out of it")
                if epoch == number == 0:
                    check_frozen(weights, optimizer, loss, name)
            if number < 0:
                raise InputError(f"batches: none in epoch {epoch}; give what can be iterated again, as a DataLoader")
            check_frozen(weights, optimizer, loss, name)
    optimizer.zero_grad()
    return len(lengths)


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, batch: Any) -> None:
    device = next(model.parameters()).device
    images, texts, rows = (tensor.to(device) for tensor in batch)
    features = model(images, texts)
    value = loss(**features, index=rows) if isinstance(features, dict) else loss(*features[:4], index=rows)
    optimizer.zero_grad()
    value.backward()
    optimizer.step()


def epoch_lengths(epochs: float, steps: int) -> list[int]:
    """Steps of each epoch: `steps` in a whole one, a fraction of them, at least 1, in a partial last one."""
    lengths = [steps] * floor(epochs)
    if len(lengths) < ceil(epochs):
        lengths.append(max(1, round((epochs - floor(epochs)) * steps)))
    return lengths


class FrozenWeights:
    """A copy, in host memory, of the model's parameters and buffers, which the recovery must not change.

    Attributes:
        names: names of the model's parameters.
    """

    def __init__(self, model: torch.nn.Module):
        self.names: dict[Tensor, str] = {parameter: plain_name(name) for name, parameter in model.named_parameters()}
        state = model.state_dict(keep_vars=True).items()  # a module's extra state, the loss's for example, may change
        self._now = {plain_name(name): tensor.detach() for name, tensor in state if isinstance(tensor, Tensor)}
        self._then = {name: tensor.to("cpu", copy=True) for name, tensor in self._now.items()}

    @contextmanager
    def restored_on_error(self) -> Iterator[None]:
        """Restore all weights if the block raises; at learning rate 0 a NaN in a gradient still makes a weight NaN."""
        try:
            yield
        except BaseException:
            self.restore()
            raise

    @torch.no_grad()
    def restore(self) -> str | None:
        """Restore all weights to the last bit; return the name of the first parameter that had changed, or None."""
        parameters = set(self.names.values())
        first_moved = None
        for name, tensor in self._now.items():
            now, then = tensor.cpu(), self._then[name]
            if torch.equal(_bits(now), _bits(then)):
                continue
            # A change of bits alone is allowed: p - 0 * update turns -0.0 into 0.0.
            if name in parameters and not torch.equal(now, then):
                first_moved = first_moved or name
            tensor.copy_(then)
        return first_moved

    def digest(self) -> str:
        return digest_of(self._then)[:16]


def digest_of(weights: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of the names, types, shapes and values of the tensors in a model's state."""
    total = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        if isinstance(tensor, Tensor):
            total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            total.update(_bits(tensor).numpy().data)
    return total.hexdigest()


def _bits(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


@contextmanager
def zero_learning_rates(
    optimizer: torch.optim.Optimizer, loss: Loss | None, surrogate: Surrogate | None = None
) -> Iterator[None]:
    """Set every learning rate to 0; afterwards restore the groups' settings, except an optimizer's `step`.

    Args:
        surrogate: the surrogate that the loss uses within the block; None: its own.
    """
    groups = optimizer.param_groups
    settings = [{name: value for name, value in group.items() if name not in ("params", "step")} for group in groups]
    for group in groups:
        group["lr"] = 0.0
    try:
        with nullcontext() if loss is None else loss.in_recovery(surrogate):
            yield
    finally:
        for group, values in zip(groups, settings, strict=True):
            group.update(values)


def check_frozen(
    weights: FrozenWeights,
    optimizer: torch.optim.Optimizer,
    loss: Loss | None,
    name: str,
    remedy: str = "use AdamW",
) -> None:
    """Restore the weights; raise if the last steps changed one of them or left all moments 0.

    Args:
        name, remedy: the optimizer's name and what to use instead, for the message.

    Raises:
        InputError: a weight has changed, or the moments are 0 though there are gradients.
        NonFiniteError: a moment, or a value that the loss has seen, is not finite.
    """
    if loss is not None:
        loss.raise_if_not_finite()
    for parameter, state in optimizer.state.items():
        for moment_name, moment in state.items():
            if torch.is_tensor(moment) and not moment.isfinite().all():
                whose = weights.names.get(parameter, "a parameter of the loss")
                raise NonFiniteError(
                    f"recovery of statistics: {moment_name} of {whose} is not finite; the data or the pretrained "
                    "weights have a NaN or an infinity"
                )
    why = f"so its statistics cannot be recovered; {remedy}"
    if moved := weights.restore():
        raise InputError(f"{name} moves the weights ({moved}) at learning rate 0, {why}")
    first_moments = [state["exp_avg"] for state in optimizer.state.values() if "exp_avg" in state]
    # Without any gradient, for example where the hinge is inactive everywhere, moments of 0 are right.
    has_gradient = any(parameter.grad is not None and parameter.grad.any() for parameter in weights.names)
    if first_moments and has_gradient and not any(moment.any() for moment in first_moments):
        raise InputError(f"{name} leaves its moments 0 at learning rate 0, {why}")
