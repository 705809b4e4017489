"""The examples for other trainers, where those are installed:
`pip install accelerate lightning "sentence-transformers[train]"`."""

import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch

from open_clip_ext import InputError
from open_clip_ext.losses import Loss, NonFiniteError

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
FLAGS = "--loss fastclip-v3 --epochs 2 --samples 32 --batch-size 8 --out out".split()


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def check_equal(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]) if torch.is_tensor(value) else value == other[name], name


def check_state(loss) -> dict:
    """Every row visited, and no step but the training's; the state."""
    state = loss.full_state()
    assert state["state.log_u"].isfinite().all() and loss.steps == 8
    assert loss.normalizer.epoch == 1
    return state


def check_training_and_resume(main, capsys) -> list[str]:
    """Recall before and after, and a resumed training equal to the whole one; what the whole one logged."""
    trainer = main(FLAGS)
    printed = capsys.readouterr().out
    assert "step 0: R@1 " in printed and "step 8: R@1 " in printed
    state = check_state(trainer.contrastive_loss)
    decayed = trainer.get_decay_parameter_names(trainer.model)
    assert len(decayed) > 10 and not any(name.endswith("logit_scale") for name in decayed)
    shutil.rmtree("out/checkpoint-8")
    resumed = main([*FLAGS, "--resume"])
    check_equal(check_state(resumed.contrastive_loss), state)
    check_equal(resumed.model.state_dict(), trainer.model.state_dict())
    return [name for entry in trainer.state.log_history for name in entry]


def on_two_processes(script: Path, **environment: str) -> None:
    """Both step on the gradient of both; the state that process 0 writes has the rows of both."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    flags = "--loss fastclip-v3 --epochs 1 --samples 32 --batch-size 8 --out out".split()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([*command, script, *flags], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    state = torch.load("out/checkpoint-2/contrastive_loss.pt", weights_only=True)["_extra_state"]
    assert state["state.log_u"].isfinite().all() and state["steps"] == 2


def test_the_trainer_of_transformers(capsys):
    pytest.importorskip("accelerate")
    from transformers_trainer import main

    assert check_training_and_resume(main, capsys).count("eval_loss") == 2


def test_sentence_transformers(capsys):
    pytest.importorskip("sentence_transformers")
    pytest.importorskip("datasets")
    from sentence_transformers_trainer import main

    assert "tau" in check_training_and_resume(main, capsys)


ON_RANK = """
import os, sys, torch
from sentence_transformers_trainer import main
torch.save(main(sys.argv[1:]).model.state_dict(), f"{os.environ['RANK']}.pt")
"""


def test_sentence_transformers_on_two_processes(tmp_path):
    """The temperature, too, is the same on both."""
    pytest.importorskip("sentence_transformers")
    pytest.importorskip("datasets")
    (tmp_path / "script.py").write_text(ON_RANK)
    on_two_processes(tmp_path / "script.py", PYTHONPATH=f"{EXAMPLES}{os.pathsep}{ROOT}")
    first, second = (torch.load(f"{rank}.pt", weights_only=True) for rank in range(2))
    check_equal(first, second)
    assert first["3.logit_scale"] != torch.tensor(2.7)


def test_accumulation_is_refused(monkeypatch):
    pytest.importorskip("accelerate")
    import transformers_trainer

    arguments = partial(transformers_trainer.TrainingArguments, gradient_accumulation_steps=2)
    monkeypatch.setattr(transformers_trainer, "TrainingArguments", arguments)
    with pytest.raises(InputError, match="^gradient_accumulation_steps: 2 parts do not see one another's negatives"):
        transformers_trainer.main(FLAGS)


def test_accumulation_is_refused_by_lightning(monkeypatch):
    lightning = pytest.importorskip("lightning")
    import lightning_module

    monkeypatch.setattr(lightning, "Trainer", partial(lightning.Trainer, accumulate_grad_batches=2))
    with pytest.raises(InputError, match="^accumulate_grad_batches: 2 parts do not see one another's negatives"):
        lightning_module.main(FLAGS)


def test_the_trainer_of_transformers_on_two_processes():
    pytest.importorskip("accelerate")
    on_two_processes(EXAMPLES / "transformers_trainer.py")


def test_lightning():
    pytest.importorskip("lightning")
    from lightning_module import main

    trainer, module = main(FLAGS)
    check_state(module.loss)
    assert "recall_at_1" in trainer.callback_metrics
    _, resumed = main([*FLAGS, "--resume", "out/checkpoints/epoch=0.ckpt"])
    _, of_siglip = main(["--loss", "siglip-chunked", *FLAGS[2:]])
    assert of_siglip.model.logit_bias != -10
    check_state(resumed.loss)  # half of the steps are the first run's; Lightning does not restore the data's order


@pytest.fixture
def with_nan(monkeypatch):
    """Features are NaN in the second step."""
    forward = Loss.forward

    def call(self, image_features, *args, **kwargs):
        return forward(self, image_features * torch.nan if self.steps == 1 else image_features, *args, **kwargs)

    monkeypatch.setattr(Loss, "forward", call)


def check_nan(main, scaled: bool, caplog) -> None:
    """It ends the training, unless a scaler skips the step."""
    with nullcontext() if scaled else pytest.raises(NonFiniteError, match="step 2"):
        main(FLAGS)
    assert ("step 2: image_features is not finite; the gradient scaler has skipped it" in caplog.text) == scaled


@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_that_the_scaler_skips_of_transformers(monkeypatch, with_nan, caplog, scaled):
    pytest.importorskip("accelerate")
    import transformers_trainer

    create = transformers_trainer.Trainer.create_accelerator_and_postprocess

    def create_with_scaler(self):
        create(self)
        self.accelerator.scaler = torch.amp.GradScaler("cpu")

    if scaled:
        monkeypatch.setattr(transformers_trainer.Trainer, "create_accelerator_and_postprocess", create_with_scaler)
    check_nan(transformers_trainer.main, scaled, caplog)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_that_the_scaler_skips_of_lightning(monkeypatch, with_nan, caplog, scaled):
    lightning = pytest.importorskip("lightning")
    import lightning_module

    plugins = [lightning.pytorch.plugins.MixedPrecision("16-mixed", "cpu")] if scaled else None
    monkeypatch.setattr(lightning, "Trainer", partial(lightning.Trainer, plugins=plugins))
    check_nan(lightning_module.main, scaled, caplog)
