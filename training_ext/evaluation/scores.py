"""Compute a task's metrics, under DataComp's names, and those of validation pairs, under OpenCLIP's."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from open_clip_ext.errors import InputError
from open_clip_ext.retrieval import retrieval_ranks
from training_ext.evaluation import metrics
from training_ext.evaluation.folders import Candidates, Shards, Source
from training_ext.evaluation.inference import RANKED, Answers, Encoder, associate, classify, retrieve
from training_ext.evaluation.tasks import Task
from training_ext.features.captions import Pictures

RECALLS = (1, 5, 10)
SIDES = ("image_to_text", "text_to_image")
NUM_IMAGES = "num_images"
VALIDATION = (*(f"{side}_{kind}" for side in SIDES for kind in ("R@1", "R@5", "R@10", "mean_rank", "median_rank")),)
ANY_CAPTION = (*(f"{side}_any_R@{k}" for side in SIDES for k in RECALLS),)
Metrics = dict[str, Any]


def open_task(task: Task, folder: str) -> Source:
    """Open the data set of a task.

    Raises:
        InputError: the folder is incomplete, or not of the task's kind.
    """
    source = Candidates("--data", folder) if task.kind == "winogavil" else Shards("--data", folder)
    if task.kind != "winogavil" and (source.type == "retrieval") != (task.kind == "retrieval"):
        raise source.wrong(f"{folder!r} is of type {source.type}, but {task.name} is a {task.kind} task")
    return source


def score(encoder: Encoder, task: Task, source: Source) -> tuple[Metrics, int] | None:
    """Metrics in [0, 1] and number of samples, on process 0; None on the others.

    Raises:
        InputError: the data lack what the task's main metric needs.
    """
    found: Metrics
    if isinstance(source, Candidates):
        similarities = associate(encoder, source, task.name)
        if similarities is None:
            return None
        found, size = association_metrics(similarities, source), len(similarities)
    elif source.type == "retrieval":
        embedded = retrieve(encoder, source, task.name, task.size)
        if embedded is None:
            return None
        found, size = retrieval_metrics(**embedded), len(embedded["image"])
    else:
        answers = classify(encoder, source, task.name, task.size, ranked=max(RANKED, task.top_k))
        if answers is None:
            return None
        found, size = classification_metrics(task, answers, source), len(answers.labels)
    if found.get(task.main_metric) is None:
        raise source.wrong(f"{source.folder!r}: {task.name} has no {task.main_metric}, only {', '.join(found)}")
    return found | {"main_metric": found[task.main_metric]}, size


def classification_metrics(task: Task, answers: Answers, source: Source) -> Metrics:
    if answers.scores is not None:
        return {"mean_average_precision": metrics.mean_average_precision(answers.scores, answers.labels)}
    predicted, labels = answers.ranked[:, 0], answers.labels
    enough = len(source.classes) >= 5
    recall = metrics.mean_per_class_recall(predicted, labels)
    accuracy = metrics.top_k_accuracy(answers.ranked, labels, 1)
    found: Metrics = {
        "acc1": accuracy,
        "acc5": metrics.top_k_accuracy(answers.ranked, labels, 5) if enough else None,
        "mean_per_class_recall": recall,
    }
    if task.macro:
        found |= {
            "acc_avg": accuracy, "recall-macro_all": recall, "F1-macro_all": metrics.macro_f1(predicted, labels),
        }
    if task.group_by:
        found |= group_metrics(task, answers, source)
    return found


def group_metrics(task: Task, answers: Answers, source: Source) -> Metrics:
    """Accuracy of each group that occurs, and of the worst one, under WILDS's names.

    FMoW's region "Other" is included: DataComp's script means to exclude it by name, but compares with group numbers,
    so DataComp's published scores include it.
    """
    if answers.fields is None or answers.fields.shape[1] != len(task.fields):
        raise InputError(
            f"{source.folder!r}: each sample of {task.name} needs an .npy of {len(task.fields)} numbers, "
            f"{', '.join(task.fields)}",
            "--data",
        )
    name = "acc" if task.top_k == 1 else f"acc_top{task.top_k}"
    right = metrics.is_among(answers.ranked, answers.labels, task.top_k)
    found: Metrics = {f"{name}_avg": float(right.mean())}
    for field in task.group_by:
        groups = metrics.by_group(right, answers.fields[:, task.fields.index(field)])
        for group, (value, count) in groups.items():
            found |= {f"{name}_{field}:{group}": value, f"count_{field}:{group}": count}
        worst = "wg" if len(task.group_by) == 1 else f"worst_{field}"
        found[f"{name}_{worst}"] = min(value for value, _ in groups.values())
    return found


def retrieval_metrics(image: NDArray, text: NDArray, image_of_text: NDArray) -> Metrics:
    """Recalls in both directions, under clip_benchmark's names; any of an image's texts counts.

    Args:
        image: (images, d). text: (texts, d).
        image_of_text: (texts,) index of each text's image.
    """
    embeddings = torch.from_numpy(image), torch.from_numpy(text)
    images, texts = retrieval_ranks(*embeddings, torch.from_numpy(image_of_text))
    found: Metrics = {}
    for k in RECALLS:
        found |= {f"image_retrieval_recall@{k}": texts.recall(k), f"text_retrieval_recall@{k}": images.recall(k)}
    return found | {"mean_recall@1": (texts.recall(1) + images.recall(1)) / 2}


def validation_metrics(image: Tensor, text: Tensor, pictures: Pictures | None, device: torch.device) -> Metrics:
    """What OpenCLIP's `get_clip_metrics` gives for pairs, and `ANY_CAPTION` and the number of images.

    Args:
        image: (n, d). text: (n, d).
        pictures: the pairs grouped by image; None: without the recalls that know an image's other captions.
    """
    found: Metrics = {}
    for side, ranks in zip(SIDES, retrieval_ranks(image, text, device=device), strict=True):
        expected = ranks.expected()
        found |= {f"{side}_mean_rank": float(expected.mean()) + 1}
        found |= {f"{side}_median_rank": float(expected.quantile(0.5).floor()) + 1}
        found |= {f"{side}_R@{k}": ranks.recall(k) for k in RECALLS}
    if pictures is None:
        return found
    first, of = torch.from_numpy(pictures.first), torch.from_numpy(pictures.of)
    for side, ranks in zip(SIDES, retrieval_ranks(image[first], text, of, device), strict=True):
        found |= {f"{side}_any_R@{k}": ranks.recall(k) for k in RECALLS}
    return found | {NUM_IMAGES: len(pictures)}


def association_metrics(similarities: list[NDArray], source: Candidates) -> Metrics:
    """Mean Jaccard index of all instances, and by the number of candidates; None where there are none."""
    values = np.array([
        metrics.jaccard_of_picks(own, truth) for own, (_, _, truth) in zip(similarities, source.instances, strict=True)
    ])
    sizes = np.array([len(own) for own in similarities])
    chosen = {
        "avg_jaccard_score": sizes > 0,
        **{f"jaccard_score_{size}": sizes == size for size in (5, 6, 10, 12)},
        "jaccard_score_5-6": sizes <= 6,
        "jaccard_score_10-12": sizes >= 10,
    }
    return {name: float(values[own].mean()) if own.any() else None for name, own in chosen.items()}
