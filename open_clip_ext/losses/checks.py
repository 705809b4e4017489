"""Checks of a loss's inputs; problems of values on the device are recorded there, so that no step waits for it."""

import logging
import math
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from open_clip_ext.distributed import all_gather, rank, values_where_changed, world_size

FEATURES = ("image_features", "text_features", "dist_image_features", "dist_text_features")
NOT_UNIT_VECTORS = tuple(f"{name} must be unit vectors; normalize them along dim 1" for name in FEATURES)
MOST_NOTED = 1024  # after which a loop that does not ask for problems waits for the device once
NORM_ERROR = 0.02  # largest | |x| - 1 | of a unit vector; float16 and bfloat16 round by less
LEAST_USUAL_SCALE = 4.7  # OpenCLIP clamps its parameter to log(100) = 4.6, so a smaller scale is probably a logarithm
MOST_SCALE = 1e6  # above some 1e7 a logit's rounding to float32 is above 1, and exponentials of it overflow


class FirstSteps:
    """The first step with a problem. What the steps note stays on the device until `problem` reads it."""

    def __init__(self) -> None:
        self._noted: list[tuple[tuple[str, ...], int, Tensor]] = []
        self._first: tuple[int, str] | None = None  # of what was read

    def note(self, names: tuple[str, ...], step: int, problems: Tensor) -> None:
        """Record the problems of a step: for each of `names`, or the first few, a bool, or a number that is not finite
        where there is one. The tensor may not be overwritten later."""
        self._noted.append((names, step, problems.detach()))
        if len(self._noted) == MOST_NOTED:
            self.problem()

    def problem(self) -> tuple[int, str] | None:
        """Step and name of the first problem, or None. Waits for the device."""
        kinds: dict[Any, list[tuple[tuple[str, ...], int, Tensor]]] = {}
        for note in self._noted:
            kinds.setdefault((note[2].device, note[2].dtype), []).append(note)
        found = [] if self._first is None else [self._first]
        for notes in kinds.values():
            values = torch.cat([problems for *_, problems in notes])
            are_wrong = values if values.dtype == torch.bool else ~(values < math.inf)
            labels = [(step, name) for names, step, problems in notes for name in names[: len(problems)]]
            found += [label for label, is_wrong in zip(labels, are_wrong.tolist(), strict=True) if is_wrong]
        self._noted, self._first = [], min(found, key=lambda label: label[0], default=None)
        return self._first


@torch.no_grad()
def are_not_unit_vectors(*features: Tensor) -> Tensor:
    """For each of `features`, (b, d), whether a row's norm differs from 1, bool; False where one is NaN."""
    dtype = reduce(torch.promote_types, (vectors.dtype for vectors in features), torch.float32)
    norms = torch.empty(len(features), len(features[0]), dtype=dtype, device=features[0].device)
    for vectors, out in zip(features, norms, strict=True):
        torch.linalg.vector_norm(vectors, dim=1, dtype=dtype, out=out)
    return torch.linalg.vector_norm(norms.sub_(1), math.inf, dim=1) > NORM_ERROR


def check_features(**features: Tensor) -> None:
    """Raise ValueError unless both tensors are floating point and (b, d)."""
    for name, vectors in features.items():
        if not vectors.is_floating_point():
            raise ValueError(f"{name} must be floating point; got {vectors.dtype}")
    image, text = features.values()
    if image.dim() != 2 or image.shape != text.shape:
        names = " and ".join(features)
        raise ValueError(f"{names} must both be (b, d); got {tuple(image.shape)} and {tuple(text.shape)}")


def check_int64(name: str, values: Any, batch: int) -> None:
    """Raise ValueError unless `values` is int64, (batch,)."""
    if not isinstance(values, Tensor):
        raise ValueError(f"{name} must be an int64 tensor of shape ({batch},); got {type(values).__name__}")
    if values.dtype != torch.int64 or tuple(values.shape) != (batch,):
        raise ValueError(f"{name} must be int64 of shape ({batch},); got {values.dtype} of {tuple(values.shape)}")


