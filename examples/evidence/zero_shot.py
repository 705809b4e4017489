"""Zero-shot accuracy of a checkpoint on a folder in the form that CLIP_benchmark reads."""

from pathlib import Path

import open_clip
import torch
import webdataset as wds

import open_clip_ext
from training_ext.loading import decode_pairs, load_plain

open_clip.add_model_config(Path(open_clip_ext.__file__).parent / "model_configs")


def accuracy(name: str, checkpoint: Path, folder: Path) -> float:
    """Share of the pictures that are nearest to the mean caption of their own class, in [0, 1].

    Args:
        name: OpenCLIP's name of the model.
        folder: has classnames.txt, zeroshot_classification_templates.txt and test/0.tar.
    """
    model, _, transform = open_clip.create_model_and_transforms(name)
    weights = load_plain(checkpoint)["state_dict"]
    weights.pop("logit_bias", None)  # of siglip, the same for all classes
    model.load_state_dict(weights)
    model.eval()
    classes = (folder / "classnames.txt").read_text().splitlines()
    templates = (folder / "zeroshot_classification_templates.txt").read_text().splitlines()
    right, seen = 0, 0
    with torch.inference_mode():
        classifier = open_clip.build_zero_shot_classifier(
            model,
            tokenizer=open_clip.get_tokenizer(name),
            classnames=classes,
            templates=[lambda c, template=template: template.format(c=c) for template in templates],
        )
        tar = wds.WebDataset(str(folder / "test" / "0.tar"), shardshuffle=False)
        samples = tar.compose(decode_pairs(wds.decode)("pil")).to_tuple("png", "cls")
        for batch in samples.batched(256, collation_fn=list, partial=True):
            images = torch.stack([transform(image) for image, _ in batch])
            answers = (model.encode_image(images, normalize=True) @ classifier).argmax(dim=1).tolist()
            right += sum(answer == int(label) for answer, (_, label) in zip(answers, batch, strict=True))
            seen += len(batch)
    return right / seen
