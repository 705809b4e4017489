"""Base of the small networks beside the encoders: their optimizer, device, broadcast and state."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from open_clip_ext.distributed import world_size

OPTIMIZERS = {
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}
MOMENTS = {"adagrad": 1, "adam": 2, "adamw": 2, "sgd": 0}  # state values per parameter


class SideModel(nn.Module):
    """Tensors that a part of a loss trains itself, with their optimizer. A submodule, so that `Module.to` moves them.

    They are not nn.Parameters: neither the loss's `parameters()` nor its `state_dict()` contains them.

    Args:
        named: the tensors by name, without graph.
        optimizer: a name in `OPTIMIZERS`; None if `step` is never called.
        pending: whether the gradients belong to the state, since a later training step applies them.
        settings: arguments of the optimizer.

    Attributes:
        gradients: by name; what `step` applies.
    """

    optimizer: torch.optim.Optimizer

    def __init__(self, named: dict[str, Tensor], optimizer: str | None = None, pending: bool = False, **settings: Any):
        super().__init__()
        self.named = named
        self.gradients: dict[str, Tensor] = {}
        self.pending = pending
        self._kind = optimizer
        self._settings = settings
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        """Make a new optimizer, without moments, and set the gradients to 0."""
        if self._kind is None:
            return
        self.gradients = {name: torch.zeros_like(tensor) for name, tensor in self.named.items()}
        optimizer, settings = OPTIMIZERS[self._kind], self._settings
        # One pass over the memory instead of several. CUDA has fused ones, too, of AdaGrad from torch 2.14 on, but none
        # was measured there.
        on_cpu = next(iter(self.named.values())).device.type == "cpu"
        if on_cpu and "fused" in inspect.signature(optimizer).parameters:
            settings = {"fused": True} | settings
        self.optimizer = optimizer(list(self.named.values()), **settings)

    def set_lr(self, lr: float) -> None:
        self._settings["lr"] = lr
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def step(self) -> None:
        """One step of the optimizer."""
        for name, tensor in self.named.items():
            tensor.grad = self.gradients[name]
        self.optimizer.step()

    def broadcast(self) -> None:
        """Copy process 0's state to every process, since hardware that rounds differently makes them drift apart."""
        device = next(iter(self.named.values())).device
        for tensor in self.state().values() if world_size() > 1 else ():
            if tensor.device == device:  # an optimizer's count of steps stays in host memory, and is equal
                dist.broadcast(tensor, 0)

    def state(self) -> dict[str, Tensor]:
        """The tensors by name, the optimizer's as `optimizer:name:key`, and gradients that are pending; no copies."""
        state = dict(self.named)
        if self._kind is None:
            return state
        for name, tensor in self.named.items():
            state |= {f"{self._kind}:{name}:{key}": value for key, value in self.optimizer.state[tensor].items()}
        if self.pending:
            state |= {f"pending:{name}": gradient for name, gradient in self.gradients.items()}
        return state

    def load(self, state: Mapping[str, Any], like: Tensor | None = None) -> None:
        """Copy the result of `state`, among other entries, to the device and dtype of `like`; by default its own."""
        like = next(iter(self.named.values())) if like is None else like
        self.named = {name: state[name].to(like, copy=True) for name in self.named}
        self.reset_optimizer()
        if self.pending:
            self.gradients = {name: state[f"pending:{name}"].to(like, copy=True) for name in self.named}
        if self._kind is not None:
            saved = self.optimizer.state_dict()  # which knows where its count of steps lies
            for number, name in enumerate(self.named):
                if moments := below(state, f"{self._kind}:{name}:"):
                    saved["state"][number] = {key: value.clone() for key, value in moments.items()}
            self.optimizer.load_state_dict(saved)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "SideModel":
        self.load(self.state(), like=fn(next(iter(self.named.values())).new_empty(0)))
        return self


def below(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Entries of `state` whose names start with `prefix`, under their names without it."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
