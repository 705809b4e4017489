"""Checkpoints between two optimizer steps, written every N steps or on a signal, from which a run resumes to the bit.

They are OpenCLIP's own files with the number of completed epochs and, in our entry, the position in the next one:

    order       what the order of the data depends on, besides data and epoch, by flag
    position    batches   completed in the epoch, per process
                of        batches of the whole epoch
                samples   that left each loader worker's stream, (processes, workers); (1, 0) with a sampler
                shown     state of the loss's diagnostics

The order of an epoch is a function of its number (see `seeding`), so the rest of it is the same as in an
uninterrupted run: a sampler skips indices, a worker's stream skips samples before they are decoded.
"""

import logging
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from open_clip_ext.distributed import all_gather
from open_clip_ext.errors import Stopped
from open_clip_ext.options import option
from training_ext.components.exact_resume import order
from training_ext.components.exact_resume.stopping import StopRequest
from training_ext.core.component import Component
from training_ext.core.epoch import Epoch
from training_ext.core.seam import DATA, TRAIN, TRAIN_DATA, Seam
from training_ext.data import checkpoint_files
from training_ext.data.checkpoint import order_of
from training_ext.data.metrics import saves_before_evaluation
from training_ext.data.seeding import SharedEpoch, seed_all

SHARDS = "get_wds_dataset"


def seeded(user: str, name: str, method: str, why: str, contract: str, layer: int = 0) -> Seam:
    """The seam of a name by which the function `user` builds train data; `method` of the component replaces it."""
    return Seam(
        DATA, name, why, contract,
        replacement=lambda original, component: partial(getattr(component, method), original),
        used_by=f"{DATA}:{user}",
        scopes=(TRAIN_DATA,),
        layer=layer,
    )  # fmt: skip


def items(user: str, name: str) -> Seam:
    why = "the augmentation of a sample depends on what its loader worker did before"
    contract = f"{user} builds {name}(...), whose items draw from the global generators only"
    return seeded(user, name, "seeded_items", why, contract, layer=1)