def checked_keys(loss: Any, batch: int, **arguments: Tensor | None) -> dict[str, Tensor]:
    """The keys that were given, by name; raise ValueError if the loss does not take one, or for two of them."""
    takes = {"key": loss.takes_keys, "positive_key": loss.takes_positives}
    keys = {name: values for name, values in arguments.items() if values is not None}
    for name, values in keys.items():
        if not takes[name]:
            raise ValueError(f"{name}: this {loss.name} loss, with its settings, takes no keys")
        check_int64(name, values, batch)
    if len(keys) == 2:
        raise ValueError("positive_key: with a key, too; give one of the two")
    return keys


def check_batches(features: Tensor, before: int | None, index: Tensor | None) -> None:
    """Raise ValueError if processes have different batch sizes, with which gathering would abort (gloo) or hang (nccl);
    or in training the same rows, as under tensor parallelism: a pair's copy would be its negative.

    Args:
        before: the size of all processes in the step before, if known; then nothing is sent unless it has changed.
        index: rows of the samples in training, if known.
    """
    size = len(features)
    if world_size() == 1 or size == before or features.is_meta:  # a meta tensor has no value to compare
        return
    if before is None:
        sizes = all_gather(torch.tensor([size], device=features.device)).tolist()
    else:
        changed = f"image_features: process {rank()} has a batch of {size} pairs after {before}"
        try:
            sizes = values_where_changed("batch", size, f"{changed}, unlike process {{}}; give each as many")
        except RuntimeError as error:
            raise ValueError(str(error)) from None
    if len(set(sizes)) > 1:
        raise ValueError(f"image_features: the processes have batches of {sizes} pairs; give each as many")
    if before is None and index is not None and torch.is_grad_enabled() and size > 1:  # one alone may be drawn twice
        rows = all_gather(index.to(features.device)).view(world_size(), size)
        repeated = torch.stack([(rows == own).all(dim=1).sum() > 1 for own in rows])
        if repeated.any():
            raise ValueError(
                f"index: processes {repeated.nonzero()[:, 0].tolist()} have the same rows; each process of the default "
                "group, also with tensor or context parallelism, needs pairs of its own"
            )


def check_logit_scale(scale: Tensor, warns: bool, may_wait: bool) -> None:
    """Raise ValueError unless 1 / tau is one number, and in range; on a GPU only where one may wait for it.

    Args:
        warns: whether to warn of a number that looks like its logarithm.
    """
    if scale.numel() != 1:
        raise ValueError(f"logit_scale must be one number, 1 / tau; got shape {tuple(scale.shape)}")
    if warns and 0 < scale.item() < LEAST_USUAL_SCALE:
        logging.warning(
            f"logit_scale is {scale.item():.3g}, a temperature of {1 / scale.item():.2g}; if it is the logarithm, as a "
            "parameter usually is, pass logit_scale.exp()"
        )
    if (may_wait or scale.device.type == "cpu") and (scale.item() <= 0 or MOST_SCALE < scale.item() < math.inf):
        raise ValueError(f"logit_scale must be > 0, as 1 / tau, and at most {MOST_SCALE:g}; got {scale.item():g}")


def check_rows(index: Tensor, num_samples: int) -> None:
    """Raise ValueError unless every row is in [0, num_samples). Waits for the device."""
    low, high = index.min().item(), index.max().item()
    if low < 0 or high >= num_samples:
        raise ValueError(f"index: rows must lie in [0, {num_samples}); got {low if low < 0 else high}")


def checked_reference(
    needed: bool, like: Tensor, image: Tensor | None, text: Tensor | None
) -> tuple[Tensor, ...]:
    """Return a reference model's features, or (); raise ValueError if they are missing, of wrong shape, or not used.

    Args:
        like: the image features of the model in training, of as many pairs, whose dtype the result has.
    """
    if (image is None) != (text is None) or (image is None) == needed:
        needs = "needs both" if needed else "has no use for either"
        raise ValueError(f"dist_image_features, dist_text_features: this loss {needs}, a reference's unit vectors")
    if image is None or text is None:
        return ()
    if image.dim() != 2 or image.shape != text.shape or len(image) != len(like):
        raise ValueError(
            f"dist_image_features and dist_text_features must both be ({len(like)}, d'); got {tuple(image.shape)} "
            f"and {tuple(text.shape)}"
        )
    return image.detach().to(like), text.detach().to(like)
