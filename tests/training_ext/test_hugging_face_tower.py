"""A model with a text tower of Hugging Face: bad input ends in one line, not in a traceback."""

import json

import open_clip
import pytest
import torch

transformers = pytest.importorskip("transformers")

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] a picture of small large red blue circle square above below against"
DATA = "--dataset-type shapes --train-num-samples 16 --workers 0 --epochs 1"
NEUCLIP = f"{DATA} --loss neuclip --npn-prototypes 8"


@pytest.fixture
def bert(tmp_path, monkeypatch):
    """bert(name, tower) adds the model `name` with the BERT in the folder `tower`, which is made by default."""
    monkeypatch.setattr(open_clip.factory, "_MODEL_CONFIGS", dict(open_clip.factory._MODEL_CONFIGS))
    monkeypatch.setattr(open_clip.factory, "_MODEL_CONFIG_PATHS", list(open_clip.factory._MODEL_CONFIG_PATHS))
    folder = tmp_path / "bert"
    folder.mkdir()
    (folder / "vocab.txt").write_text(WORDS.replace(" ", "\n"))
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=len(WORDS.split()), max_position_embeddings=64, **sizes)
    transformers.BertModel(config).save_pretrained(folder)

    def add(name: str, tower: object = folder, tokenizer: object = folder) -> str:
        text = {"hf_model_name": str(tower), "hf_tokenizer_name": str(tokenizer), "context_length": 20}
        vision = {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16}
        text |= {"hf_proj_type": "mlp", "hf_pooler_type": "mean_pooler"}
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"embed_dim": 32, "vision_cfg": vision, "text_cfg": text}))
        open_clip.add_model_config(path)
        return f"--model {name}"

    return add


def test_a_run_is_resumed_with_the_same_locks_only(run, bert, ends):
    isogclr = f"{DATA} --loss isogclr --tau-lr 1e-3 --val-num-samples 8 {bert('BERT-test')}"
    saved = run("locks", isogclr).checkpoint(1)["state_dict"]
    assert any(name.startswith("text.transformer.") for name in saved)
    assert "--resume: " in ends(f"{isogclr} --epochs 2 --name locks --resume latest --lock-text")
    run("locks", f"{isogclr} --epochs 2 --resume latest")


def test_its_own_weights_are_accepted(run, bert, tmp_path):
    model = bert("BERT-test")
    torch.save(open_clip.create_model("BERT-test").state_dict(), tmp_path / "own.pt")
    run("weights", f"{NEUCLIP} {model} --pretrained {tmp_path}/own.pt --lock-text --force-context-length 64")


def test_a_tokenizer_that_is_not_there(fails, bert, tmp_path):
    line = fails(f"{NEUCLIP} {bert('BERT-test', tokenizer=tmp_path / 'nowhere')}")
    assert "--model: the tokenizer " in line and "nowhere' (hf_tokenizer_name) cannot be loaded" in line


def test_components_find_its_tokens_and_parameters(run, bert):
    flags = "--with token_head,tower_rates --token-head 1 --lr 1e-3 --lr-text 1e-4 --warmup 0 --lr-scheduler const"
    data = "--dataset-type synthetic --train-num-samples 16 --workers 0 --epochs 1"
    saved = run("components", f"{flags} --loss clip {data} {bert('BERT-test')}").checkpoint(1)
    assert saved["state_dict"]["token_head.weight"].shape == (len(WORDS.split()), 32)
    groups = [group for group in saved["optimizer"]["param_groups"] if group["lr"] == 1e-4]
    trained = {name for name, _ in open_clip.create_model("BERT-test").text.named_parameters()}
    assert sum(len(group["params"]) for group in groups) == len(trained)
