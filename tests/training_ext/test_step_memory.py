"""The predicted memory of a step; tests/pretend_gpu compares it with a pretended GPU's."""

import sys

import open_clip
import pytest
import torch
from conftest import TINY

from training_ext.core.loss import build_loss
from training_ext.flags import params
from training_ext.tools import dry_run, step_memory


def count(*flags):
    """Bytes when the loss is called and the most, of ViT-test."""
    args = params.parse_args([*TINY.split(), "--loss", "clip", "--precision", "amp_bf16", *flags])
    with torch.device("meta"):
        model = open_clip.create_model("ViT-test", device="meta", output_dict=True)
    return step_memory.model_bytes_of_step(model, args)[:2]


def test_mixed_precision_takes_less():
    many = "--batch-size", "256"  # since the weights are there twice, in bfloat16, too
    assert count(*many)[0] < count(*many, "--precision", "fp32")[0]


def test_micro_batches_that_are_not_counted_add_their_inputs_and_features(monkeypatch):
    found = count("--accum-freq", "5")
    monkeypatch.setattr(step_memory, "MICRO_BATCHES", 5)
    assert found == pytest.approx(count("--accum-freq", "5"), rel=1e-3)
    assert found[0] > count()[0] and found[0] > count("--accum-freq", "5", "--grad-checkpointing")[0]


def test_the_loss_takes_more_for_more_pairs_and_processes():
    def of(batch, processes):
        args = params.parse_args([*TINY.split(), "--loss", "fastclip-v3", "--batch-size", str(batch)])
        return step_memory.loss_bytes(args, processes, build_loss(args, 1000, "meta"), 16)

    features = 2 * 64 * 16 * 4
    assert features < of(64, 1) < of(128, 1) and of(64, 1) < of(64, 4)


def test_a_torch_without_the_private_parts_predicts_nothing(monkeypatch):
    """They are imported for the prediction alone, so that no training needs them."""
    import training_ext.tools

    monkeypatch.delattr(training_ext.tools, "step_memory")
    monkeypatch.setitem(sys.modules, "training_ext.tools.step_memory", None)
    args = params.parse_args([*TINY.split(), "--loss", "clip"])
    assert dry_run.predicted_step(args, torch.nn.Linear(1, 1), 1, 64) is None
