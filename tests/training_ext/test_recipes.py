"""Recipes: the published ones, one's own files, what a run saves, and --dry-run."""

import argparse
import re
from math import ceil
from pathlib import Path

import open_clip
import pytest
import yaml
from conftest import TINY

from open_clip_ext import InputError
from open_clip_ext.main import main as ext_main
from training_ext.core import hosts
from training_ext.flags import recipes, run_recipe
from training_ext.flags.params import parse_args
from training_ext.flags.recipes import PUBLISHED, TYPES
from training_ext.flags.trial import failure, tried_models
from training_ext.tools import dry_run

NAMES = recipes.names()
MINE = "loss: neuclip, npn_prototypes: 20, npn_updates: 2, rho: 5, lr: 1e-3, epochs: 1, seed: 3, workers: 0"


@pytest.fixture
def eight(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")


@pytest.fixture
def write(tmp_path):
    """write(text) -> path of a recipe."""

    def write(text: str) -> str:
        (tmp_path / "mine.yaml").write_text(text)
        return str(tmp_path / "mine.yaml")

    return write


def parse(arguments: str):
    return parse_args(arguments.split())


@pytest.mark.parametrize("name", NAMES)
def test_a_published_recipe_says_where_it_is_from_and_can_be_planned(name, eight, monkeypatch):
    recipe = recipes.find(name)
    assert recipe.source and recipe.data and recipe.score and recipe.samples
    lines = (PUBLISHED / f"{name}.yaml").read_text().splitlines()
    if not lines[0].startswith("# Every value is that of the released command"):
        bare = [line for line in lines[lines.index("flags:") + 2 :] if "  # " not in line]
        assert not bare, "without a source"
    args = parse(f"--recipe {name}")
    for key, value in recipe.flags.items():
        assert getattr(args, key) == type(getattr(args, key))(value)
    if recipe.global_batch_size:
        assert args.batch_size * 8 == recipe.global_batch_size
    monkeypatch.setattr(dry_run, "predicted_step", lambda *given: None)  # takes seconds; see tests/pretend_gpu
    assert open_clip.get_model_config(args.model)
    tiny = "" if args.pretrained else "--model ViT-test"  # starts in a tenth of the time
    text = "\n".join(dry_run.lines(parse(f"--recipe {name} {tiny}")))
    found = re.search(r"([\d,]+) per epoch, ([\d,]+) in total", text)
    steps, total = (int(number.replace(",", "")) for number in found.groups())
    batches = ceil(recipe.samples / (8 * args.batch_size) / args.workers) * args.workers
    assert steps == batches // args.accum_freq and total == steps * args.epochs


@pytest.mark.parametrize("name", NAMES)
def test_the_saved_flags_are_those_of_the_recipe(name, tmp_path, eight):
    args = parse(f"--recipe {name} --train-data x.tar --name run")
    run_recipe.save(str(tmp_path), run_recipe.of_run(args, run_recipe.resolved_flags(args), 1000))
    again = parse(f"--recipe {tmp_path}/recipe.yaml --name run")
    differ = {"recipe", "recipe_flags", "given_flags", "given_settings"}
    assert {key: value for key, value in vars(again).items() if key not in differ} == {
        key: value for key, value in vars(args).items() if key not in differ
    }


def test_what_is_given_goes_before_the_recipe_and_the_recipe_before_the_loss(write, eight):
    path = write(f"global_batch_size: 64\nflags: {{{MINE}, wd: 0.3, npn_wd: 0.5, aug_cfg: {{scale: '(0.5,1)'}}}}")
    args = parse(f"--recipe {path} --wd 0.7 --rho 6 --train-data x.tar")
    assert (args.wd, args.rho, args.npn_wd, args.lr, args.npn_opt) == (0.7, 6.0, 0.5, 1e-3, "adagrad")
    assert args.aug_cfg == {"scale": (0.5, 1)} and args.batch_size == 8
    assert parse(f"--recipe {path} --accum-freq 2").batch_size == 4
    assert parse(f"--recipe {path} --batch-size 5").batch_size == 5
    # What a preset sets of OpenCLIP's flags gives way as well.
    path = write("flags: {loss: tuneclip, wd: 0.3}")
    args = parse(f"--recipe {path}")
    assert (args.wd, args.lr, parse("--loss tuneclip").wd) == (0.3, 1e-5, 0.02)


def test_a_switch_that_is_on_by_itself_stays_off(tmp_path):
    args = parse("--loss neuclip --no-npn-split --train-data x.tar --name run")
    run_recipe.save(str(tmp_path), run_recipe.of_run(args, run_recipe.resolved_flags(args), None))
    saved = f"--recipe {tmp_path}/recipe.yaml"
    values = [parse(text).npn_split for text in (saved, f"{saved} --npn-split", "--loss neuclip")]
    assert values == [False, True, None]


@pytest.mark.parametrize("given", ["", "--wd-exclude a b", "--own-group", "--no-own-group"])
def test_a_flag_with_another_name_than_its_value_is_repeated(given):
    """As OpenCLIP 4.2 has them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--wd-exclude", nargs="*", default=[], dest="patterns")
    parser.add_argument("--own-group", dest="in_head", action="store_false")
    parser.add_argument("--no-own-group", dest="not_in_head", action="store_true")
    values = vars(parser.parse_args(given.split()))
    arguments = recipes.arguments(recipes.Recipe("x", flags=values), parser._actions)
    assert vars(parser.parse_args(arguments)) == values


@pytest.mark.skipif(not hosts.installed().HAS_TASKS, reason="this OpenCLIP has no flag that switches off")
def test_a_flag_that_switches_off_is_in_the_recipe(tmp_path):
    args = parse("--loss neuclip --text-pooler-own-group --wd-exclude a b --train-data x.tar --name run")
    run_recipe.save(str(tmp_path), run_recipe.of_run(args, run_recipe.resolved_flags(args), None))
    again = parse(f"--recipe {tmp_path}/recipe.yaml")
    assert (again.text_pooler_in_head, again.wd_exclude_patterns) == (False, ["a", "b"])


def test_another_loss_has_its_own_settings(tmp_path, write):
    args = parse("--loss neuclip --npn-prototypes 20 --rho 5 --lr 2e-3 --wd 0.3 --train-data x.tar --name run")
    run_recipe.save(str(tmp_path), run_recipe.of_run(args, run_recipe.resolved_flags(args), None))
    saved = f"--recipe {tmp_path}/recipe.yaml"
    assert parse(saved).normalizer == "prototypes" and parse(f"{saved} --loss neuclip").npn_prototypes == 20
    other = parse(f"{saved} --loss fastclip --gamma 0.4")
    assert (other.loss, other.normalizer, other.encoder_objective) == ("fastclip-v3", "table", "compositional")
    assert (other.gamma, other.rho, other.npn_prototypes, other.lr, other.wd) == (0.4, 8.5, None, 2e-3, 0.3)
    assert parse(f"{saved} --loss clip").normalizer is None
    # An alias is the same loss.
    assert parse(f"--recipe {write('flags: {loss: fastclip-v3, rho: 3}')} --loss fastclip").rho == 3


def test_a_run_of_tuneclip_can_be_swept_from_its_recipe(tmp_path, monkeypatch):
    monkeypatch.setattr("training_ext.components.recovery.recovered.read", lambda path: {"epochs": 5.0})
    args = parse("--loss tuneclip --pretrained w.pt --train-data x.tar --osr-save s.state --name run")
    run_recipe.save(str(tmp_path), run_recipe.of_run(args, run_recipe.resolved_flags(args), None))
    again = parse(f"--recipe {tmp_path}/recipe.yaml --osr-load s.state --lr 1e-6")
    assert (again.lr, again.osr_epochs, again.osr_surrogate) == (1e-6, 5.0, None)
    with pytest.raises(InputError, match="--osr-surrogate: 'identity' with --osr-load"):
        parse(f"--recipe {tmp_path}/recipe.yaml --osr-load s.state --osr-surrogate identity")


def test_the_command_line_changes_the_recovery_of_a_recipe(tmp_path, monkeypatch):
    def saved(flags):
        args = parse(f"--loss tuneclip --pretrained w.pt --train-data x.tar --name run {flags}")
        run_recipe.save(str(tmp_path), run_recipe.of_run(args, run_recipe.resolved_flags(args), None))
        return f"--recipe {tmp_path}/recipe.yaml"

    recipe = saved("--osr-surrogate hinge --osr-transfer moments")
    assert parse(recipe).osr_surrogate == "hinge" and parse(recipe).osr_transfer == "moments"
    for flags, expected in {
        "--osr-epochs 0": (0.0, "both", None),
        "--loss clip": (5.0, "moments", None),
        "--loss clip --osr-epochs 0": (0.0, "both", None),
        "--loss fastclip": (5.0, "moments", "identity"),
        "--osr-transfer none": (5.0, "none", None),
    }.items():
        args = parse(f"{recipe} {flags}")
        assert (args.osr_epochs, args.osr_transfer, args.osr_surrogate) == expected, flags
    with pytest.raises(InputError, match="--osr-transfer: has no effect without a recovery"):
        parse(f"{recipe} --osr-epochs 0 --osr-transfer both")

    # A file of statistics may be gone later; --osr-epochs resumes the training, or recovers anew.
    with monkeypatch.context() as patch:
        patch.setattr("training_ext.components.recovery.recovered.read", lambda path: {"epochs": 1.5})
        recipe = saved("--osr-load s.state")
    with pytest.raises(InputError, match="there is no file 's.state'; .* give its --osr-epochs instead"):
        parse(recipe)
    args = parse(f"{recipe} --osr-epochs 1.5")
    assert (args.osr_load, args.osr_epochs, args.osr_surrogate) == (None, 1.5, "identity")


def test_a_global_batch_that_does_not_divide(write, eight):
    path = write(f"global_batch_size: 100\nflags: {{{MINE}}}")
    with pytest.raises(InputError, match=r"global batch of 100, .* 8 process\(es\) x --accum-freq 1; .*--batch-size"):
        parse(f"--recipe {path}")


BAD = {
    "": "is not a mapping with the key 'flags'",
    "{a: 1": "is not YAML: ",
    "flags: !!python/object/apply:os.system [echo]": "is not YAML: could not determine a constructor",
    "flags: [1]": r"flags is \[1\]; it must be a mapping of flags",
    "flags: {}\nlr: 1": "'lr' is not one of source, .*flags belong under 'flags'",
    "flags: {}\nsamples: 0": "samples is 0; it must be a whole number >= 1",
    "flags: {}\nnotes: [1]": r"notes is \[1\]; it must be a list of texts",
    "flags: {batch_size: 1}\nglobal_batch_size: 2": "both global_batch_size and the flag batch_size",
    "flags: {lr-tau: 1}": "lr-tau is not a flag; did you mean 'lr_tau'?",
    "flags: {recipe: x.yaml}": "recipe is not a flag",
    "flags: {lr: [1]}": r"lr is \[1\]; --lr takes one number or text",
    "flags: {lr: fast}": "argument --lr: invalid float value: 'fast'",
    "flags: {local_loss: 1}": "local_loss is 1; it must be true or false",
    "flags: {aug_cfg: {scale: '(0.5,'}}": r"--recipe: '.*mine.yaml': --aug-cfg: must be NAME=VALUE",
    "flags: {image_mean: 1}": "image_mean is 1; it must be a list",
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_recipe_is_one_line(text, write, refused):
    assert re.search(BAD[text], refused(f"--recipe {write(text)} --dataset-type shapes --train-num-samples 48"))


def test_a_name_that_is_not_there(refused, tmp_path):
    assert "'neuclip-cc12' is unknown; did you mean 'neuclip-cc12m'?" in refused("--recipe neuclip-cc12")
    assert "see --list-recipes" in refused("--recipe xyzzy")
    assert "cannot be read: No such file" in refused(f"--recipe {tmp_path}/none.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    assert "is not YAML" in refused(f"--recipe {tmp_path}/bytes.yaml")


def test_a_run_repeats_from_what_it_saved(run, write, tmp_path, datasets):
    flags = f"{MINE}, model: ViT-test, precision: fp32, warmup: 2, log_every_n_steps: 1"
    path = write(f"global_batch_size: 8\nnotes: [a note]\nflags: {{{flags}}}")
    first = run("first", f"--recipe {path} {datasets['shards']} --lr 2e-3")
    saved = yaml.safe_load((first.path / "recipe.yaml").read_text())
    assert saved["global_batch_size"] == 8 and saved["samples"] == 48 and saved["notes"] == ["a note"]
    assert saved["source"].endswith(f"from the recipe {path}") and saved["flags"]["lr"] == 2e-3
    assert set(saved) <= set(TYPES) and not {"name", "logs", "resume"} & set(saved["flags"])
    second = run("second", f"--recipe {first.path}/recipe.yaml", lambda flags: ext_main(flags[len(TINY.split()) :]))
    assert second.logged() == first.logged() and len(first.logged()) == 6
    assert yaml.safe_load((second.path / "recipe.yaml").read_text())["flags"] == saved["flags"]


@pytest.mark.parametrize(
    "arguments", ["--dataset-type shapes", "--train-data x-{0..5}.tar --batch-size 4 --accum-freq 2"]
)
def test_a_dry_run_writes_nothing_and_counts_as_the_training_does(arguments, run, write, capsys, tmp_path, datasets):
    path = write(f"samples: 48\nflags: {{{MINE}}}")
    shapes = " --train-num-samples 48" if "shapes" in arguments else ""
    before = sorted(tmp_path.rglob("*"))
    assert ext_main([*TINY.split(), *f"{arguments}{shapes} --recipe {path} --dry-run --name run".split()]) == 0
    text = capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before
    assert "--lr 1e-3" not in text and re.search(r"recipe .*--lr 0\.001", text)
    data = arguments if shapes else arguments.replace("--train-data x-{0..5}.tar", datasets["shards"])
    trained = run("trained", f"{data}{shapes} --recipe {path}")
    steps = trained.checkpoint(1)["open_clip_ext"]["state"]["steps"]
    assert f"{steps} per epoch, {steps} in total" in text and steps == 6
    assert "total         48 samples" in text
    about = float(re.search(r"a checkpoint +([\d.]+) MiB", text)[1]) * 2**20
    assert (trained.path / "checkpoints" / "epoch_1.pt").stat().st_size == pytest.approx(about, rel=0.1)
    warned = re.findall(r"WARNING \| (?:root \| )?(--\S+: .*)", trained.log)
    assert len(warned) >= 2 and " ".join(text.split("Warnings")[1].split()).startswith(" ".join(warned))


@pytest.mark.slow
def test_the_page_names_every_recipe_and_shows_what_is_printed(eight, monkeypatch, capsys):
    text = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    assert [name for name in NAMES if f"`{name}`" not in text] == []
    monkeypatch.setenv("COLUMNS", "100")
    assert ext_main(["--recipe", "neuclip-cc12m", "--dry-run"]) == 0
    for line in filter(None, capsys.readouterr().out.partition("\nTraining\n")[2].splitlines()):
        if "predicted" in line:  # another PyTorch may keep other tensors for the backward pass
            name, size = line.rsplit(maxsplit=2)[0].strip(), float(line.split()[-2].replace(",", ""))
            shown = re.search(rf"{name} +([\d,.]+) MiB", text)[1].replace(",", "")
            assert size == pytest.approx(float(shown), rel=0.1)
        else:
            assert f"\n    {line}\n" in text


def test_a_dry_run_without_recipe(capsys, refused, datasets, write):
    flags = "--loss queue --lr 1e-3 --train-data x.tar --dry-run"
    assert ext_main([*TINY.split(), *flags.split(), "--train-num-samples", "64"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Flags") and "queue of embeddings" in text and "Recipe" not in text
    assert "settings.md   for 64 pairs per epoch --loss queue --rho 2.2 " in text
    assert "Not found, so that a training would end here\n  --train-data: 1 of 1 shards cannot be read: 'x.tar'" in text
    assert ext_main([*TINY.split(), *datasets["csv"].split(), *"--loss clip --val-data y.csv --dry-run".split()]) == 0
    assert "would end here\n  --val-data: 'y.csv' does not exist\n" in capsys.readouterr().out
    assert "'x.tar'" in refused(flags)
    assert "is missing; give it, or --train-data" in refused("--loss queue --lr 1e-3 --dry-run")
    # The samples are counted, as the training would.
    assert ext_main([*TINY.split(), *datasets["shards"].split(), "--loss", "fastclip-v3", "--dry-run"]) == 0
    assert "48 per epoch" in capsys.readouterr().out
    assert "more than the 4 samples" in refused(f"{flags} --accum-freq 9 --train-num-samples 4 --workers 0")
    # What it would refuse of the data, so does its plan.
    line = refused(f"{datasets['shards']} --loss queue --lr 1e-3 --workers 7 --dry-run")
    assert "get 0 of the 6 shards each" in line
    line = refused(f"{datasets['shards']} --loss queue --lr 1e-3 --train-num-samples 480 --workers 0 --dry-run")
    assert "--train-num-samples: 480, but" in line
    # Samples are counted in the data at hand, whatever the recipe or a flag that OpenCLIP does not look at says.
    parts = datasets["shards"].replace("{000000..000005}", "{000000..000002}")
    first = datasets["shards"].split()[1].replace("{000000..000005}", "000000")
    path = write("samples: 48\nflags: {epochs: 1}")
    for data, samples, steps in (
        (f"{parts} --recipe {path}", 24, 3),
        (datasets["shards"].replace("000005}.tar", f"000005}}.tar::{first}"), 56, 7),
    ):
        assert ext_main([*TINY.split(), *data.split(), "--loss", "queue", "--workers", "1", "--dry-run"]) == 0
        text = capsys.readouterr().out
        assert f"{samples} per epoch" in text and f"{steps} per epoch" in text
    assert "--keep-best" in refused(f"{flags} --train-num-samples 64 --keep-best x")
    # OpenCLIP's own training has a plan, too.
    assert ext_main([*TINY.split(), "--train-data", "x.tar", "--train-num-samples", "64", "--dry-run"]) == 0
    assert "loss:" not in capsys.readouterr().out
    assert ext_main([*TINY.split(), *"--dataset-type synthetic --train-num-samples 7 --dry-run".split()]) == 0
    assert "so nothing is trained" in capsys.readouterr().out


def plan_of(capsys, flags: str) -> str:
    common = f"{TINY} --loss queue --lr 1e-3 --train-num-samples 64 --epochs 2 --batch-size 4 --dry-run"
    assert ext_main([*common.split(), *flags.split()]) == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "flags, part",
    [("--warmup 10", "32 in total, 10 of them warm-up"), ("--warmup 10 --skip-scheduler", "32 in total epochs")],
)
def test_a_plan_has_the_steps_of_the_training(flags, part, capsys):
    assert part in plan_of(capsys, f"--dataset-type shapes --name x {flags}")


def test_a_plan_shows_what_was_set_for_the_user_and_what_was_not_found(capsys):
    flags = "--train-data no.tar --val-data none.tar --imagenet-val nowhere"
    text = plan_of(capsys, flags)
    shown, _, problems = text.partition("Not found, so that a training would end here")
    for flag, path in zip(*[iter(flags.split())] * 2, strict=True):
        assert re.search(rf"{flag}: [^-]*'{path}'", problems), problems
    own = shown.partition("set for you")[2].partition(" Training ")[0]
    assert "--rho " in own and "--lr-tau 0.0" in own and "--save-frequency" not in shown and "--loss-eps" not in shown
    assert "Not found" not in plan_of(capsys, "--dataset-type shapes --val-num-samples 8")


def test_a_dry_run_counts_rows_not_epochs_and_says_what_it_leaves_out(capsys, datasets):
    """The table has a row for each of the 48 samples, though an epoch has 24."""
    shards = f"{datasets['shards']} --train-num-samples 24 --workers 1".split()
    args = parse_args([*TINY.split(), *shards, "--loss", "fastclip-v3"])
    assert dry_run.counted(args, None, True)[:2] == (24, 48)
    args = parse_args([*TINY.split(), *shards, "--loss", "neuclip"])
    assert dry_run.counted(args, None, True)[:2] == (24, 24)
    models = "--model ViT-B-32 --distill-model ViT-B-32 --distill-pretrained openai"
    flags = f"--loss drrho-clip {models} --opt timm/lamb --lr 1e-3 --eps 1e-6 --dry-run"
    assert ext_main([*TINY.split(), *shards, *flags.split()]) == 0
    text = capsys.readouterr().out
    model, other = (re.search(rf"^  {name} +([\d,.]+) MiB", text, re.M)[1] for name in ("model", "reference model"))
    assert model == other and "not counted: the state of --opt timm/lamb" in text


def test_the_plan_of_a_model_with_frozen_batch_norms():
    flags = "--loss sogclr --model RN50 --lock-image --lock-image-freeze-bn-stats --train-data x.tar".split()
    model, *_ = tried_models(parse_args(flags))
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    assert trained and not any(name.startswith("visual.") or name == "logit_scale" for name in trained)


def test_the_plan_with_a_reference_model_of_a_hub():
    """Nothing is downloaded, and the model is measured all the same."""
    reference = "--distill-model hf-hub:foo/bar --distill-pretrained openai"
    args = parse_args(f"--loss drrho-clip --model ViT-B-32 {reference} --train-data x.tar".split())
    assert failure(args) is None and len(tried_models(args)) == 1
