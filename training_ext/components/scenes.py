"""Generated scenes, and their zero-shot classification during training, as OpenCLIP has it for ImageNet."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations_with_replacement
from typing import Any

import torch
from open_clip import build_zero_shot_classifier, get_input_dtype
from open_clip_train.precision import get_autocast

from open_clip_ext.data.scenes import BACKGROUNDS, COLOURS, Scene, describe_scene
from open_clip_ext.options import option
from training_ext.core.component import Component
from training_ext.core.epoch import Evaluation
from training_ext.core.rows import pair_of
from training_ext.core.seam import TRAIN_DATA, VAL_DATA, Seam
from training_ext.data.metrics import SCENES, is_due
from training_ext.data.scenes import shapes_dataset
from training_ext.openclip.hosts import taken

# The 180 classes: the colours of the two objects, in any order, and the background.
KINDS = tuple((*pair, ground) for pair in combinations_with_replacement(sorted(COLOURS), 2) for ground in BACKGROUNDS)
CAPTIONS = 16  # per class, whose mean embedding is its classifier


def kind_of(scene: Scene) -> tuple[str, str, str]:
    """The class of a scene, an entry of `KINDS`."""
    first, second = sorted((scene.first.colour, scene.second.colour))
    return first, second, scene.background


def example(kind: tuple[str, str, str], number: int) -> str:
    """A caption for this class, with the shapes, sizes, places and words of scene `number`."""
    colours = kind[:2] if number % 2 else kind[1::-1]
    scene = describe_scene(0, number)
    first, second = (replace(thing, colour=c) for thing, c in zip((scene.first, scene.second), colours, strict=True))
    return replace(scene, first=first, second=second, background=kind[2]).caption


def classify_scenes(model: torch.nn.Module, dataloader: Any, args: Namespace, tokenizer: Any) -> dict[str, float]:
    """Top-1 accuracy in [0, 1] over the 180 classes `KINDS`; chance is 1/180.

    Args:
        model: the CLIP model without wrappers, in evaluation mode.
        dataloader: loader over `Scenes`, in their order.
    """
    device = torch.device(args.device)
    scenes = dataloader.dataset
    right = seen = 0
    with torch.inference_mode(), get_autocast(args.precision, **taken(get_autocast, device_type=device.type))():
        classifier = build_zero_shot_classifier(
            model,
            tokenizer=tokenizer,
            classnames=KINDS,
            templates=[lambda kind, number=number: example(kind, number) for number in range(CAPTIONS)],
            num_classes_per_batch=30,
            device=device,
        )
        for batch in dataloader:
            images, _ = pair_of(batch)
            images = images.to(device=device, dtype=get_input_dtype(args.precision), non_blocking=True)
            for kind in (model(image=images)["image_features"] @ classifier).argmax(dim=1).tolist():
                right += KINDS[kind] == kind_of(scenes.scene(seen))
                seen += 1
    return {SCENES: right / seen}


def generated(scope: str) -> Seam:
    return Seam(
        "open_clip_train.data", "SyntheticDataset",
        why="generated scenes stand in for it",
        contract="get_synthetic_dataset builds SyntheticDataset(transform=, image_size=, dataset_size=, tokenizer=)",
        replacement=lambda original, component: shapes_dataset(component.args, scope == TRAIN_DATA),
        used_by="open_clip_train.data:get_synthetic_dataset",
        scopes=(scope,),
        layer=-1,
    )  # fmt: skip


def of_shapes(original: Callable, path: str, kind: str) -> Callable:
    """`get_dataset_fn` that knows the kind shapes."""
    return original(path, "synthetic" if kind == "shapes" else kind)


class GeneratedScenes(Component):
    """The data of `--dataset-type shapes`, and zero-shot classification of the validation scenes."""

    name = "scenes"
    topic = "data"
    condition = "--dataset-type shapes"

    shapes_seed: int | None = option(
        None, "seed of the scenes of --dataset-type shapes (default: 0)",
        valid=lambda seed: 0 <= seed < 2**63, expected="at least 0 and below 2**63",
    )  # fmt: skip
    shapes_shifted: bool = option(
        False, "train on scenes in other colours and with noisy captions; the validation scenes are the same"
    )

    seams = (
        Seam(
            "open_clip_train.data", "get_dataset_fn",
            why="builds generated scenes as OpenCLIP's synthetic data",
            contract="get_data builds each data set by get_dataset_fn(path, type)(args, transform, is_train=, "
            "tokenizer=)",
            replacement=lambda original, component: partial(of_shapes, original),
            used_by="open_clip_train.data:get_data",
            layer=-1,
        ),
        generated(TRAIN_DATA),
        generated(VAL_DATA),
    )  # fmt: skip

    def wanted(self) -> bool:
        return self.args.dataset_type == "shapes"

    def metrics(self) -> Sequence[str]:
        return (SCENES,) if self.args.val_data else ()

    def scores(self, evaluation: Evaluation) -> dict[str, float]:
        if self.plan.shards_model or "val" not in evaluation.data or not is_due(self.args, evaluation.epoch):
            return {}
        return classify_scenes(evaluation.model, evaluation.data["val"].dataloader, self.args, evaluation.tokenizer)
