"""Zero-shot classification of generated scenes, beside OpenCLIP's of ImageNet."""

from typing import Any

import torch
from open_clip import build_zero_shot_classifier, get_input_dtype
from open_clip_train.precision import get_autocast
from torch.nn.functional import normalize

from open_clip_ext.data.scenes import BACKGROUNDS, COLOURS, OBJECT_NAMES, RELATIONS, SIZES
from open_clip_ext.data.scenes import TEMPLATES as CAPTIONS

METRICS = OBJECT, COLOUR = "shapes-zeroshot-object-top1", "shapes-zeroshot-colour-top1"


def _templates(number: int = 32) -> list[str]:
    """Captions as scenes have them, one object's name left open and the rest spread over what there is."""
    backgrounds, relations, sizes = list(BACKGROUNDS), list(RELATIONS.values()), list(SIZES)
    templates = []
    for i in range(number):
        objects = [f"a {sizes[i // 2 % 2]} {{}}", f"a {sizes[i // 4 % 2]} {OBJECT_NAMES[27 * i % len(OBJECT_NAMES)]}"]
        first, second = objects if i % 2 else reversed(objects)
        relation, background = relations[i // 8 % 4], backgrounds[i % 5]
        caption = CAPTIONS[i // 3 % 4]
        templates.append(caption.format(first=first, second=second, relation=relation, background=background))
    return templates


def classify_scenes(model: torch.nn.Module, dataloader: Any, args, tokenizer: Any) -> dict[str, float]:
    """Share of the scenes of which the most similar of the 64 names ("red circle") is that of one of their two objects,
    and of which the most similar of the 8 colours is.

    A name's embedding is the mean over captions that mention it, a colour's the mean over its names; a guess at a name
    is right in 1 of 32 cases, at a colour in nearly 1 of 4.

    Args:
        model: the CLIP model without wrappers, in evaluation mode.
        dataloader: of `Scenes`, in their order.
    """
    device = torch.device(args.device)
    autocast = get_autocast(args.precision, device_type=device.type)
    scenes = dataloader.dataset
    object_right = colour_right = seen = 0
    colour_of = torch.tensor([list(COLOURS).index(name.split()[0]) for name in OBJECT_NAMES], device=device)
    with torch.inference_mode(), autocast():
        classifier = build_zero_shot_classifier(
            model,
            tokenizer=tokenizer,
            classnames=OBJECT_NAMES,
            templates=[template.format for template in _templates()],
            num_classes_per_batch=None,
            device=device,
        )
        colours = normalize(torch.stack([classifier[:, colour_of == i].mean(dim=1) for i in range(len(COLOURS))]))
        for images, _ in dataloader:
            images = images.to(device=device, dtype=get_input_dtype(args.precision), non_blocking=True)
            features = model(image=images)["image_features"]
            named = (features @ classifier).argmax(dim=1).tolist()
            coloured = (features @ colours.T).argmax(dim=1).tolist()
            for name, colour in zip(named, coloured, strict=True):
                classes = scenes.scene(seen).object_classes
                object_right += name in classes
                colour_right += colour in [colour_of[i] for i in classes]
                seen += 1
    return {OBJECT: object_right / seen, COLOUR: colour_right / seen}
