"""--lock-image (LiT) and --lock-text with every loss: one tower stands still, all else moves as ever."""

import open_clip
import pytest
import torch
from test_every_loss import EVERY, options

import open_clip_ext
from open_clip_ext.factory import find_preset, parts_of
from training_ext.components.timm_norms import TimmNorms
from training_ext.core.patching import look_up, replaced

LOCKS = {"image": "--lock-image", "text": "--lock-text --lock-text-freeze-layer-norm"}
FAST = {"clip": "image", "neuclip": "text", "isogclr": "image", "tuneclip": "text", "amorlip": "image"}
# The others are left to `make test-all`.
CASES = [
    pytest.param(name, tower, marks=[] if FAST.get(name) == tower else [pytest.mark.slow])
    for name in EVERY
    for tower in LOCKS
]


def locked_names(tower):
    """Parameters that OpenCLIP locks, and all the others."""
    model = open_clip.create_model("ViT-test")
    model.lock_image_tower() if tower == "image" else model.lock_text_tower()
    return [{name for name, p in model.named_parameters() if p.requires_grad == trains} for trains in (False, True)]


@pytest.mark.parametrize("name, tower", CASES)
def test_a_locked_tower(run, tmp_path, name, tower):
    start = open_clip.create_model("ViT-test").state_dict()
    torch.save(start, tmp_path / "reference.pt")
    flags = f"{options(name, tmp_path)} --batch-size 24 --warmup 0 --pretrained {tmp_path}/reference.pt"
    saved = run("x", f"{flags} {LOCKS[tower]}").checkpoint(1)
    locked, others = locked_names(tower)
    moved = {key for key, value in start.items() if not torch.equal(value, saved["state_dict"][key])}
    assert locked and not moved & locked
    # Biases of keys have no gradient; what of the tokens' embeddings is in no caption does not move either.
    assert len(moved & others) > len(others) / 2
    preset = find_preset(name)
    if preset.is_open_clip:
        return
    loss = parts_of(name, vars(preset))
    trains = any(getattr(part, "trains_logit_scale", False) for part in loss)
    assert ("logit_scale" in moved) == (trains or name == "drrho-clip")  # whose temperature is set to 0.01
    state = saved["open_clip_ext"]["state"]
    assert state["steps"] == (18 if name == "tuneclip" else 3)  # with five epochs of recovery
    if "state.log_u" in state:
        assert state["state.log_u"].isfinite().all(), "a row was not visited"
    if "temperature.tau" in state:
        assert (state["temperature.first_moment"] != 0).all()


@pytest.mark.parametrize("unlocked", [0, 2])
def test_a_frozen_tower_computes_what_it_did(unlocked):
    """EfficientNet's norms include the activations."""
    open_clip.add_model_config(open_clip_ext.MODEL_CONFIGS)
    model = open_clip.create_model("tf_efficientnet_lite0-tiny").eval()
    images, (seam,) = torch.rand(2, 3, 32, 32), TimmNorms.seams
    with torch.no_grad():
        before = model.encode_image(images)
        with replaced({(seam.module, seam.path): seam.replacement(look_up(seam.module, seam.path), None)}):
            model.lock_image_tower(unlocked, freeze_bn_stats=True)
        torch.testing.assert_close(model.encode_image(images), before)
