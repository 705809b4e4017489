"""What a run is told about settings that do not fit its data."""

import math

import pandas as pd
import pytest

from training_ext.components.advice import advise, advise_on_captions
from training_ext.core.loss import build_loss
from training_ext.data.seen_captions import SeenCaptions, see
from training_ext.flags.params import parse_args
from training_ext.openclip.hosts import starts_from_weights
from training_ext.tools.dry_run import recommended

COMMON = "--dataset-type shapes --train-num-samples 300 --model ViT-test --batch-size 64 --lr 1e-3"


def told(flags: str, num_samples: int = 300, steps_per_epoch: int = 4) -> list[str]:
    args = parse_args(f"{COMMON} {flags}".split())
    return advise(args, num_samples, steps_per_epoch)


@pytest.mark.parametrize(
    "length, share, lost, enough",
    [(30, "", "", 0), (31, "25 %", "3", 40), (60, "25 %", "48", 64), (65, "25 %", "52", 72)],
)
def test_captions_that_are_cut(length, share, lost, enough):
    """ViT-test reads 32 tokens, a start and an end among them."""
    args = parse_args(f"{COMMON} --loss clip".split())
    (line, *more) = advise_on_captions(args, SeenCaptions(["x " * length, *"abc"], 2, "")) or [""]
    assert not more and ("--model: " + share in line if share else line == "")
    assert not share or f"lose {lost} % of theirs; --force-context-length {enough} " in line
    few = SeenCaptions(["x " * length, *"a" * 199], 0, "")  # of 200; 99 % are read whole
    assert not advise_on_captions(args, few)


@pytest.mark.parametrize(
    "loss, named",
    [("sogclr", True), ("sogclr --same-caption", False), ("sogclr --same-key title", False), ("cyclip", False)],
)
def test_captions_that_repeat(loss, named):
    args = parse_args(f"{COMMON} --loss {loss}".split())
    captions = pd.Series(["a", "b", "a", "", None, "", "c", "b", "a"])
    told = advise_on_captions(args, see(captions, None, "the {} captions"))
    assert len(told) == named
    assert not named or "--same-caption: 5 of the 6 captions are those of another pair" in told[0]


@pytest.mark.parametrize(
    "loss", ["fastclip-v3 --gamma 0.3", "sogclr", "queue", "neuclip", "neuclip --npn-joint", "amorlip", "cyclip"]
)
def test_nothing_is_said_where_all_fits(loss):
    assert told(f"--loss {loss} --batch-size 1000 --warmup 1000 --epochs 30", 1_000_000, 1000) == []


@pytest.mark.parametrize(
    "flags, steps, parts",
    [
        ("--loss sogclr --warmup 10", 4, ["--batch-size", "only 4 optimizer step(s), the training 80", "at most 25"]),
        ("--loss sogclr --warmup 100000", 10, ["--warmup: 100000 steps, but the training has 200", "0.2 %", "20"]),
        ("--loss clip --warmup 10 --lr 0.1", 10, ["Far from usual: --lr 0.1; usual is 1e-5 to 1e-3"]),
        ("--loss siglip-chunked --warmup 10 --lr-tau 0.05", 10, ["Far from usual: --lr-tau 0.05"]),
        # exp(-200 * 1e-3 / 8), and 2 / 200
        (
            "--loss queue --rho 3 --queue-size 200 --warmup 5", 10,
            ["--lr-tau: at 0.000125", f"{math.exp(-0.025):.3g}", "give about 0.01 "],
        ),
        (
            "--loss fastclip-v3 --rho 3 --warmup 5 --lr-tau 0.05 --epochs 4 --batch-size 30", 10,
            ["--gamma: 0.2", "5 visits", "4 in", "gives 1"],
        ),
        # log(299), log(63) and log(2 * 63); at the largest rho below nothing is said
        (
            "--loss neuclip --npn-prototypes 100 --rho 5.8 --warmup 5 --lr-tau 0.01", 10,
            ["--rho: 5.8", "300 samples: at 5.7"],
        ),
        (
            "--loss fastclip-v3 --normalizer batch --rho 4.2 --warmup 5 --lr-tau 0.01", 10,
            ["--rho: 4.2", "batches of 64: at 4.1 and above nothing"],
        ),
        (
            "--loss isogclr --rho 5 --negatives both --warmup 5", 10,
            ["--rho: 5", "batches of 64: at 4.8 and above every temperature falls on its sample's first visit"],
        ),
        (
            "--loss amorlip-paper --warmup 5 --lr-tau 0.01", 250,
            ["--amor-denominator: target", "has 250", "--amor-denominator combined --amor-positive-weight 1e-3"],
        ),
    ],
)  # fmt: skip
def test_each_sentence_names_its_flag_and_what_to_try(flags, steps, parts):
    flags = flags if "--epochs" in flags else f"{flags} --epochs 20"
    [line] = told(flags, steps_per_epoch=steps)
    assert all(part in line for part in parts), line


