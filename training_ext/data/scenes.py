"""The generated scenes of `--dataset-type shapes` as a data set of OpenCLIP's."""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from open_clip_ext.data import Scenes
from open_clip_ext.errors import InputError
from training_ext.core import hosts

HELD_OUT_SCENES = 1 << 40  # first row of the validation scenes, beyond any training set


class HostScenes(Scenes):
    """Generated scenes as samples of the host."""

    def __getitem__(self, i: int) -> Any:
        image, tokens = super().__getitem__(i)
        return {"image": image, "text": tokens} if hosts.installed().HAS_TASKS else (image, tokens)


def set_paths(args: Namespace) -> None:
    """Give generated scenes paths, which they have none of, since OpenCLIP trains and evaluates only with a path.

    Raises:
        InputError: a path is given, or a number of scenes is missing or out of range.
    """
    args.shapes_seed = getattr(args, "shapes_seed", None) or 0
    args.shapes_shifted = getattr(args, "shapes_shifted", None) or False
    if args.train_num_samples is None and args.val_num_samples is None:
        raise InputError("--dataset-type shapes needs a number of scenes", "--train-num-samples")
    for split in ("train", "val"):
        path, scenes = getattr(args, f"{split}_data"), getattr(args, f"{split}_num_samples")
        if path is not None:
            raise InputError(
                f"{path!r} with --dataset-type shapes, which draws its scenes; leave it out and give "
                f"--{split}-num-samples",
                f"--{split}-data",
            )
        if scenes is not None and not 1 <= scenes <= HELD_OUT_SCENES:
            raise InputError(f"{scenes} scenes; give from 1 to {HELD_OUT_SCENES}", f"--{split}-num-samples")
        setattr(args, f"{split}_data", "shapes" if scenes else None)


def shapes_dataset(
    args: Namespace, is_train: bool, transform: Callable, image_size: Any = 64, *, tokenizer: Callable, **unused: Any
) -> Scenes:
    """What OpenCLIP builds in the place of its SyntheticDataset."""
    return HostScenes(
        num_samples=args.train_num_samples if is_train else args.val_num_samples,
        seed=args.shapes_seed,
        image_size=max(image_size) if isinstance(image_size, (tuple, list)) else int(image_size),
        first_row=0 if is_train else HELD_OUT_SCENES,
        shifted=is_train and bool(args.shapes_shifted),
        transform=transform,
        tokenizer=tokenizer,
    )
