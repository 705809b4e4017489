"""The memory that a training step takes on a GPU, counted on a CPU with tensors that have shapes and no values.

Two counts, since the loss is called when all activations are there: the model's forward and backward pass and the
optimizer's step on FakeTensors, with the features' inner products in place of the loss; and the loss on torch's meta
device, with a GPU's block sizes, in a process group that sends nothing. Each tensor counts from the operation that
makes it until nothing refers to it. Kernels' workspaces, CUDA's context, NCCL's buffers and the gaps between blocks of
memory are not in it.

Attention and, under autocast, layer normalization are replaced by what CUDA keeps for their backward pass.
"""

import weakref
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from open_clip_ext.losses import Loss

MICRO_BATCHES = 2  # that are counted; of further ones only the inputs and features are added
WARM_UP = 5  # calls after which the state of a usual loss has its size
AUTOCAST = {"amp": torch.float16, "amp_bf16": torch.bfloat16, "amp_bfloat16": torch.bfloat16}
INPUT = {"bf16": torch.bfloat16, "pure_bf16": torch.bfloat16, "fp16": torch.float16, "pure_fp16": torch.float16}


class _Completed(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


_NOTHING_SENT = _Completed()  # torch 2.6 has no FakeWork


class HeldBytes(TorchDispatchMode):
    """Counts the bytes of the tensors on a device.

    Args:
        device: of the tensors that count.

    Attributes:
        held: bytes that were allocated within and are still referred to.
        peak: the most at a time.
    """

    def __init__(self, device: str):
        super().__init__()
        self.device = device
        self.held = self.peak = 0
        self._seen: set[int] = set()

    def on_device(self, tree: Any) -> list[Tensor]:
        return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.device.type == self.device]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = self.on_device((args, kwargs or {}))
        for tensor in inputs:
            self._hold(tensor.untyped_storage(), 0)  # allocated before, if it is new here
        if function.namespace == "c10d":  # a collective, which writes into its first argument
            result = args[0], _NOTHING_SENT.boxed()
        else:
            result = function(*args, **(kwargs or {}))
        outputs = self.on_device(result)
        for tensor in outputs:
            self._hold(tensor.untyped_storage(), tensor.untyped_storage().nbytes())
        self.note(function, inputs, outputs)
        return result

    def note(self, function: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Called after each operation, for a subclass."""

    def _hold(self, storage: torch.UntypedStorage, size: int) -> None:
        address = storage._cdata
        if address in self._seen:
            return
        self._seen.add(address)
        self.held += size
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._release, address, size)

    def _release(self, address: int, size: int) -> None:
        self._seen.discard(address)
        self.held -= size


def step_bytes(model: Any, args: Namespace, processes: int, loss: Loss | None) -> int:
    """The most bytes that a process allocates at a time in an optimizer step, beyond the model's weights, AdamW's
    moments, and what the loss keeps between steps.

    Args:
        model: on the meta device, with its towers locked as the flags say.
        args: batch_size, accum_freq, precision and grad_checkpointing of the command.
        processes: the world size.
        loss: as `build_loss` makes it, on the meta device; None for OpenCLIP's own.
    """
    buckets = sum(each.nbytes for each in model.parameters() if each.requires_grad) if processes > 1 else 0
    at_loss, peak, dimension = model_bytes_of_step(model, args)
    if loss is not None and args.accum_freq > 1:  # the gradient of all features, for the step's later calls
        peak += 2 * 4 * args.batch_size * args.accum_freq * dimension
    return buckets + max(peak, at_loss + loss_bytes(args, processes, loss, dimension))


def model_bytes_of_step(model: Any, args: Namespace, device: str = "cpu") -> tuple[int, int, int]:
    """Bytes beyond weights and moments when the loss is called, and the most at any time; the embeddings' dimension.

    Args:
        device: of the FakeTensors; only a CUDA build of torch with a driver takes another than the CPU's.
    """
    mode = FakeTensorMode()
    model._apply(lambda tensor: FakeTensor(mode, tensor.detach().to("meta"), torch.device(device)))
    if args.grad_checkpointing:
        model.set_grad_checkpointing()
    model.train()
    trained = [each for each in model.parameters() if each.requires_grad]
    size = model.visual.image_size
    size = size if isinstance(size, (tuple, list)) else (size, size)
    mixed = AUTOCAST.get(args.precision)
    autocast = torch.autocast(device, mixed or torch.bfloat16, enabled=mixed is not None)
    k = min(MICRO_BATCHES, args.accum_freq)
    with mode, torch.device(device), _kernels_of_cuda():
        optimizer = torch.optim.AdamW(trained, foreach=True)
        for each in trained:  # the moments, before anything is counted
            each.grad = torch.empty_like(each)
        optimizer.step()
        optimizer.zero_grad()
        with HeldBytes(device) as counted:
            inputs = [
                (
                    torch.empty(args.batch_size, 3, *size, dtype=INPUT.get(args.precision)),
                    torch.zeros(args.batch_size, model.context_length, dtype=torch.int64),
                )
                for _ in range(k)
            ]
            with torch.no_grad(), autocast:
                cached = [model(*pair) for pair in inputs] if k > 1 else []
            at_loss = 0
            for pair in inputs:
                with autocast:
                    output = model(*pair)
                image, text = output["image_features"], output["text_features"]
                at_loss = max(at_loss, counted.held)
                (image * text).sum().backward()
                dimension = image.shape[1]
                del output, image, text
            optimizer.step()
        cached_bytes = (args.accum_freq - k) * sum(tensor.nbytes for tensor in tree_leaves([*inputs[:1], *cached[:1]]))
    return at_loss + cached_bytes, counted.peak + cached_bytes, dimension


def loss_bytes(args: Namespace, processes: int, loss: Loss | None, dimension: int) -> int:
    """The most bytes that the loss allocates at a time.

    For OpenCLIP's own losses: four matrices of similarities in float32, of ClipLoss with --local-loss and
    --gather-with-grad, or of SigLipLoss with the texts of one process at a time; and all features and their gradients.
    """
    batch = args.batch_size * args.accum_freq
    if loss is None:
        columns = batch if getattr(args, "siglip", False) else batch * processes
        return 4 * 4 * batch * columns + 4 * 4 * batch * processes * dimension
    no_autocast = patch.object(torch, "autocast", lambda *args, **kwargs: nullcontext())
    with _pretended(processes), no_autocast:
        image, text = (torch.empty(batch, dimension, device="meta", requires_grad=True) for _ in range(2))
        scale = torch.empty((), device="meta", requires_grad=True)
        more = {}
        if loss.takes_reference:
            more = {"dist_image_features": torch.empty_like(image), "dist_text_features": torch.empty_like(text)}
        loss.set_epoch(0)
        loss.steps, loss._local_pairs = 1, batch  # at step 0, or without the size of a batch, a loss checks values
        loss.accum_freq = 1  # of a step's calls the first takes most
        for _ in range(WARM_UP):
            index = torch.empty(batch, dtype=torch.int64, device="meta")
            with HeldBytes("meta") as counted:
                loss(image, text, scale, index=index, **more).backward()
    return counted.peak


@contextmanager
def _kernels_of_cuda() -> Iterator[None]:
    """Attention by the kernels that a GPU has; layer normalization in float32 where an autocast is on."""
    layer_norm = functional.layer_norm

    def in_float32(input: Tensor, *args: Any, **more: Any) -> Tensor:
        return layer_norm(input.float() if torch.is_autocast_enabled("cpu") else input, *args, **more)

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, **more: Any,
    ) -> Tensor:
        aten = torch.ops.aten
        if attn_mask is None and query.dtype != torch.float32:
            return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal)[0]
        if attn_mask is not None:
            attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
        kernel = aten._scaled_dot_product_efficient_attention
        return kernel(query, key, value, attn_mask, True, dropout_p, is_causal)[0]

    with (
        patch.object(functional, "layer_norm", in_float32),
        patch.object(functional, "scaled_dot_product_attention", attention),
    ):
        yield


@contextmanager
def _pretended(processes: int) -> Iterator[None]:
    """A process group of so many processes that sends nothing."""
    if processes == 1 or dist.is_initialized():
        yield
        return
    dist.init_process_group("fake", rank=0, world_size=processes, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
