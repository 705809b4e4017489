"""Compute a task's metrics, under DataComp's names."""

from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from open_clip_ext.errors import InputError
from open_clip_ext.retrieval import RECALLS, retrieval_ranks
from training_ext.data.captions import Pictures
from training_ext.data.metrics import standard_error
from training_ext.scoring import metrics
from training_ext.scoring.class_folders import open_own_classes, warn_of_equal_classes
from training_ext.scoring.folders import Candidates, Shards, Source
from training_ext.scoring.inference import Encoder
from training_ext.scoring.pairs import open_pairs
from training_ext.scoring.tasks import OWN, OWN_PAIRS, Task

NO_FLAGS = Namespace()
RANKED = 5  # top classes kept for each sample, or more if a task asks for them


@dataclass(frozen=True)
class Score:
    """The result of a task.

    Args:
        metrics: in [0, 1]; `main_metric` is the score, None for the user's own data.
        samples: number of samples.
        confusion: matrix (C, C) of counts for the user's own classes: row the class, column the prediction.
        hits: for the user's own pairs, by the name of each recall the hits among an image's queries and the number of
            these, (2, images).
    """

    metrics: dict[str, Any]
    samples: int
    confusion: NDArray | None = None
    hits: dict[str, NDArray] | None = None


def open_task(task: Task, folder: str, args: Namespace = NO_FLAGS) -> Source:
    """Open the data set of a task.

    Args:
        args: the command's flags, of which `--val-data` and the names of its columns are used.

    Raises:
        InputError: the folder is incomplete, or not of the task's kind.
    """
    if task.kind == OWN_PAIRS:
        return open_pairs(args)
    if task.kind == OWN:
        return open_own_classes("--zeroshot-data", folder)
    if task.kind == "winogavil":
        return Candidates("--data", folder)
    source = Shards("--data", folder)
    if (source.type == "retrieval") != (task.kind == "retrieval"):
        raise source.wrong(f"{folder!r} is of type {source.type}, but {task.name} is a {task.kind} task")
    return source


@torch.inference_mode()
def score(encoder: Encoder, task: Task, source: Source) -> Score | None:
    """Score a task; the result on process 0, None on the others.

    Raises:
        InputError: the data lack what the task's main metric needs.
    """
    if isinstance(source, Candidates):
        result = associate(encoder, task, source)
    elif source.type == "retrieval":
        result = retrieve(encoder, task, source)
    else:
        result = classify(encoder, task, source)
    if result is None:
        return None
    main = result.metrics.get(task.main_metric)
    if main is None and task.main_metric:
        raise source.wrong(
            f"{source.folder!r}: {task.name} has no {task.main_metric}, only {', '.join(result.metrics)}"
        )
    return replace(result, metrics=result.metrics | {"main_metric": main})


def classify(encoder: Encoder, task: Task, source: Source) -> Score | None:
    """Accuracy, or mean average precision for several labels."""
    if task.kind == OWN and encoder.rank == 0:
        warn_of_equal_classes(source, encoder.tokenizer)
    classifier = encoder.classifier(source)
    several = source.type == "multilabel"

    def answer(features: Tensor, targets: Sequence) -> NDArray:
        scores = features @ classifier
        if several:
            return scores.cpu().numpy()
        # Not topk, which leaves the order of equal scores open.
        ranked = scores.sort(dim=1, descending=True, stable=True).indices
        return ranked[:, : max(RANKED, task.top_k)].cpu().numpy()

    columns = encoder.columns(source, task.name, task.size, answer)
    if columns is None:
        return None
    labels, answers = np.asarray(columns[0], np.int64), np.stack(columns[2])
    if several:
        return Score({"mean_average_precision": metrics.mean_average_precision(answers, labels)}, len(labels))
    predicted, number = answers[:, 0], len(source.classes)
    accuracy = float(metrics.is_among(answers, labels, 1).mean())
    recall = metrics.mean_per_class_recall(predicted, labels)
    results: dict[str, Any] = {
        "acc1": accuracy,
        "acc5": float(metrics.is_among(answers, labels, 5).mean()) if number >= 5 else None,
        "mean_per_class_recall": recall,
    }
    if task.macro:
        results |= {
            "acc_avg": accuracy, "recall-macro_all": recall, "F1-macro_all": metrics.macro_f1(predicted, labels),
        }
    if task.group_by:
        results |= group_metrics(task, metrics.is_among(answers, labels, task.top_k), columns[1], source)
    confusion = metrics.confusion(predicted, labels, number) if task.kind == OWN else None
    return Score(results, len(labels), confusion)


