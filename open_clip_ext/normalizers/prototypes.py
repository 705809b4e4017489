"""NeuCLIP's normalizer-prediction network (NPN): m prototypes per direction that summarize the whole data set.

NeuCLIP, Eq. 10 (images as anchors; Eq. 11 is the same with image and text swapped), in the log domain:

    alpha_1i = logaddexp(log eps, logsumexp_j'(l(cos(e_1i, W_1j') - s_ii) / tau) - log m),    l(x) = x in the paper

A reset sets W_1 to text and W_2 to image embeddings of the same pairs. `npn` says when the prototypes are reset and
trained; `kernels.prototype_gradient` has the gradient (Eq. 12), `kernels.fused_prototypes` whole updates on a GPU. In
plain PyTorch: `equations.neuclip_alpha`, `equations.neuclip_w`, a whole training in `equations.neuclip_algorithm_1`.

Readings fixed here, where the paper is silent:

- A reset takes the latest m embeddings from a ring buffer: those of the batch if B >= m (its last m pairs; in a random
  batch any m would do), else those of several batches (CC3M: B = 1024 < m = 4096). While the ring holds only k < m
  pairs, there are k prototypes and log k in place of log m, and each batch adds prototypes. Copies of fewer embeddings
  would receive equal gradients and stay copies.
- With the paper's AdaGrad at learning rate 1.0 a prototype's first update changes every coordinate by 1, while its
  entries are about 1 / sqrt(d). The first updates of a training thus turn it far from its embedding. A smaller
  `npn_lr` makes them smaller; where they do harm, `npn_max_rise` undoes them.
- exp(L_i - alpha_i) is bounded by exp(12.5) in the gradient, see `objectives.MAX_LOG_WEIGHT`.
- Embeddings are unit vectors already, so cos(e, W) = e . W / |W|.
- A prototype keeps the key of the sample that it was drawn from until the next reset, and does not count for anchors of
  that key, neither in alpha nor in its training; alpha is a mean over those that count, and the batch's own estimate if
  none does. Its updates move it away from the sample, so that this is no more than an approximation; it is nearer to
  the log-normalizers without the false negatives than all prototypes together are (`docs/evidence/flags.md`).
- `npn_split` shards the prototypes over the processes (`sharded_prototypes`); the result is the same to float32
  accuracy. By default they are sharded on GPUs where counting says that it is faster (`is_split_faster`) and the
  length of a pass is known; a state does not show it.

Shapes: m = prototypes per direction, k <= m of them active, d = embedding dimension, B = global batch.
"""

import logging
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from open_clip_ext.batch import Batch, log_mean
from open_clip_ext.distributed import LocalTensors, gather_rows, on_first, rank, world_size
from open_clip_ext.kernels.choice import KERNELS, MOST_PROTOTYPES, fused_prototypes, has_kernels
from open_clip_ext.kernels.log_sum import Keys, log_sum, number_of_equals
from open_clip_ext.kernels.prototype_gradient import PrototypeGradient
from open_clip_ext.normalizers.npn import NPN
from open_clip_ext.normalizers.ring import EmbeddingRing, RingNormalizer
from open_clip_ext.normalizers.sharded_prototypes import ShardedLogSum, is_split_faster
from open_clip_ext.options import AT_LEAST_1, Derived, option, refuse_unused
from open_clip_ext.side_model import MOMENTS, SideModel
from open_clip_ext.step_graph import StepGraph
from open_clip_ext.surrogates import is_linear

TRAINED_ON = ("all_image", "all_text", "all_tau", "all_positives", "all_log_batch", "finite", "keys")  # of a batch


