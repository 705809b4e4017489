"""Train losses on the pretended GPU in every way that their flags allow; `test_pretend_gpu` runs this file.

    LD_PRELOAD=libcuda.so.1 python scenarios.py FOLDER sogclr neuclip planted

writes a file for each into FOLDER: as JSON the settings that ran, or what each planted fault was answered; where a loss
failed, its traceback.
"""

import argparse
import json
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pretend
import torch
import torch._dynamo  # noqa: F401  which the first operation would import in every process
import torch.distributed as dist
from pretend import Collective, PretendGPU
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from variations import SMALL, variations

from open_clip_ext import batch, create_loss, losses
from open_clip_ext.distributed import all_gather
from open_clip_ext.kernels import choice
from open_clip_ext.normalizers.npn import NPN
from open_clip_ext.row_state import ShardedRows

ROWS, BATCH, DIMENSION, WORLD, RANKS = 300, 16, 8, 8, (0, 1, 7)
HOST_COPIES = 4  # that wait, in a step of a table in host memory: rows and values, of a lookup and an update


def make(name: str, settings: dict[str, Any], accum_freq: int = 1) -> losses.Loss:
    return create_loss(name, num_samples=ROWS, epochs=4, device="cuda", accum_freq=accum_freq, **settings)


def may_wait(loss: losses.Loss, first_of_epoch: bool) -> bool:
    """The first step checks its arguments; AmorLIP begins each epoch with networks that are drawn in host memory."""
    return loss.steps == 0 or (first_of_epoch and isinstance(loss, losses.AmorLIPLoss))