def test_pretrained_weights_and_fixed_temperatures_need_not_move():
    flags = "--loss queue --rho 3 --queue-size 200 --warmup 5 --epochs 5"
    assert any("--lr-tau" in line for line in told(flags, steps_per_epoch=10))
    assert told(f"{flags} --pretrained x.pt", steps_per_epoch=10) == []
    flags = flags.replace("--rho 3", "--temperature fixed")
    assert told(flags, steps_per_epoch=10) == []


def test_fine_tuning_of_random_weights_is_told():
    flags = "--loss tuneclip --warmup 5 --epochs 20"
    assert any("--loss: tuneclip is for fine-tuning" in line for line in told(flags))
    for start in ("--pretrained x.pt", "--resume latest"):
        assert not any("--loss: tuneclip" in line for line in told(f"{flags} {start}"))


@pytest.mark.parametrize(
    "flags, rate",
    [
        ("neuclip", "0.8"), ("fastclip-v3 --normalizer prototypes --npn-lr 0.2", "0.2"),  # sqrt(49,280 / 77,000)
        ("neuclip --npn-lr 0.1", None), ("neuclip --npn-opt adam --npn-lr 1", None), ("neuclip --npn-joint", None),
        ("queue", None),
    ],
)
def test_a_network_on_pretrained_weights_is_told_to_be_slow(flags, rate):
    flags = f"--loss {flags} --batch-size 1000 --warmup 1000 --epochs 28"
    assert told(flags, 1_760_000, 1760) == []
    lines = told(f"{flags} --pretrained x.pt", 1_760_000, 1760)
    assert len(lines) == (rate is not None) and all(f"--npn-lr: {rate} with" in line for line in lines)


@pytest.mark.parametrize(
    "flags",
    [
        "neuclip --npn-prototypes 100 --rho 5.69 --lr-tau 0.01",
        "fastclip-v3 --normalizer batch --rho 4.14 --lr-tau 0.01",
        "isogclr --rho 4.83 --negatives both", "isogclr --rho 5 --tau-optimizer adam",
    ],
)  # fmt: skip
def test_a_rho_that_some_weights_reach_is_left_alone(flags):
    assert told(f"--loss {flags} --warmup 5 --epochs 20", steps_per_epoch=10) == []


@pytest.mark.parametrize("loss, counted", [("neuclip --npn-prototypes 100", False), ("fastclip-v3", True)])
def test_the_length_of_an_epoch_is_not_called_the_size_of_the_data(loss, counted):
    """Shards are counted for a loss that keeps something per sample."""
    flags = f"{COMMON} --dataset-type webdataset --train-data x.tar --dataset-resampled --loss {loss} --rho 5.8"
    args = parse_args(flags.split())
    texts = [*advise(args, 300, 10), *recommended(args, 300, 10)]
    for number in ("300 samples", "300 pairs"):
        assert [f"{number} per epoch" in text for text in texts if number in text] == [not counted]


def test_visits_are_passes_over_the_data_not_epochs():
    """300 epochs of 30 or of all 300 samples: at 30 visits the rule gives 0.35, at 300 it gives 0.07."""
    flags = "--loss fastclip-v3 --gamma 0.1 --rho 3 --warmup 5 --lr-tau 0.01 --epochs 300 --batch-size 30"
    [line] = [line for line in told(flags, steps_per_epoch=1) if "--gamma" in line]
    assert "about 30 in total" in line and "gives 0.35" in line
    assert not any("--gamma" in line for line in told(flags, steps_per_epoch=10))


def test_the_networks_rate_follows_the_training_and_its_restarts_a_pass():
    """20 epochs of 4,000 of the 40,000 rows, in batches of 64: 1,250 steps, two passes; a fifth of a pass is 125."""
    flags = f"{COMMON} --loss neuclip --temperature individual --epochs 20".replace("300", "4000")
    loss = build_loss(parse_args(flags.split()), 40_000, "cpu", samples_per_epoch=4000)
    assert loss.num_samples == 40_000
    assert "restarted every 125 steps, adagrad at 0.13" in loss.description()  # sqrt(1,250 / 77,000)


def test_the_command_says_it_once(run, datasets):
    log = run("told", f"{datasets['shapes']} --loss queue --epochs 2 --workers 0 --batch-size 16").log
    for flag in ("--batch-size: an epoch has only 3", "--lr-tau: "):
        assert log.count(flag) == 1, flag
    assert "normalizers queue, 48 for as many samples" in log and "queued 48" in log


def test_a_folder_with_a_configuration_alone_is_not_pretrained(tmp_path):
    (tmp_path / "open_clip_config.json").write_text("{}")
    args = parse_args(f"--loss queue --model local-dir:{tmp_path}".split())
    assert not starts_from_weights(args)
    (tmp_path / "open_clip_model.safetensors").touch()
    assert starts_from_weights(args)