def group_metrics(task: Task, right: NDArray, fields: Sequence[NDArray | None], source: Source) -> dict[str, Any]:
    """Accuracy of each group that occurs, and of the worst one, under WILDS's names.

    FMoW's region "Other" is included: DataComp's script means to exclude it by name, but compares with group numbers,
    so DataComp's published scores include it.

    Args:
        right: (N,) 0 or 1.
        fields: (columns,) of each sample.
    """
    if any(numbers is None or len(numbers) != len(task.fields) for numbers in fields):
        raise InputError(
            f"{source.folder!r}: each sample of {task.name} needs an .npy of {len(task.fields)} numbers, "
            f"{', '.join(task.fields)}",
            "--data",
        )
    name = "acc" if task.top_k == 1 else f"acc_top{task.top_k}"
    results: dict[str, Any] = {f"{name}_avg": float(right.mean())}
    for field in task.group_by:
        column = task.fields.index(field)
        groups = metrics.by_group(right, np.array([numbers[column] for numbers in fields if numbers is not None]))
        for group, (value, count) in groups.items():
            results |= {f"{name}_{field}:{group}": value, f"count_{field}:{group}": count}
        worst = "wg" if len(task.group_by) == 1 else f"worst_{field}"
        results[f"{name}_{worst}"] = min(value for value, _ in groups.values())
    return results


def retrieve(encoder: Encoder, task: Task, source: Source) -> Score | None:
    """Recalls in both directions with standard errors, under clip_benchmark's names; any of an image's texts counts."""

    def answer(features: Tensor, captions: Sequence[list[str]]) -> Iterable[tuple[NDArray, NDArray]]:
        texts = encoder.embed_texts([caption for of_image in captions for caption in of_image]).cpu()
        of_each = [part.numpy() for part in texts.split([len(of_image) for of_image in captions])]
        return zip(features.cpu().numpy(), of_each, strict=True)

    columns = encoder.columns(source, task.name, task.size, answer)
    if columns is None:
        return None
    image, text = (list(map(torch.from_numpy, arrays)) for arrays in zip(*columns[2], strict=True))
    # The same file in several samples of own shards is one image.
    pictures = Pictures([number if digest is None else bytes(digest) for number, digest in enumerate(columns[1])])
    num_captions = torch.tensor([len(embeddings) for embeddings in text])
    of = torch.from_numpy(pictures.of).repeat_interleave(num_captions)
    unique_images = torch.stack([image[number] for number in pictures.first])
    images, texts = retrieval_ranks(unique_images, torch.cat(text), of)
    results: dict[str, Any] = {}
    hits: dict[str, NDArray] = {}
    for name, ranks, image_of_query in (("image", texts, of), ("text", images, torch.arange(len(pictures)))):
        for k in RECALLS:
            key, recall, of_queries = f"{name}_retrieval_recall@{k}", ranks.recall(k), ranks.hits(k)
            results[key] = recall
            # The captions of an image share its embedding, so they do not count as independent.
            results[f"{key}_error"] = standard_error(recall, len(pictures))
            of_queries = torch.stack([of_queries, torch.ones_like(of_queries)])
            of_images = of_queries.new_zeros(2, len(pictures)).index_add(1, image_of_query, of_queries)
            hits[key] = of_images.numpy()
    results["mean_recall@1"] = (texts.recall(1) + images.recall(1)) / 2
    return Score(results, len(pictures), hits=hits if task.kind == OWN_PAIRS else None)


def associate(encoder: Encoder, task: Task, source: Candidates) -> Score | None:
    """Mean Jaccard index of all instances, and by the number of candidates; None where there are none."""
    columns = encoder.columns(source, task.name, len(source.images), lambda features, _: features.cpu().numpy())
    if columns is None:
        return None
    images = np.stack(columns[2])
    cues = encoder.embed_texts([prompt_of(cue) for cue, *_ in source.instances]).cpu().numpy()
    values = np.array([
        metrics.jaccard_of_picks(images[numbers] @ cue, truth)
        for (_, numbers, truth), cue in zip(source.instances, cues, strict=True)
    ])
    sizes = np.array([len(numbers) for _, numbers, _ in source.instances])
    chosen = {
        "avg_jaccard_score": sizes > 0,
        **{f"jaccard_score_{size}": sizes == size for size in (5, 6, 10, 12)},
        "jaccard_score_5-6": sizes <= 6,
        "jaccard_score_10-12": sizes >= 10,
    }
    means = {name: float(values[mask].mean()) if mask.any() else None for name, mask in chosen.items()}
    return Score(means, len(values))


def prompt_of(cue: str) -> str:
    """The prompt for a cue, as in DataComp: "An eagle", "A bald"."""
    cue = cue.lower()
    return f"An {cue}" if cue[0] in "aeiou" else f"A {cue}"