def step(gpu: PretendGPU, loss: losses.Loss, dtype: torch.dtype, waits: bool, keys: bool) -> None:
    """One optimizer step, forward and backward, with the pairs' rows in host memory, as a data loader has them."""
    gpu.may_wait = waits
    index = torch.arange(BATCH)
    name = "positive_key" if loss.takes_positives else "key" if loss.takes_keys else None
    more = {name: index // 2} if keys and name else {}
    if loss.takes_reference:
        names = "dist_image_features", "dist_text_features"
        more |= {name: torch.empty(BATCH, 6, device="cuda", dtype=dtype) for name in names}
    for _ in range(loss.accum_freq):
        with torch.autocast("cuda", dtype):
            towers = [torch.empty(DIMENSION, DIMENSION, device="cuda", requires_grad=True) for _ in range(2)]
            image, text = (torch.empty(BATCH, DIMENSION, device="cuda") @ tower for tower in towers)
            scale = torch.empty((), device="cuda", requires_grad=True)
            value = loss(image, text, scale.exp(), index=index, **more)
        value.backward()
        assert image.dtype == dtype and value.is_cuda and value.dtype == torch.float32
        assert all(tower.grad.is_cuda for tower in towers)
    loss.diagnostics()
    gpu.may_wait = True


def train(
    gpu: PretendGPU, loss: losses.Loss, dtype: torch.dtype, keys: bool = False, steps: int = 3, waits: int = 0
) -> None:
    """So many steps in each of two epochs, and a look at the log at an epoch's end, which may wait for the device.

    Args:
        waits: how often a step may wait, where it is not one that `may_wait`.
    """
    for epoch in range(2):
        loss.set_epoch(epoch)
        for number in range(steps):
            before = len(gpu.waits)
            first = may_wait(loss, number == 0)
            step(gpu, loss, dtype, first or waits > 0, keys)
            assert first or len(gpu.waits) - before <= waits, gpu.waits[before:]
        loss.raise_if_not_finite()
        assert all(isinstance(float(value), float) for value in loss.diagnostics().values())
        loss.diagnostics_state()


def on_one_process(name: str, settings: dict[str, Any]) -> None:
    """bfloat16, and a state that is saved and loaded; float16 with accumulation and keys, its rows in host memory."""
    with PretendGPU() as gpu:
        loss = make(name, settings)
        train(gpu, loss, torch.bfloat16)
        state = loss.full_state()
        assert all(value.device.type == "cpu" for value in state.values() if isinstance(value, Tensor))
        loaded = make(name, settings)
        loaded.load_full_state(state)
        loaded.set_epoch(1)
        for after in range(2):  # what was loaded goes to the device with the first step
            step(gpu, loaded, torch.bfloat16, after == 0, False)
        tables = sum(isinstance(module, ShardedRows) for module in loss.modules())
        on_host = {"rows_on": "host"} if tables else {}
        train(gpu, make(name, settings | on_host, 2), torch.float16, True, 2, HOST_COPIES * tables)


def briefly(name: str, settings: dict[str, Any]) -> None:
    """A step of each of two epochs in float16, with accumulation and keys."""
    with PretendGPU() as gpu:
        train(gpu, make(name, settings, 2), torch.float16, True, 1)


@contextmanager
def as_one_of(rank: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())
    choice._usable.clear()  # of the process before
    try:
        yield
    finally:
        dist.destroy_process_group()


def on_eight_processes(
    name: str, settings: dict[str, Any], ranks: Sequence[int] = RANKS, also: Callable[[int], None] = lambda rank: None
) -> None:
    """Steps and a save as some of 8 processes: the same collectives in the same order."""
    of: dict[int, list[Collective]] = {}
    for rank in ranks:
        with as_one_of(rank), PretendGPU() as gpu:
            loss = make(name, settings)
            for epoch in range(2):
                loss.set_epoch(epoch)
                step(gpu, loss, torch.bfloat16, may_wait(loss, True), epoch > 0)
                also(rank)
            loss.full_state()
        of[rank] = gpu.collectives
    for rank in ranks[1:]:
        assert of[rank] == of[0], f"processes 0 and {rank} differ: {_difference(of[0], of[rank])}"
    assert of[0]


def _difference(first: list[Collective], second: list[Collective]) -> Any:
    pairs = enumerate(zip(first, second, strict=False))
    return next(((at, *pair) for at, pair in pairs if pair[0] != pair[1]), (len(first), len(second)))


# Faults, each of which must be found: a patch and what finds it.


def _table_in_host_memory() -> Any:
    lookup = ShardedRows.lookup
    return patch.object(ShardedRows, "lookup", lambda self, index: torch.zeros(lookup(self, index).shape))


def _hidden_bool() -> Any:
    undo_if = NPN._undo_if
    return patch.object(NPN, "_undo_if", lambda self, undo, before: undo_if(self, undo, before) if undo else None)


def _noting(change: Callable[[Tensor], Any]) -> Any:
    return patch.object(losses.Loss, "note", lambda self, problems, names=None: change(problems))


def _gathering(change: Callable[[Tensor], Tensor]) -> Any:
    def gather(tensor: Tensor) -> Tensor:
        dist.all_reduce(change(tensor.detach()))
        return all_gather(tensor)

    return patch.object(batch, "all_gather", gather)


def _one_more_of_process_1(rank: int) -> None:
    if rank == 1:
        dist.all_reduce(torch.zeros(2, device="cuda"))


PLANTED: dict[str, tuple[Callable[[], Any], Callable[[], None]]] = {
    "a table in host memory": (_table_in_host_memory, lambda: briefly("sogclr", {})),
    "a hidden bool": (_hidden_bool, lambda: briefly("neuclip", SMALL["neuclip"])),
    "a mask": (lambda: _noting(lambda found: found[found > 0]), lambda: briefly("sogclr", {})),
    "a copy from host memory": (
        lambda: _noting(lambda found: torch.tensor(False, device=found.device)), lambda: briefly("sogclr", {})
    ),
    "a collective in host memory": (
        lambda: _gathering(lambda tensor: torch.zeros(2)), lambda: on_eight_processes("sogclr", {})
    ),
    "a collective of a transposed matrix": (
        lambda: _gathering(lambda tensor: tensor.T), lambda: on_eight_processes("sogclr", {})
    ),
    "a collective of 16-bit integers": (
        lambda: _gathering(lambda tensor: tensor.to(torch.int16)), lambda: on_eight_processes("sogclr", {})
    ),
    "a send": (
        lambda: patch.object(dist, "gather", lambda piece, received: dist.send(piece, 1)),
        lambda: on_eight_processes("sogclr", {}),
    ),
    "a collective of one process": (
        ExitStack, lambda: on_eight_processes("sogclr", {}, also=_one_more_of_process_1)
    ),
}


def planted() -> dict[str, str]:
    found = {}
    for name, (plant, run) in PLANTED.items():
        try:
            with plant():
                run()
            found[name] = ""
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        if dist.is_initialized():
            dist.destroy_process_group()
    return found


def run(preset: str) -> list[dict[str, Any]]:
    """All scenarios of a preset: its defaults at length, its variations briefly. Returns the settings that ran."""
    ran = variations(preset)
    for settings in ran:
        try:
            if settings is ran[0]:
                on_one_process(preset, settings)
                on_eight_processes(preset, settings)
            else:
                briefly(preset, settings)
                on_eight_processes(preset, settings, RANKS[:2])
        except Exception as error:
            error.add_note(f"--loss {preset} with {settings}")
            raise
    return ran


def main() -> None:
    """A process for each part of the work, made from this one, where PyTorch is imported already."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("work", nargs="+", help="presets, or `planted`")
    args = parser.parse_args()
    pretend.prepare()
    for name in args.work:
        child = os.fork()
        if child > 0:
            os.waitpid(child, 0)
            continue
        try:
            result = json.dumps(planted() if name == "planted" else run(name))
        except BaseException:
            result = traceback.format_exc()
        (args.folder / name).write_text(result)
        os._exit(0)


if __name__ == "__main__":
    main()
