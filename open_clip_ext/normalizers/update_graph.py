"""A step's updates of the network as one CUDA graph: one launch in place of those of some 400 operations.

A graph repeats the operations that were launched while it was captured, on the same memory and with the same numbers
from the host. So each batch is copied into the graph's own tensors, and what the host does in an update is done here:
AdaGrad's count of steps. Another batch size, learning rate, surrogate or tensor of the network needs another graph; the
latest alone is kept, since its temporary memory stays allocated.

The first step of a kind runs without a graph, as what CUDA loads at a first launch must not be loaded in a capture.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from open_clip_ext.batch import Batch
from open_clip_ext.side_model import SideModel

INPUTS = ("all_image", "all_text", "all_tau", "all_positives", "all_log_batch", "finite", "keys")  # of the updates
DEVICE = "cuda"


class UpdateGraph:
    """Runs the updates of a `SideModel` whose optimizer is AdaGrad; without a graph where none can be captured.

    Attributes:
        inputs: the graph's tensors for a batch, by name; empty while there is no graph.
    """

    graph: torch.cuda.CUDAGraph
    result: Tensor  # of the captured function; each replay writes it
    updates: int  # in a step

    def __init__(self) -> None:
        self._kind: tuple[Any, ...] = ()  # of the latest step
        self._held: tuple[Any, ...] = ()  # whose ids are in it, so that no later object gets one of them
        self.inputs: dict[str, Tensor] = {}
        self._failed = False

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # a copy of the network has other tensors

    def run(
        self, train: Callable[[Batch], Tensor], batch: Batch, network: SideModel, *constants: Tensor | object
    ) -> Tensor:
        """`train(batch)`, which updates `network` and returns a tensor.

        Args:
            batch: from `Batch.or_zeros`.
            constants: what `train` depends on besides: tensors that are only overwritten, and objects.
        """
        if self._failed:
            return train(batch)
        held = (network.optimizer, *constants)  # a network with new tensors has a new optimizer
        rate = network.optimizer.param_groups[0]["lr"]
        kind = (batch.size, batch.keys is None, rate, *map(id, held))
        if kind != self._kind:
            self._kind, self._held, self.inputs = kind, held, {}
            return train(batch)
        if not self.inputs:
            try:
                self._capture(train, batch, network)
            except RuntimeError as error:
                self._failed, self.inputs = True, {}
                reason = str(error).strip().partition("\n")[0]
                logging.warning(f"npn_graph: no CUDA graph ({reason}); the network is updated without one")
                return train(batch)
        for name, tensor in self.inputs.items():
            tensor.copy_(getattr(batch, name))
        self.graph.replay()
        for state in network.optimizer.state.values():
            state["step"] += self.updates
        return self.result.clone()

    def _capture(self, train: Callable[[Batch], Tensor], batch: Batch, network: SideModel) -> None:
        device = batch.all_image.device
        if device.type != DEVICE:
            raise RuntimeError(f"on {device.type}")
        tensors = {name: getattr(batch, name) for name in INPUTS}
        self.inputs = {name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}
        image, text, tau = (self.inputs[name] for name in INPUTS[:3])
        static = Batch(image, text, tau, image, text, tau)
        vars(static).update(self.inputs)
        optimizer = network.optimizer
        counts = [state["step"] for state in optimizer.state.values()]
        before = [count.clone() for count in counts]
        for group in optimizer.param_groups:
            group["capturable"] = True  # without a decay of its rate AdaGrad reads no value from the device
        try:
            self.graph = torch.cuda.CUDAGraph()
            # The loader's thread that pins memory may call CUDA meanwhile.
            how: dict[str, Any] = dict(stream=torch.cuda.Stream(device), capture_error_mode="thread_local")
            with torch.cuda.graph(self.graph, **how):
                self.result = train(static)
        finally:
            for group in optimizer.param_groups:
                del group["capturable"]
            self.updates = int(counts[0] - before[0])
            for count, old in zip(counts, before, strict=True):
                count.copy_(old)
