"""A part of a training step as one CUDA graph: one launch in place of those of some hundred operations.

A graph repeats the operations that were launched while it was captured, on the same memory and with the same numbers
from the host. So each step's inputs are copied into the graph's own tensors, and what the host does is done here:
AdaGrad's count of steps, and the actions that the captured function left to `on_host`. Inputs of other shapes, another
learning rate, number of the host or tensor of the state need another graph; the latest alone is kept, since its
temporary memory stays allocated.

The first step of a kind runs without a graph, as what CUDA loads at a first launch must not be loaded in a capture.
"""

import gc
import logging
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

DEVICE = "cuda"


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures: cuBLAS keeps a workspace for each, 32 MiB on an H100, in the memory of a graph."""
    return torch.cuda.Stream(device)


class StepGraph:
    """Runs a function of tensors; without a graph where none can be captured.

    Args:
        flag: name of the option that asked for it, for the warning.

    Attributes:
        capturing: whether a graph is being captured.
        failed: whether none can be.
    """

    graph: torch.cuda.CUDAGraph
    result: Any  # of the captured function; each replay writes its tensors

    def __init__(self, flag: str) -> None:
        self.flag = flag
        self.capturing = False
        self._kind: tuple[Any, ...] = ()  # of the latest step
        self._held: tuple[Any, ...] = ()  # whose ids are in it, so that no later object gets one of them
        self._inputs: dict[str, Tensor] = {}  # the graph's own; empty while there is none
        self._actions: list[Callable[[], object]] = []
        self._counts: list[tuple[Tensor, int]] = []  # of an optimizer's steps, and how many a replay makes
        self.failed = False

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.flag,)  # a copy of the loss has other tensors

    def on_host(self, action: Callable[[], object]) -> None:
        """Run `action`, which is not for a graph, now, or, while one is captured, after each of its replays."""
        if self.capturing:
            self._actions.append(action)
        else:
            action()

    def give_up(self, reason: str) -> None:
        """Run all further steps without a graph, with one warning."""
        if not self.failed:
            logging.warning(f"{self.flag}: no CUDA graph ({reason}); steps go on without one")
        self.failed, self._inputs, self._actions, self._held, self.result = True, {}, [], (), None

    def run(self, step: Callable[..., Any], inputs: Mapping[str, Tensor | None], depends_on: tuple[Any, ...]) -> Any:
        """`step(**inputs)`, without autograd's graph of the inputs; the next run overwrites a result's tensors.

        Args:
            depends_on: what `step` depends on besides: numbers of the host; tensors that are only overwritten, and
                other objects. Of an optimizer, AdaGrad's, the steps are counted.
        """
        if self.failed:
            return step(**inputs)
        optimizers = [one for one in depends_on if isinstance(one, torch.optim.Optimizer)]
        shapes = [None if one is None else (one.shape, one.dtype) for one in inputs.values()]
        numbers = [one if isinstance(one, (int, float)) else id(one) for one in depends_on]
        kind = (*inputs, *shapes, *numbers, *(group["lr"] for one in optimizers for group in one.param_groups))
        if kind != self._kind:
            self._kind, self._held, self._inputs = kind, depends_on, {}
            return step(**inputs)
        # Detached, or autograd would keep the graphs of all steps' inputs behind those of the copies.
        tensors = {name: tensor.detach() for name, tensor in inputs.items() if tensor is not None}
        if not self._inputs:
            try:
                self._capture(step, tensors, inputs, optimizers)
            except RuntimeError as error:
                # The end of a failed capture fails, too.
                self.give_up(str(error.__context__ or error).strip().partition("\n")[0])
            if self.failed:  # outside the handler, whose error keeps what the capture allocated
                return step(**inputs)
        for name, tensor in tensors.items():
            self._inputs[name].copy_(tensor, non_blocking=True)
        self.graph.replay()
        for count, updates in self._counts:
            count += updates
        for action in self._actions:
            action()
        return self.result

    def _capture(
        self, step: Callable[..., Any], tensors: dict[str, Tensor], inputs: Mapping[str, Tensor | None],
        optimizers: list[torch.optim.Optimizer],
    ) -> None:  # fmt: skip
        device = next(iter(tensors.values())).device
        if device.type != DEVICE:
            raise RuntimeError(f"on {device.type}")
        self._inputs = {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}
        self._actions = []
        self.graph = torch.cuda.CUDAGraph()
        groups = [group for one in optimizers for group in one.param_groups]
        counts = [state["step"] for one in optimizers for state in one.state.values()]
        before = [count.clone() for count in counts]
        for group in groups:
            group["capturable"] = True  # without a decay of its rate AdaGrad reads no value from the device
        self.capturing = True
        collects = gc.isenabled()
        gc.disable()  # which may free the graph of an earlier loss: that ends a capture
        try:
            # The loader's thread that pins memory may call CUDA meanwhile.
            graph = torch.cuda.graph(self.graph, stream=capture_stream(device), capture_error_mode="thread_local")
            # The outer context returns to the current stream; torch's own does not where the end of a capture fails.
            with torch.cuda.stream(torch.cuda.current_stream(device)), graph:
                self.result = step(**dict.fromkeys(inputs) | self._inputs)
        except RuntimeError:
            self.graph.reset()  # its memory
            # Before torch 2.13 a capture that fails leaves the generator in it, and whatever draws next would raise.
            for generator in torch.cuda.default_generators:
                generator.graphsafe_set_state(generator.clone_state())
            raise
        finally:
            if collects:
                gc.enable()
            self.capturing = False
            for group in groups:
                del group["capturable"]
            self._counts = [(count, int(count - old)) for count, old in zip(counts, before, strict=True)]
            for count, old in zip(counts, before, strict=True):
                count.copy_(old)
