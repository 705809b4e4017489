"""A training with its data as bytes in the GPU's memory, as docs/custom-loop.md has it, by a command's flags.

The forward and backward pass of the towers are CUDA graphs: a step of so small a model takes the time of its launches.
"""

from __future__ import annotations

import argparse
import io
import lzma
import math
import shlex
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch
from torch import Tensor, nn

import open_clip_ext
from open_clip_ext.factory import all_options, setting_names
from open_clip_ext.retrieval import validation_metrics

Data = dict[str, Tensor]
ZERO_SHOT = "zeroshot-characters"


def read_data(path: Path) -> Data:
    arrays = np.load(io.BytesIO(lzma.decompress(path.read_bytes())))
    return {name: torch.from_numpy(arrays[name]) for name in arrays}


def settings(flags: str) -> argparse.Namespace:
    """What a training reads of a command's flags; `loss_options` has those of the loss."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--model", "--loss", "--precision"):
        parser.add_argument(name, required=True)
    for name in ("--batch-size", "--epochs", "--seed"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--warmup", type=int, default=0)
    for name in ("--lr", "--wd"):
        parser.add_argument(name, type=float, required=True)
    for option in all_options():
        if option.type is bool:
            parser.add_argument(option.flag, action="store_true", default=None)
        else:
            parser.add_argument(option.flag, type=option.type)
    known, _ = parser.parse_known_args(shlex.split(flags))
    of_loss = set(setting_names()) - {"lr_tau"}
    known.loss_options = {name: value for name, value in vars(known).items() if name in of_loss and value is not None}
    return known


class Towers(nn.Module):
    """From rows of the data to embeddings and 1 / tau, without anything that waits for the device."""

    def __init__(self, model: nn.Module, data: Data, low: bool):
        super().__init__()
        self.model, self.low = model, low
        self.images, self.tokens = data["train_images"], data["train_tokens"]
        device = self.images.device
        constants = open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD
        self.mean, self.std = (torch.tensor(some, device=device).view(3, 1, 1) for some in constants)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=self.low, cache_enabled=False):
            return self.model(self.pixels(self.images[rows]), self.tokens[rows])

    def pixels(self, shades: Tensor) -> Tensor:
        """Normalized pictures, (n, 3, 32, 32), of grey bytes, (n, 32, 32)."""
        return (shades[:, None] / 255 - self.mean) / self.std

    @torch.no_grad()
    def encode(self, images: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings of pictures, and of captions, in float32."""
        model = self.model.eval()
        return model.encode_image(self.pixels(images), normalize=True), model.encode_text(tokens, normalize=True)


class Training:
    """A training of the docs' own loop (docs/custom-loop.md): OpenCLIP's optimizer and schedule, an order by seed."""

    def __init__(self, data: Data, flags: argparse.Namespace, graphs: bool = True):
        self.flags = flags
        self.num, self.device = len(data["train_images"]), data["train_images"].device
        self.steps_per_epoch = self.num // flags.batch_size
        self.steps = flags.epochs * self.steps_per_epoch
        torch.manual_seed(flags.seed)
        model = open_clip.create_model(flags.model, device=self.device)
        self.towers = Towers(model, data, low=flags.precision == "amp_bf16")
        self.loss = open_clip_ext.create_loss(
            flags.loss, num_samples=self.num, epochs=flags.epochs, steps_per_epoch=self.steps_per_epoch,
            device=self.device, **flags.loss_options,
        )
        self.logit_scale = model.logit_scale
        named = [(name, weight) for name, weight in model.named_parameters() if weight is not model.logit_scale]
        plain = [weight for name, weight in named if weight.ndim < 2 or "bias" in name or "ln" in name]
        decayed = [weight for name, weight in named if not any(weight is other for other in plain)]
        groups: list[dict[str, Any]] = [
            {"params": plain, "peak": flags.lr, "weight_decay": 0.0},
            {"params": decayed, "peak": flags.lr, "weight_decay": flags.wd},
            {"params": [model.logit_scale], "peak": flags.lr_tau or flags.lr, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=flags.lr, betas=(0.9, 0.98), eps=1e-6, fused=True)
        self.forward = self.towers
        if graphs:
            rows = torch.arange(flags.batch_size, device=self.device)
            self.forward = torch.cuda.make_graphed_callables(self.towers, (rows,))

    def run(self) -> Iterator[Tensor]:
        """Make the steps; yields 1 / tau after each."""
        generator, done = torch.Generator().manual_seed(self.flags.seed), 0
        for epoch in range(self.flags.epochs):
            self.loss.set_epoch(epoch)
            order = torch.randperm(self.num, generator=generator).to(self.device)
            for rows in order.split(self.flags.batch_size)[: self.steps_per_epoch]:
                for group in self.optimizer.param_groups:
                    group["lr"] = group["peak"] * self.schedule(done)
                # The graph's next call overwrites its own.
                image, text, scale = (tensor.clone() for tensor in self.forward(rows))
                value = self.loss(image, text, scale, index=rows if self.loss.needs_index else None)
                self.optimizer.zero_grad()
                value.backward()
                self.optimizer.step()
                with torch.no_grad():
                    self.logit_scale.clamp_(0, math.log(100))
                done += 1
                yield scale.detach()
            self.loss.raise_if_not_finite()

    def schedule(self, done: int) -> float:
        """OpenCLIP's cosine after a warm-up, as a factor of the peak."""
        if done < self.flags.warmup:
            return (done + 1) / self.flags.warmup
        return 0.5 * (1 + math.cos(math.pi * (done - self.flags.warmup) / (self.steps - self.flags.warmup)))


def train(data: Data, flags: str, gallery: str) -> dict[str, Any]:
    """Make a run and score it: what its line in the results has of it."""
    begin, cpu_begin = time.monotonic(), time.process_time()
    training = Training(data, settings(flags), graphs=data["train_images"].is_cuda)
    scales, diverged = deque[Tensor](), None
    try:
        scales = deque(training.run(), training.steps_per_epoch)
    except open_clip_ext.NonFiniteError as error:
        diverged = str(error)
    metrics, zero_shot = {}, {}
    if diverged is None:
        encode = training.towers.encode
        metrics = validation_metrics(*encode(data[f"{gallery}_images"], data[f"{gallery}_tokens"]))
        zero_shot = {ZERO_SHOT: accuracy(training.towers, data)}
    return {
        "by_epoch": [{"epoch": training.flags.epochs, **metrics}],
        "tau": float(torch.stack([*scales]).reciprocal().mean()) if scales else None,
        "zero_shot": zero_shot,
        "diverged": diverged,
        "wall_seconds": round(time.monotonic() - begin, 1),
        "cpu_seconds": round(time.process_time() - cpu_begin, 1),
    }


def accuracy(towers: Towers, data: Data) -> float:
    """Fraction of the pictures whose own class has the nearest mean caption embedding, as zero_shot.py has it."""
    classes = data["zeroshot_tokens"]  # (classes, templates, 24)
    images, texts = towers.encode(data["zeroshot_images"], classes.flatten(0, 1))
    means = texts.view(*classes.shape[:2], -1).mean(dim=1)
    nearest = (images @ nn.functional.normalize(means, dim=1).T).argmax(dim=1)
    return float((nearest == data["zeroshot_labels"]).float().mean())
