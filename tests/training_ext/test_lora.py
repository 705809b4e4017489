"""LoRA: what is trained, that it counts wherever a tower reads its weights, and files that plain OpenCLIP loads."""

import json
from argparse import Namespace

import open_clip
import pytest
import torch
from conftest import Experiment
from open_clip_train.data import DataLoader
from test_core import BY_GRADIENTS, assert_alike
from torch.nn.utils.parametrize import is_parametrized

from training_ext.components.lora.component import Lora
from training_ext.core import hosts
from training_ext.core.state import KEY
from training_ext.tools.evaluation.models import find_checkpoint, load_model

ROWS = 48  # of `datasets`
LORA = "--with lora --lora-rank 4 --lora-alpha 8"
ARGS = {
    "lora_rank": 4, "lora_alpha": 8.0, "rank": 0, "model": "NAME", "lock_image_unlocked_groups": 0,
    "lock_text_unlocked_layers": 0,
}  # fmt: skip


def wrapped(model: str, **args) -> tuple[torch.nn.Module, Lora]:
    """A model in evaluation mode whose additions are not zero."""
    torch.manual_seed(0)
    built = open_clip.create_model(model, output_dict=True).eval()
    lora = Lora(Namespace(**{**ARGS, **args}))
    lora.wrap_model(built)
    for name, parameter in built.named_parameters():
        if name.endswith("lora_up"):
            torch.nn.init.normal_(parameter, std=0.3)
    return built, lora


