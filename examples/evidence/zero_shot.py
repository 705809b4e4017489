"""Zero-shot accuracy of a checkpoint on a folder in the form that CLIP_benchmark reads."""

from argparse import Namespace
from pathlib import Path

import open_clip
import torch

import open_clip_ext
from training_ext.evaluation.folders import open_own_classes
from training_ext.evaluation.inference import Encoder
from training_ext.evaluation.models import find_checkpoint, load_model
from training_ext.evaluation.own_classes import score_own_classes

open_clip.add_model_config(Path(open_clip_ext.__file__).parent / "model_configs")


def accuracy(name: str, checkpoint: Path, folder: Path) -> float:
    """Share of the pictures that are nearest to the mean caption of their own class, in [0, 1].

    Args:
        name: OpenCLIP's name of the model.
        folder: has classnames.txt, zeroshot_classification_templates.txt and test/0.tar.
    """
    found = find_checkpoint(str(checkpoint), name)
    model, transform, tokenizer = load_model(found, Namespace(precision="fp32", device="cpu"))
    encoder = Encoder(model, transform, tokenizer, torch.device("cpu"), batch_size=256)
    scores = score_own_classes(encoder, open_own_classes("--data", str(folder)))
    assert scores is not None  # as it is on one process
    return scores.top1