class ExactResume(Component):
    """Seeds the order of the data, saves checkpoints within epochs, and ends the run at one after SIGTERM or Ctrl-C."""

    name = "exact_resume"
    topic = "the run"
    needs_ext_loss = True
    may_be_off = False
    state_is_needed: bool = False  # at the end of an epoch
    seams = (
        Seam(
            TRAIN, "enumerate",
            why="a resumed epoch resumes at its step, by which OpenCLIP sets learning rates and logs",
            contract="train_one_epoch numbers the batches by the built-in enumerate(dataloader), from which alone it "
            "tells the step",
            replacement=lambda original, component: partial(component.numbered, original),
            used_by=f"{TRAIN}:train_one_epoch",
        ),
        seeded(
            SHARDS, "wds.shuffle", "seeded_shuffle",
            why="webdataset seeds its shuffle buffer by time and process number; after the buffer and before decoding, "
            "a resumed epoch drops the samples that it has used",
            contract="get_wds_dataset uses wds.shuffle(bufsize=, initial=) for samples, dicts with txt; the stages "
            "that follow take one sample at a time",
        ),
        seeded(
            SHARDS, "wds.WebLoader", "seeded_loader",
            why="loader workers outlive an epoch, and with them the state of their generators; a resumed epoch is "
            "shorter",
            contract="get_wds_dataset builds wds.WebLoader(dataset, ...), whose workers take turns from 0 on with a "
            "batch each, and returns a DataInfo with shared_epoch",
        ),
        seeded(
            SHARDS, "ResampledShards2", "seeded_shards",
            why="its seed comes from the loader's workers, which differ in a resumed run",
            contract="get_wds_dataset builds ResampledShards2(urls, ...), which seeds itself by worker_seed() + epoch",
        ),
        items("get_csv_dataset", "CsvDataset"),
        items("get_synthetic_dataset", "SyntheticDataset"),
    )  # fmt: skip

    save_every_steps: int | None = option(
        None, "save checkpoints also within epochs, for --resume latest; the newest is kept until the epoch's own",
        valid=lambda steps: steps >= 1, expected="at least 1", metavar="STEPS",
    )  # fmt: skip

    def __init__(self, args: Namespace):
        super().__init__(args)
        self._request: StopRequest | None = None
        self._saved: dict[str, Any] = {}  # order and position of the checkpoint that is resumed
        self._shown: dict[str, Any] | None = None  # state of the diagnostics, for the epoch that is resumed
        self._place: dict[str, Any] | None = None  # order and position of a checkpoint within an epoch
        self._until: ExitStack
        self._epoch: Epoch
        self._shared_epoch = SharedEpoch(args.workers)
        self._stream: order.SampleStream
        self._seeded_epochs: order.SeededEpochs | None = None

    def wanted(self) -> bool:
        return self.args.uses_ext_loss

    def check_plan(self, metrics: list[str]) -> None:
        if self.save_every_steps is not None:
            self.check_writes("save_every_steps")

    def columns(self) -> Sequence[str]:
        return (order.NUMBER,)

    def seeded_shuffle(self, original: Callable, **kwargs: Any) -> order.SampleStream:
        self._stream = order.SampleStream(partial(original, **kwargs), self.args.seed, self.args.rank)
        return self._stream

    def seeded_loader(self, original: Callable, dataset: IterableDataset, **kwargs: Any) -> Any:
        self._seeded_epochs = order.SeededEpochs(dataset, self._stream)
        return original(self._seeded_epochs, **kwargs)

    def seeded_shards(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        worker_seed = partial(order.seed_of_shards, self.args.seed, self.args.rank)
        return original(*args, worker_seed=worker_seed, **kwargs)

    def seeded_items(self, original: Callable, *args: Any, **kwargs: Any) -> order.SeededItems:
        return order.SeededItems(original(*args, **kwargs), self.args.seed, self._shared_epoch)

    def data_built(self, data: dict[str, Any]) -> None:
        if "train" not in data:
            return
        args, info = self.args, data["train"]
        inner = info.dataloader.loader
        streams = 0 if self._seeded_epochs is None else max(1, args.workers)
        if self._seeded_epochs is None:
            inner.batch_sampler.sampler = order.LateSampler(inner.sampler, args.batch_size)
        else:
            self._seeded_epochs.shared_epoch = info.shared_epoch
        start_at = (self._seeded_epochs or inner.batch_sampler.sampler).start_at
        info.dataloader.loader = order.ResumableLoader(inner, start_at, streams, self.training.data.tags, self._seed)

    def _seed(self, use: int, *place: int) -> None:
        seed_all(self.args.seed, use, self._shared_epoch.get_value(), self.args.rank, *place)

    def prepare(self, until: ExitStack) -> None:
        self._until = until

    def begin(self, resumed: bool) -> None:
        if self.plan.keeps_files:
            self._request = StopRequest()
            # Not at the end of training: torchrun ends every process once one has ended with a code, and process 0 may
            # still be copying the last checkpoint.
            self._until.callback(self._request.close)

    def numbered(self, original: Callable, batches: Any) -> Any:
        """Replaces the loop's `enumerate`: a resumed epoch begins at its step, with the diagnostics of those before."""
        shown, self._shown = self._shown, None
        if shown is not None:  # the loop has set the loss's epoch, which resets them
            assert self.training.loss is not None
            self.training.loss.load_diagnostics_state(shown)
        return original(batches, getattr(batches, "first", 0))

    def epoch(self, epoch: Epoch, train: Callable[[Epoch], None]) -> None:
        self._epoch = epoch
        self._shared_epoch.set_value(epoch.seed)
        saved, self._saved = self._saved, {}
        epoch.loader.start_at(self._start_from(saved) if saved else None)
        train(epoch)

    def _start_from(self, saved: dict[str, Any]) -> order.Start | None:
        """Where this process resumes, also logged; None at the start of an epoch.

        If the order of the data has changed, the run resumes after the same fraction of the epoch.
        """
        args, whole, workers = self.args, self._epoch.batches, self._epoch.loader.streams
        before, now = saved.get("order", {}), order_of(args, workers)
        changed = [f"{name} {old}, now {now.get(name)}" for name, old in before.items() if now.get(name) != old]
        if changed and self.plan.is_first:
            logging.warning(f"The order of the data changes: the checkpoint was written with {'; '.join(changed)}")
        if (position := saved.get("position")) is None:
            return None
        batches = position["batches"]
        if position["of"] != whole and self.plan.is_first:
            steps = self.plan.steps(position["of"]), self.plan.steps(whole)
            logging.warning("The length of an epoch changes: %d steps in the checkpoint, now %d", *steps)
        if not changed and batches < whole:
            samples = position["samples"][args.rank].tolist() if workers else []
            shown = position["shown"].items()
            self._shown = {name: v.to(args.device) if isinstance(v, torch.Tensor) else v for name, v in shown}
        else:
            batches = self.plan.steps(batches * whole // position["of"]) * args.accum_freq
            samples = [len(range(worker, batches, workers)) * args.batch_size for worker in range(workers)]
        logging.info(f"=> resuming after step {self.plan.steps(batches)} of {self._epoch.steps} in this epoch")
        return order.Start(self._epoch.seed, batches, whole, samples)

    def step_done(self, step: int) -> None:
        if self._request is None:
            return
        args, epoch, steps, every = self.args, self._epoch, self._epoch.steps, self.save_every_steps
        stops = self._request.agreed(at_once=step == steps)  # an evaluation may follow the last step
        is_due = every is not None and (epoch.seed * steps + step) % every == 0
        is_last = step == steps and saves_before_evaluation(self.plan, self.training.components, epoch)
        if not (stops or is_due or is_last):
            return
        self._place, self.state_is_needed = self._place_after(step), True
        checkpoint_files.save_within(self.plan, self.training, epoch, step)
        self._place, self.state_is_needed = None, False
        if args.distributed:
            dist.barrier()  # the file exists before any process ends
        if stops:
            raise Stopped(
                stops,
                f"after step {step} of {steps} of an epoch; the checkpoint is saved, and --name {args.name} "
                "--resume latest resumes there",
            )

    def _place_after(self, step: int) -> dict[str, Any]:
        loader, loss = self._epoch.loader, self.training.loss
        assert loss is not None
        samples = torch.tensor([loader.numbers], dtype=torch.int64, device=self.args.device)
        position = {
            "batches": step * self.args.accum_freq, "of": self._epoch.batches,
            "samples": (all_gather(samples) if loader.streams else samples).cpu(),
            "shown": loss.diagnostics_state(),
        }  # fmt: skip
        return {"order": order_of(self.args, loader.streams), "position": position}

    def state_dict(self) -> dict[str, Any]:
        return self._place or {"order": order_of(self.args, self._epoch.loader.streams), "position": None}

    def older_state(self, entry: dict[str, Any]) -> dict[str, Any]:
        return {name: entry[name] for name in ("order", "position") if entry.get(name) is not None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._saved = state