def trained(model: torch.nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def lora_weights(model: torch.nn.Module) -> list[torch.Tensor]:
    """The weights with an addition, as the towers read them."""
    modules = [module for module in model.modules() if is_parametrized(module)]
    return [getattr(module, name) for module in modules for name in module.parametrizations]


def features(model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)  # also of BERT's dropout
    size = model.visual.image_size
    image = torch.rand(3, 3, *(size if isinstance(size, tuple) else (size, size)))
    output = model(image, torch.randint(1, 15, (3, 32)))
    return output["image_features"], output["text_features"]


@pytest.fixture(scope="session")
def towers(tmp_path_factory) -> dict[str, str]:
    """A model with towers of timm and Hugging Face, one with nn.MultiheadAttention of other widths, and a ResNet."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("towers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    transformers.BertModel(transformers.BertConfig(vocab_size=20, **sizes)).save_pretrained(folder)
    bert = {"hf_model_name": str(folder), "hf_proj_type": "mlp", "hf_pooler_type": "mean_pooler"}
    native = {"context_length": 32, "vocab_size": 20, "width": 8, "heads": 2, "layers": 1}
    small = {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16}
    for name, vision, text in (
        ("timm-BERT", {"timm_model_name": "test_vit", "timm_proj": "linear", "image_size": 160}, bert),
        ("pooler", small | {"attentional_pool": True, "attn_pooler_queries": 4, "attn_pooler_heads": 2}, native),
        ("ResNet", {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8}, native),
    ):
        (folder / f"{name}.json").write_text(json.dumps({"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}))
        open_clip.add_model_config(folder / f"{name}.json")


@pytest.mark.parametrize("name", ["ViT-test", "timm-BERT", "pooler", "ResNet"])
def test_additions_count_in_training_and_in_evaluation(towers, name):
    """As weights that are computed apart, in a plain model, and as those that are exported."""
    model, lora = wrapped(name)
    state = model.state_dict()
    additions = {path for path in trained(model) if ".0.lora_" in path}
    assert trained(model) == additions | {"logit_scale"}
    assert {path.startswith("visual.") for path in additions} == {True, False}
    plain = open_clip.create_model(name, output_dict=True)
    plain.lock_image_tower(freeze_bn_stats=True)
    expected = plain.state_dict()
    for path in expected:
        module, _, last = path.rpartition(".")
        inner = f"{module}.parametrizations.{last}"
        expected[path] = state[path] if path in state else state[f"{inner}.original"] + 8 / 4 * (
            state[f"{inner}.0.lora_up"] @ state[f"{inner}.0.lora_down"]
        )
    torch.testing.assert_close(lora.export(state), dict(expected), rtol=1e-6, atol=1e-6)
    plain.load_state_dict(expected)
    for training in (False, True):
        for own, other in zip(features(model.train(training)), features(plain.train(training)), strict=True):
            torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):  # OpenCLIP's towers compute in the dtype of a weight
        assert {value.dtype for value in lora_weights(model)} == {torch.float32}
    with torch.no_grad():  # where torch has kernels of its own for attention
        torch.testing.assert_close(features(model.eval()), features(plain.eval()), rtol=1e-5, atol=1e-5)


def test_the_maps_and_towers_that_are_chosen():
    names = {path for path, _ in open_clip.create_model("ViT-test").named_parameters()}
    text = {path for path in names if path.startswith(("transformer", "token", "ln_final", "positional", "text"))}
    model, _ = wrapped("ViT-test", lora_towers="image", lora_maps="attention")
    attention = [f"visual.transformer.resblocks.0.attn.{path}" for path in (
        "parametrizations.in_proj_weight.0.lora_", "out_proj.parametrizations.weight.0.lora_",
    )]  # fmt: skip
    assert trained(model) == text | {"logit_scale"} | {path + part for path in attention for part in ("up", "down")}
    model, _ = wrapped("ViT-test", lock_image_unlocked_groups=1, lock_text_unlocked_layers=1)
    assert "visual.proj" in trained(model) and text & trained(model)
    assert not any("lora" in path and path.startswith("visual.proj") for path in trained(model))


def weights_of(run: Experiment, epoch: int) -> dict[str, torch.Tensor]:
    return run.checkpoint(epoch)["state_dict"]


@pytest.mark.parametrize("loss", ["clip", "neuclip"])
def test_a_training(run, datasets, monkeypatch, loss):
    """Only additions and tau move; it resumes bit for bit; plain OpenCLIP and `evaluate` load what it exports."""
    def in_order(*args, shuffle=False, **kwargs):
        return DataLoader(*args, **kwargs)

    monkeypatch.setattr("open_clip_train.data.DataLoader", in_order)  # else the order differs by what was drawn before
    flags = f"{LORA} --loss {loss} {datasets['csv']} {BY_GRADIENTS} --batch-size {ROWS}"
    whole = run("whole", flags)
    resumed = run("resumed", f"{flags} --resume {whole.path}/checkpoints/epoch_2.pt")
    first, last = weights_of(whole, 1), weights_of(whole, 4)
    assert all(torch.equal(value, last[name]) for name, value in weights_of(resumed, 4).items())
    moved = {name for name, value in first.items() if not torch.equal(value, last[name])}
    assert moved == {name for name in first if ".0.lora_" in name} | {"logit_scale"}
    model, _ = wrapped("ViT-test")
    model.load_state_dict(last)
    exported = whole.path / "weights" / "epoch_4.pt"
    plain = open_clip.create_model("ViT-test", pretrained=str(exported), output_dict=True).eval()
    torch.testing.assert_close(features(plain), features(model), rtol=1e-5, atol=1e-5)
    for file in (exported, whole.path / "checkpoints" / "epoch_4.pt"):
        loaded = load_model(find_checkpoint(str(file), None))[0]
        assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("more, kept", [("--delete-previous-checkpoint", [2]), ("", [1, 2])])
def test_exported_weights_go_with_their_checkpoint(run, datasets, more, kept):
    """That of steps within an epoch when a newer one is complete; that of an epoch where OpenCLIP removes it."""
    flags = f"--lora-rank 4 --loss queue --queue-size 20 {datasets['csv']} --epochs 2 --save-every-steps 2 {more}"
    folder = run("x", flags).path
    for files in ("checkpoints", "weights"):
        assert sorted(path.name for path in (folder / files).glob("*.pt")) == [f"epoch_{epoch}.pt" for epoch in kept]


def test_accumulated_batches_train_as_a_whole_one(run, datasets):
    common = f"{LORA} --loss fastclip-v3 {datasets['csv']} {BY_GRADIENTS}"
    halves = run("halves", f"{common} --batch-size {ROWS // 2} --accum-freq 2")
    assert_alike(halves, run("whole", f"{common} --batch-size {ROWS}"))


@pytest.mark.slow
@pytest.mark.parametrize("accum", [1, 2])
def test_two_processes_train_as_one(pair, run, datasets, tmp_path, accum):
    common = f"{LORA} --loss fastclip-v3 {datasets['csv']} {BY_GRADIENTS}"
    form = f"--batch-size {ROWS // 2 // accum} --accum-freq {accum}"
    assert [process.code for process in pair(f"{common} {form} --name two", tmp_path)] == [0, 0]
    assert_alike(Experiment(tmp_path, "two"), run("one", f"{common} --batch-size {ROWS}"))


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--lora-rank 0", "--lora-rank: 0 is out of range; it must be at least 1"),
        ("--lora-rank 4 --lock-text", "--lock-text: would lock the additions, too; leave it out, since --lora-rank fr"),
        ("--lora-rank 4 --use-bnb-linear SwitchBackLinearGlobal", "--use-bnb-linear: cannot train additions"),
        ("--lora-rank 8 --resume {path}", "--lora-rank: '{path}' was trained with 4, which --resume keeps"),
        ("--lora-rank 4 --resume {path} --loss fastclip-v3", "give it, or its copy in weights/ if there is one, as"),
        ("--lora-rank 4 --resume {weights}", "has no weights of lora; give it as --pretrained"),
    ],
)
def test_refusals(refused, tmp_path, flags, message):
    entry = {"loss": None, "components": {"lora": {}}, "settings": {"--lora-rank": 4}}
    names = {"path": tmp_path / "lora.pt", "weights": tmp_path / "weights.pt"}
    counter = {"global_step": 1} if hosts.installed().HAS_TASKS else {}
    torch.save({"epoch": 1, "state_dict": {}, "optimizer": {}, KEY: entry, **counter}, names["path"])
    torch.save({"logit_scale": torch.zeros(())}, names["weights"])
    line = refused(f"--with lora --loss clip --dataset-type synthetic --train-num-samples 8 {flags.format(**names)}")
    assert message.format(**names) in line


def test_layers_are_unlocked_without_a_lock(run, datasets):
    """OpenCLIP's flags for it do nothing without LoRA or a lock, and are refused then."""
    flags = f"--lora-rank 2 --lock-image-unlocked-groups 1 --loss fastclip-v3 {datasets['csv']} --workers 0 --epochs 1"
    assert any(".lora_up" in name for name in run("x", flags).checkpoint(1)["state_dict"])
