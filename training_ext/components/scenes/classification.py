"""Zero-shot classification of generated scenes by their colours."""

from argparse import Namespace
from dataclasses import replace
from itertools import combinations_with_replacement
from typing import Any

import torch
from open_clip import build_zero_shot_classifier, get_input_dtype
from open_clip_train.precision import get_autocast

from open_clip_ext.data.scenes import BACKGROUNDS, COLOURS, Scene, describe_scene
from training_ext.core.rows import pair_of
from training_ext.data.metrics import SCENES
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
