"""Zero-shot accuracy of a checkpoint on a folder in CLIP_benchmark's format, and its retrieval on shards."""

from argparse import Namespace
from pathlib import Path
from statistics import mean

import open_clip
import torch

import open_clip_ext
from training_ext.scoring.inference import Encoder
from training_ext.scoring.scores import open_task, score
from training_ext.scoring.tasks import OWN, OWN_PAIRS, own_task
from training_ext.tools.evaluation.models import find_checkpoint, load_model

open_clip.add_model_config(Path(open_clip_ext.__file__).parent / "model_configs")


def accuracy(name: str, checkpoint: Path, folder: Path) -> float:
    """Fraction of the images whose own class has the nearest mean caption embedding, in [0, 1].

    Args:
        name: OpenCLIP's name of the model.
        folder: has classnames.txt, zeroshot_classification_templates.txt and test/0.tar.
    """
    return scores(name, checkpoint, str(folder), OWN)["acc1"]


def recall(name: str, checkpoint: Path, shards: str, k: int) -> float:
    """R@k of captioned images, mean of both directions, in [0, 1]."""
    found = scores(name, checkpoint, shards, OWN_PAIRS)
    return mean(found[f"{way}_retrieval_recall@{k}"] for way in ("image", "text"))


def scores(name: str, checkpoint: Path, data: str, kind: str) -> dict[str, float]:
    model, transform, tokenizer = load_model(find_checkpoint(str(checkpoint), name))
    encoder = Encoder(model, transform, tokenizer, torch.device("cpu"), batch_size=256)
    task = own_task(data, kind)
    scored = score(encoder, task, open_task(task, data, Namespace(val_data=data)))
    assert scored is not None  # None occurs only on processes other than 0
    return scored.metrics