class Prototypes(RingNormalizer, NPN, LocalTensors):
    """The NPN of NeuCLIP. Memory: weights, gradients and ring of 2 * m * d float32 each, and the optimizer's state.

    A reset sets prototype i to the pair at position i of the ring.
    """

    name = "prototypes"
    size = "npn_prototypes"
    default_optimizer = "adagrad"
    npn_prototypes: int = option(
        4096, "m, prototypes of the normalizer-prediction network per direction", in_state=True, **AT_LEAST_1
    )
    npn_split: bool | None = option(Derived("on GPUs if counted faster"), "shard the prototypes over the processes")
    npn_graph: bool | None = option(Derived("on GPUs, unless split"), "launch a step's updates as one CUDA graph")
    kernels: str = KERNELS
    _samples, _steps_per_pass = 0, 1  # of a pass over the data, if known
    local_tensors = ("keys",)
    keys: Tensor | None = None  # of the samples that they were drawn from, (m,) int64; None while batches have none

    @classmethod
    def complete(cls, settings: dict, epochs: int | None, explicit: Collection[str]) -> None:
        super().complete(settings, epochs, explicit)
        if settings["npn_opt"] != "adagrad" or settings["npn_joint"]:
            refuse_unused(explicit, ["npn_graph"], "without updates by AdaGrad")
        if settings["npn_split"]:
            refuse_unused(explicit, ["npn_graph"], "with npn_split")

    def limit_to(self, num_samples: int) -> None:
        super().limit_to(num_samples)
        self._samples = num_samples

    def set_steps_per_pass(self, steps: int, passes: float | None = None) -> None:
        super().set_steps_per_pass(steps, passes)
        self._steps_per_pass = steps

    def memory(self, dimension: int, processes: int) -> dict[str, int]:
        parts = processes if self.npn_split else 1
        each = 4 * 2 * self.capacity * dimension // parts
        moments = MOMENTS[self.optimizer_name]
        names = {"prototypes": 1, "their gradients": 1, "their optimizer's state": moments, "latest embeddings": 1}
        return {name: each * count for name, count in names.items()}

    def _make(self, dimension: int, device: torch.device, dtype: torch.dtype, **training: Any) -> SideModel:
        self.check_memory(dimension, device, world_size())
        self.split = self._splits(dimension, device, dtype) and world_size() > 1
        self.ring = EmbeddingRing(self.capacity, dimension, device, dtype, self.split)
        self.update_graph = StepGraph("npn_graph") if self._has_graph(device) else None
        return SideModel({"weight": torch.zeros_like(self.ring.rows)}, **training)

    def materialize(self, dimension: int, device: torch.device, dtype: torch.dtype) -> None:
        super().materialize(dimension, device, dtype)
        if self.updates > 0:
            self._kernels()  # tries them in the first step, which waits for the device anyway

    def _splits(self, dimension: int, device: torch.device, dtype: torch.dtype) -> bool:
        if self.npn_split is not None or self.npn_graph or device.type == "cpu":
            return bool(self.npn_split)
        splits = is_split_faster(
            world_size(), self.capacity, dimension, self.updates, self._samples // self._steps_per_pass,
            has_kernels=self.kernels != "eager" and self._allows_kernels and has_kernels(device, dtype),
        )  # fmt: skip
        if splits and rank() == 0:
            logging.info("npn_split: on, as by default where that is faster: each process has a part of the prototypes")
        return splits

    def _has_graph(self, device: torch.device) -> bool:
        if self.npn_graph is not None:
            return self.npn_graph
        return device.type == "cuda" and self.can_capture and not self.split

    @property
    def weight(self) -> Tensor:
        """The prototypes of this process, (2, m, d) or less: [0] for image anchors, [1] for text anchors."""
        return self.network.named["weight"]

    @property
    def active(self) -> int:
        """k, the number of prototypes in use."""
        return self.ring.active

    def _observe(self, batch: Batch) -> None:
        """Push the batch into the ring, and add its pairs as prototypes while k < m."""
        held = self.ring.own_active
        self.ring.push(batch)
        self._take(slice(held, self.ring.own_active))

    def _restart(self, batch: Batch) -> None:
        self._take(slice(self.ring.own_active))

    def _take(self, places: slice) -> None:
        """Overwrite prototypes with the embeddings in the ring."""
        self.weight[:, places] = self.ring.rows[:, places]
        if self.ring.keys is not None:
            if self.keys is None:
                self.keys = self.ring.unlike_keys(self.weight.device)
            self.keys[places] = self.ring.keys[places]

    def _is_exact_for(self, batch: Batch) -> bool:
        # With keys an anchor's own pair does not count, and all other prototypes are the rest of the batch.
        return batch.keys is not None and self.active == batch.size

    def _train(self, batch: Batch) -> Tensor:
        if self.update_graph is None or self.active < self.capacity:
            return super()._train(batch)
        inputs = {name: getattr(batch, name) for name in TRAINED_ON}
        depends_on = self.network.optimizer, self.surrogate, self.keys
        return self.update_graph.run(self._train_on, inputs, depends_on).clone()

    def _train_on(self, all_image: Tensor, all_text: Tensor, all_tau: Tensor, **values: Tensor) -> Tensor:
        batch = Batch(all_image, all_text, all_tau, all_image, all_text, all_tau)
        vars(batch).update(values)
        return super()._train(batch)

    @property
    def can_capture(self) -> bool:  # type: ignore[override]
        return self.optimizer_name == "adagrad" and not self.npn_joint

    def capture_state(self) -> tuple[Any, ...] | None:
        if self.active < self.capacity or self._restarts:
            return None
        return self.network.optimizer, self.surrogate, self.keys

    def capture(self, batch: Batch) -> None:
        self._captured = super()._train(batch.or_zeros()) if self.updates > 0 else None

    def replayed(self, batch: Batch) -> None:
        # Without a restart the updates do not read the ring, which eager steps write before them.
        self.ring.push(batch)
        self.steps += 1
        self.objective_before = None if self._captured is None else self._captured.clone()

    def _updates(self, batch: Batch) -> tuple[Callable[[], Tensor], Callable[[], None]]:
        keys, network = self._keys(batch.keys), self.network
        arguments = batch, self.objective, self.surrogate, self.eps
        options: dict[str, Any] = dict(
            active=self.active, own_active=self.ring.own_active, split=self.split, counts=self._counts(batch), keys=keys
        )
        gradient = network.gradients["weight"][:, : self.ring.own_active]
        fused = self._kernels() if self.active == self.capacity else None
        if fused is None:
            step = PrototypeGradient(*arguments, **options)
            return lambda: step.write(gradient, *self._active_prototypes()), network.step
        prototypes, lengths = self._active_prototypes()
        update = fused.FusedPrototypeUpdate(*arguments, lengths=lengths, **options)
        state, group = network.optimizer.state[self.weight], network.optimizer.param_groups[0]

        def make_step() -> None:
            state["step"] += 1
            update.descend(gradient, prototypes, state["sum"], group["lr"], group["weight_decay"], group["eps"])

        return lambda: update.write_in_directions(gradient, prototypes), make_step

    def _kernels(self) -> ModuleType | None:
        """The module `fused_prototypes`, if it has the updates, of all prototypes."""
        if self.split or not self._allows_kernels:
            return None
        return fused_prototypes(self.weight, self.kernels, self.objective)

    @property
    def _allows_kernels(self) -> bool:
        return self.capacity <= MOST_PROTOTYPES and self.can_capture and is_linear(self.surrogate)

    def _active_prototypes(self) -> tuple[Tensor, Tensor]:
        """This process's prototypes in use, (2, k, d), and their norms, (2, k), with 1 in place of 0."""
        prototypes = self.weight[:, : self.ring.own_active]
        lengths = prototypes.norm(dim=2)
        return prototypes, lengths + (lengths == 0)

    def _keys(self, anchors: Tensor | None) -> Keys | None:
        """Keys of the anchors and of this process's prototypes in use, or None if either has none."""
        return None if anchors is None or self.keys is None else (anchors, self.keys[: self.ring.own_active])

    def _counts(self, batch: Batch) -> Tensor | int:
        """Number of prototypes with another key than the anchor's, for each anchor of the global batch, (B,); of all
        prototypes where there are no keys."""
        keys = self._keys(batch.keys)
        if keys is None:
            return self.active
        same = number_of_equals(*keys)
        if self.split:
            dist.all_reduce(same)
        return (self.active - same).to(batch.all_positives)

    def forward(self, batch: Batch, updated: Any = None) -> Tensor:
        if self.active == 0:
            return batch.log_batch
        prototypes, lengths = self._active_prototypes()
        inputs = (batch.image, batch.text, batch.positives, batch.tau)
        if self.split:
            keys = self._keys(batch.keys)
            log_total = ShardedLogSum.apply(*inputs, batch, prototypes, lengths, self.surrogate, keys)
        else:
            keys = self._keys(None if batch.keys is None else batch.keys[batch.local])
            log_total = log_sum(*inputs, prototypes, self.surrogate, lengths, keys=keys)
        counts = self._counts(batch)
        if isinstance(counts, Tensor):
            counts = counts[batch.local]
        return log_mean(log_total, counts, self.eps, batch.log_batch)

    def diagnostics(self, log_batch: Tensor, alpha: Tensor) -> dict[str, Tensor]:
        return {**super().diagnostics(log_batch, alpha), "prototypes": torch.tensor(float(self.active))}

    def _state(self) -> dict[str, Tensor]:
        state = super()._state()
        if state:
            state |= self.ring.state() | ({} if self.keys is None else {"keys": self.keys})
        return state

    def full_state(self) -> dict[str, Tensor]:
        local_state = self._state()
        state: dict[str, Tensor | None] = {**local_state}
        for name, value in local_state.items():
            if (dim := self._split_dim(value)) is not None:
                gathered = gather_rows(value.movedim(dim, 0), self.capacity, chunk_rows=self.capacity)
                state[name] = None if gathered is None else gathered.movedim(0, dim).contiguous()
        return on_first(state)

    def load_full_state(self, state: dict[str, Tensor]) -> None:
        state = dict(state)
        for name, value in state.items():
            if (dim := self._split_dim(value)) is not None:
                state[name] = value.movedim(dim, 0)[rank() :: world_size()].movedim(0, dim).contiguous()
        super().load_full_state(state)
        if state:
            self.ring.restore(state)
            keys = state.get("keys")
            self.keys = None if keys is None else keys.to(self.weight.device, copy=True)

    def _split_dim(self, value: Tensor) -> int | None:
        """The dimension of a tensor of the state, keys (m,) or (2, m, d), along which the prototypes are split."""
        return {1: 0, 3: 1}.get(value.dim()) if self.split else None
