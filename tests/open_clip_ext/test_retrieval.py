"""Ranks and recalls against loops over the similarities in float64, ties included."""

from itertools import permutations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from open_clip_ext.kernels import streaming
from open_clip_ext.retrieval import retrieval_ranks, validation_metrics


def loops(similarities: list[list[float]], positives: list[set[int]], k: int) -> tuple[list[float], float]:
    """Expected rank of each row's first positive and expected recall, over every order of equal similarities."""
    ranks, hits = [], []
    for row, own in zip(similarities, positives, strict=True):
        best = max(row[j] for j in own)
        above = sum(s > best for s in row)
        equal = [j in own for j, s in enumerate(row) if s == best]
        places = [above + order.index(True) for order in permutations(equal)]
        ranks.append(sum(places) / len(places))
        hits.append(sum(place < k for place in places) / len(places))
    return ranks, sum(hits) / len(hits)


def compare(image, text, of) -> None:
    similarities = (image.double() @ text.double().T).tolist()
    images, texts = retrieval_ranks(image, text, of)
    by_text = [list(column) for column in zip(*similarities, strict=True)]
    texts_of = [{t for t, i in enumerate(of.tolist()) if i == image_number} for image_number in range(len(image))]
    for found, rows, positives in ((images, similarities, texts_of), (texts, by_text, [{i} for i in of.tolist()])):
        for k in (1, 2, 5, 10):
            ranks, recall = loops(rows, positives, k)
            assert found.expected().tolist() == pytest.approx(ranks, abs=1e-12)
            assert found.recall(k) == pytest.approx(recall, abs=1e-12)


@pytest.mark.parametrize("tile", [(1, 1), (4, 7), streaming.CPU_TILE])
@pytest.mark.parametrize("levels", [None, 2, 1])
def test_every_order_of_equals_is_as_likely(monkeypatch, tile, levels):
    """With `levels`, embeddings of few numbers, so that many similarities are equal; several texts of some images."""
    monkeypatch.setattr(streaming, "CPU_TILE", tile)
    draws = torch.Generator().manual_seed(0)
    of = torch.cat([torch.arange(5), torch.tensor([0, 0, 3])])[torch.randperm(8, generator=draws)]
    image, text = torch.randn(5, 3, generator=draws), torch.randn(8, 3, generator=draws)
    if levels is not None:
        image, text = image.sign() * (levels == 2), text.sign()
    compare(image.requires_grad_(), text + image[of] * (levels is None), of)  # whose gradient nobody needs


def test_texts_that_repeat_are_equal_whatever_the_order_of_their_sums():
    """Tiles of other shapes may sum in another order, and equal similarities then differ in their last digits."""
    draws = torch.Generator().manual_seed(0)
    image = torch.nn.functional.normalize(torch.randn(1500, 37, generator=draws), dim=1)
    text = torch.nn.functional.normalize(torch.randn(750, 37, generator=draws), dim=1).repeat(2, 1)
    for scale in (1, 1e-6):
        images, texts = retrieval_ranks(image * scale, text)
        assert (images.equal == 1).all() and (texts.equal == 0).all()
        assert images.recall(1) == pytest.approx((images.above == 0).double().mean().item() / 2)


@pytest.mark.parametrize("value", [1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_collapsed_model_retrieves_by_chance(value, dtype):
    same = torch.full((10, 3), value, dtype=dtype)
    for ranks in retrieval_ranks(same, same):
        assert [ranks.recall(k) for k in (1, 5, 10)] == pytest.approx([0.1, 0.5, 1.0])
        assert ranks.expected().tolist() == [4.5] * 10
    images, _ = retrieval_ranks(same[:5], same, torch.arange(5).repeat(2))
    assert images.recall(1) == pytest.approx(0.2)  # any of two texts of ten


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_an_embedding_that_is_not_finite_alone_scores_as_chance(value):
    image, text = torch.eye(100), torch.eye(100)
    image[7, 7] = value
    for ranks in retrieval_ranks(image, text):
        assert ranks.recall(1) == pytest.approx(0.99 + 0.01 * 0.01)


@pytest.mark.parametrize(
    "images, of",
    [(7, None), (3, None), (5, [0, 1, 2, 3, 3]), (4, [0, 1, 2, 3, 4]), (4, [0, 1, 2, 3, -1]), (4, [0, 1, 2, 3])],
)
def test_images_and_texts_that_do_not_belong_together_are_refused(images, of):
    with pytest.raises(ValueError, match="^image_of_text must "):
        retrieval_ranks(torch.eye(images, 7), torch.eye(5, 7), None if of is None else torch.tensor(of))


def test_memory_grows_with_the_embeddings_and_not_with_their_pairs():
    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            made = function(*args, **(kwargs or {}))
            largest = max([largest, *(t.nbytes for t in tree_leaves(made) if isinstance(t, torch.Tensor))])
            return made

    image, of = torch.randn(2000, 4), torch.arange(2000)
    with Largest():
        retrieval_ranks(image, image, of)
    assert largest == 8 * streaming.CPU_TILE[0] * streaming.CPU_TILE[1]  # 4 MiB; all pairs have 31


def test_metrics_count_ranks_from_one_and_an_images_other_captions():
    """Ranks 0, 2, 2, 0 in both directions: two of the pairs are swapped, so that theirs is among three that equal."""
    image = torch.eye(4)
    found = validation_metrics(image, image[[0, 2, 1, 3]], torch.tensor([1, 0, 0, 1]))
    for side in ("image_to_text", "text_to_image"):
        assert [found[f"{side}_{name}"] for name in ("mean_rank", "median_rank", "R@1", "R@5")] == [2, 2, 0.5, 1]
    # The first image of each number finds a caption, and so do two captions their image; to two both are equal.
    assert [found[f"{side}_any_R@1"] for side in ("image_to_text", "text_to_image")] == [1, 0.75]
    assert found["num_images"] == 2
