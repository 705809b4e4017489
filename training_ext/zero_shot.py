"""Zero-shot classification of generated scenes, beside OpenCLIP's of ImageNet."""

from argparse import Namespace
from dataclasses import replace
from itertools import combinations_with_replacement
from typing import Any

import torch
from open_clip import build_zero_shot_classifier, get_input_dtype
from open_clip_train.precision import get_autocast

from open_clip_ext.data.scenes import BACKGROUNDS, COLOURS, Scene, describe_scene
from training_ext.hosts import host, taken

METRIC = "shapes-zeroshot-top1"
# 180 kinds of scenes: the colours of the two objects, in any order, and the background.
KINDS = tuple((*pair, ground) for pair in combinations_with_replacement(sorted(COLOURS), 2) for ground in BACKGROUNDS)
CAPTIONS = 16  # of each kind, whose mean embedding stands for it


def kind_of(scene: Scene) -> tuple[str, str, str]:
    """The entry of `KINDS` that a scene is of."""
    first, second = sorted((scene.first.colour, scene.second.colour))
    return first, second, scene.background


def example(kind: tuple[str, str, str], number: int) -> str:
    """A caption of a scene of this kind, the shapes, sizes, places and words those of scene `number`."""
    colours = kind[:2] if number % 2 else kind[1::-1]
    scene = describe_scene(0, number)
    first, second = (replace(thing, colour=c) for thing, c in zip((scene.first, scene.second), colours, strict=True))
    return replace(scene, first=first, second=second, background=kind[2]).caption


def classify_scenes(model: torch.nn.Module, dataloader: Any, args: Namespace, tokenizer: Any) -> dict[str, float]:
    """Share of the scenes that are nearest to their own of the 180 `KINDS`; a guess is right in 1 of 180 cases.

    Args:
        model: the CLIP model without wrappers, in evaluation mode.
        dataloader: of `Scenes`, in their order.
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
            images, _ = host().pair(batch)
            images = images.to(device=device, dtype=get_input_dtype(args.precision), non_blocking=True)
            for kind in (model(image=images)["image_features"] @ classifier).argmax(dim=1).tolist():
                right += KINDS[kind] == kind_of(scenes.scene(seen))
                seen += 1
    return {METRIC: right / seen}
