"""What OpenCLIP raises before the first step ends in one line on all processes, and leaves no file."""

from datetime import datetime
from types import SimpleNamespace

import open_clip
import pytest
import torch
from conftest import ext_main, run_main

from training_ext.flags.params import parse_args
from training_ext.flags.trial import failure, try_start

SHAPES = "--dataset-type shapes --train-num-samples 16 --workers 0 --epochs 1"
OURS = f"{SHAPES} --loss fastclip-v3"


def test_an_optimizer_around_another(run, datasets):
    """timm's Lookahead, which has no hooks of its own."""
    flags = f"{datasets['shapes']} --loss fastclip-v3 --opt timm/lookahead_sgd --lr 0.1 --workers 0"
    run("x", f"{flags} --epochs 1")
    saved = run("x", f"{flags} --epochs 2 --resume latest").checkpoint(2)
    assert saved["optimizer"]["param_groups"][-1]["steps"] == saved["open_clip_ext"]["state"]["steps"] == 12


@pytest.mark.parametrize(
    "flags, parts",
    [
        ("--lock-text", ["--lock-text: OpenCLIP could not lock", "; add --lock-text-freeze-layer-norm"]),
        ("--aug-cfg nonsense=1", ["--aug-cfg: nonsense=1: ", "'nonsense'; --traceback shows where"]),
        ("--pretrained none.pt", ["--pretrained: none.pt: OpenCLIP could not build the model", "'none.pt' is not"]),
        ("--opt timm/none --lr 0.1", ["--opt: timm/none: OpenCLIP could not build the optimizer"]),
        ("--beta1 2 --lr 0.1", ["--beta1: 2.0: OpenCLIP could not build the optimizer"]),
        ("--lr-scheduler linear", ["--lr-scheduler: linear: ", "Unknown scheduler, linear. Available options are"]),
        ("--seed -1", ["--seed: -1: "]),
        ("--image-mean 0.5 0.5", ["--image-mean: 0.5 0.5: OpenCLIP could not make a step"]),
        ("--lock-image --lock-text --lock-text-freeze-layer-norm --temperature fixed", ["--lock-image: "]),
        ("--loss clip --accum-freq 2 --distill-model ViT-test --distill-pretrained x", ["assert args.accum_freq == 1"]),
    ],
)
def test_what_open_clip_raises(refused, datasets, flags, parts):
    """Found by trying its start, with the flag to blame and nothing written."""
    for data in (OURS, f"{datasets['csv']} --workers 0 --loss fastclip-v3"):  # without which nothing fails
        line = refused(f"{data} {flags}")
        assert all(part in line for part in parts), line


def test_a_trial_has_neither_weights_nor_processes_nor_files(tmp_path, monkeypatch):
    """And leaves to the run what only fails without memory."""
    monkeypatch.chdir(tmp_path)
    for name in ("open_clip.factory.download_pretrained", "subprocess.run", "multiprocessing.Process.start"):
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("a trial must not do this"))
    flags = "--pretrained openai --remote-sync x --copy-codebase --report-to tensorboard --resume latest --name x"
    frozen = "RN50 --lock-image --lock-image-freeze-bn-stats"
    for model in ("ViT-B-32", frozen, "convnext_base", "coca_ViT-B-32 --loss clip"):
        args = parse_args(f"{OURS} --model {model} {flags if model == 'ViT-B-32' else ''}".split())
        assert failure(args) is None and not list(tmp_path.iterdir())
    assert open_clip.factory.torch is torch

    def on_meta(self):
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")

    monkeypatch.setattr(open_clip.CLIP, "set_grad_checkpointing", on_meta)
    try_start(parse_args(f"{OURS} --model ViT-test --grad-checkpointing".split()))


def test_a_fault_of_ours_is_not_said_to_be_open_clips(fails, monkeypatch):
    monkeypatch.setattr("training_ext.core.loss.create_loss", None)
    assert "open_clip_ext could not start: TypeError" in fails(OURS)


def test_python_s_traceback(capsys, tmp_path):
    assert run_main(ext_main, f"{OURS} --opt lion --traceback --name x", tmp_path) == 2
    error = capsys.readouterr().err
    assert "Traceback" in error and error.splitlines()[-1].endswith("Error: Unknown optimizer lion")
    assert not (tmp_path / "x").exists()


def test_a_run_without_a_name(tmp_path):
    assert run_main(ext_main, f"{OURS} --opt lion", tmp_path / "logs") == 2
    assert not (tmp_path / "logs").exists()


def test_a_folder_with_files_stays(run, ends):
    whole = run("x", OURS)
    before = {path: path.stat().st_size for path in whole.path.glob("checkpoints/*")}
    assert "Unknown optimizer lion" in ends(f"{OURS} --epochs 2 --name x --resume latest --opt lion")
    assert {path: path.stat().st_size for path in whole.path.glob("checkpoints/*")} == before
    assert (whole.path / "out.log").exists()


def test_without_loss_and_after_a_step_it_is_an_exception(tmp_path, monkeypatch):
    with pytest.raises((AssertionError, ValueError), match="^Unknown optimizer"):
        run_main(ext_main, f"{SHAPES} --opt lion --name x", tmp_path)
    forward, calls = open_clip.CLIP.forward, []

    def broken(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        calls.extend([] if output["text_features"].is_meta else [None])  # not those of the trial before the run
        if len(calls) == 2:
            raise ZeroDivisionError("of the second step")
        return output

    monkeypatch.setattr(open_clip.CLIP, "forward", broken)
    with pytest.raises(ZeroDivisionError):
        run_main(ext_main, f"{OURS} --name y", tmp_path)
    assert (tmp_path / "x/out.log").exists() and (tmp_path / "y/out.log").exists()


@pytest.mark.slow
def test_processes_agree(pair, tmp_path):
    """A path may differ between machines, so that only the second cannot load its file; the first finds its own out
    before it waits for the others."""
    torch.save(open_clip.create_model("ViT-test").state_dict(), tmp_path / "good.pt")
    common = f"{OURS} --dist-backend gloo --name x --pretrained {tmp_path}/"
    ended = pair([f"{common}{name}.pt" for name in ("good", "none")], tmp_path / "logs")
    assert all(process.code == 2 and "none.pt" in process.stderr.splitlines()[-1] for process in ended), ended
    assert not (tmp_path / "logs/x").exists()


def test_a_run_with_the_name_of_another_leaves_its_files(tmp_path, monkeypatch):
    """Without --name, runs of the same second and flags have one name."""
    now = SimpleNamespace(now=lambda: datetime(2026, 1, 1))
    monkeypatch.setattr("open_clip_train.main.datetime", now)
    assert run_main(ext_main, OURS, tmp_path) == 0
    before = {path: path.stat().st_size for path in tmp_path.rglob("*")}
    assert run_main(ext_main, OURS, tmp_path) == 2
    assert {path: path.stat().st_size for path in tmp_path.rglob("*")} == before
