"""Zero-shot accuracy of a checkpoint on a folder in CLIP_benchmark's format."""

from pathlib import Path

import open_clip
import torch

import open_clip_ext
from training_ext.tools.evaluation.inference import Encoder
from training_ext.tools.evaluation.models import find_checkpoint, load_model
from training_ext.tools.evaluation.scores import open_task, score
from training_ext.tools.evaluation.tasks import own_task

open_clip.add_model_config(Path(open_clip_ext.__file__).parent / "model_configs")


def accuracy(name: str, checkpoint: Path, folder: Path) -> float:
    """Fraction of the images whose own class has the nearest mean caption embedding, in [0, 1].

    Args:
        name: OpenCLIP's name of the model.
        folder: has classnames.txt, zeroshot_classification_templates.txt and test/0.tar.
    """
    found = find_checkpoint(str(checkpoint), name)
    model, transform, tokenizer = load_model(found)
    encoder = Encoder(model, transform, tokenizer, torch.device("cpu"), batch_size=256)
    task = own_task(str(folder))
    scored = score(encoder, task, open_task(task, str(folder)))
    assert scored is not None  # None occurs only on processes other than 0
    return scored.metrics["acc1"]
