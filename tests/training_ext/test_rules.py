"""THE table of rules, row by row; and what misleads in other checks of flags."""

import re

import open_clip
import pytest
from conftest import TINY

from open_clip_ext.errors import InputError
from open_clip_ext.main import main
from training_ext.core import hosts
from training_ext.core.component import registry
from training_ext.flags.params import parse_args
from training_ext.flags.preflight import prepare_shapes
from training_ext.flags.rules import RULES, Given, check_rules

SHAPES = "--dataset-type shapes --train-num-samples 16 --epochs 4 --batch-size 8"
OURS = f"{SHAPES} --loss fastclip-v3"
CLIP = f"{SHAPES} --loss clip"
REFERENCE = "--distill-model RN50 --distill-pretrained openai"

CASES = [
    (f"{OURS} --log-every-n-steps 0", "--log-every-n-steps: 0"),
    (f"{OURS} --wd -1", "--wd: -1.0"),
    (f"{OURS} --grad-clip-norm 0", "--grad-clip-norm: 0.0 .*leave it out not to clip"),
    ("--loss clip --train-data x.tar --train-num-samples 0", "--train-num-samples: 0"),
    (f"{CLIP} --warmup -5", "--warmup: -5"),
    (f"{CLIP} --workers -1", "--workers: -1"),
    (f"{CLIP} --lr inf", "--lr: inf"),
    (f"{CLIP} --train-data-upsampling-factors 1::2", "--train-data-upsampling-factors: does nothing without --d"),
    (f"{CLIP} --save-frequency -3", "--save-frequency: -3"),
    (f"{CLIP} --val-frequency -1", "--val-frequency: -1"),
    (f"{CLIP} --zeroshot-frequency -1", "--zeroshot-frequency: -1"),
    (f"{CLIP} --remote-sync-frequency 0", "--remote-sync-frequency: 0"),
    (f"{CLIP} --lr-cooldown-end -1", "--lr-cooldown-end: -1.0"),
    (f"{CLIP} --lr-cooldown-power 0", "--lr-cooldown-power: 0.0"),
    (f"{CLIP} --momentum 1", r"--momentum: 1.0 .*in \[0, 1\)"),
    (f"{CLIP} --force-context-length 1", "--force-context-length: 1 .*a caption's start and end, to 65536"),
    (f"{CLIP} --force-patch-dropout -0.5", "--force-patch-dropout: -0.5"),
    (f"{CLIP} --lock-image --lock-image-unlocked-groups -1", "--lock-image-unlocked-groups: -1"),
    (f"{CLIP} --lock-text --lock-text-unlocked-layers -1", "--lock-text-unlocked-layers: -1"),
    (f"{CLIP} --epochs-cooldown 5", "--epochs-cooldown: 5 of --epochs 4"),
    (f"{CLIP} --epochs-cooldown 1", "--epochs-cooldown: does nothing without --lr-scheduler const-cooldown"),
    (f"{CLIP} --lock-image-unlocked-groups 2", "--lock-image-unlocked-groups: does nothing without --lock-image"),
    (f"{CLIP} --lock-text-unlocked-layers 2", "--lock-text-unlocked-layers: does nothing without --lock-text"),
    ("--loss clip --train-data x.csv --val-data x.csv", "--val-data: 'x.csv' is trained on, by --train-data 'x"),
    (f"{CLIP} --model ViT-B-32 --pretrained-image", "--pretrained-image: does nothing without a --model with an"),
    (f"{CLIP} --model ViT-B-23", "--model: 'ViT-B-23' is unknown to this open_clip_torch; did you mean 'ViT-B-32'?"),
    (f"{CLIP} --several-captions", "--several-captions: is for a csv, not for 'shapes'.*--captions-field"),
    ("--loss clip --train-data x.csv --captions-field a", "--captions-field: 'a' is .*'x.csv'.*--several-captions"),
    ("--loss clip --train-data x.csv --json-text-key a;b", "--json-text-key: 'a;b' is .*'x.csv'.*--several-captions"),
    ("--loss clip --train-data x.tar --json-text-key a --captions-field b", "--captions-field: 'b' with --json-text"),
    ("--loss clip --train-data x.tar --json-text-key a --json-text-key-probs 1 2", "--json-text-key-probs: .*each"),
    ("--loss clip --train-data x.tar --json-text-key a --json-text-key-probs -1", "--json-text-key-probs: .*least 0"),
    ("--loss neuclip", "--train-data: --loss neuclip needs data"),
    ("--loss clip --train-data x --val-data v.csv --dataset-type webdataset", "--dataset-type: .*--val-data is 'v.csv"),
    ("--loss neuclip --train-data x.csv --dataset-type webdataset", "--dataset-type: .*--train-data is 'x.csv'; leave"),
    ("--loss neuclip --train-data x.csv --val-data v.tar --dataset-type csv", "--dataset-type: 'csv'.*--val-data"),
    ("--loss neuclip --train-data x.tar --dataset-type csv", "--dataset-type: 'csv'.*--train-data"),
    (f"{OURS} --same-key a", "--same-key: 'a' is a column or a field, and shapes has none"),
    (f"{OURS} --positives a", "--positives: 'a' is a column or a field, and shapes has none"),
    (f"{OURS} --same-caption --same-key a", "--same-caption: with --same-key 'a'; give one of the two"),
    (f"{SHAPES} --loss amorlip --same-caption", "--same-caption: --loss amorlip as given .*--normalizer table"),
    (
        "--loss fastclip-v3 --negatives both --train-data x.csv --same-key a",
        "--same-key: --loss fastclip-v3 as given .*--negatives cross",
    ),
    (f"{OURS} --positives a --same-key b", "--positives: 'a' with --same-key or --same-caption; give one of the three"),
    (f"{SHAPES} --loss tuneclip --positives caption", "--positives: --loss tuneclip as .*--surrogate identity"),
    (f"{SHAPES} --loss siglip-chunked --positives caption", "--positives: --loss siglip-chunked as .*clip-chunked"),
    (f"{CLIP} --batch-size 1", "--batch-size: 1 in 1 process"),
    (f"{SHAPES} --loss amorlip --batch-size 1", "--batch-size: 1; --loss amorlip needs more pairs"),
    (f"{OURS} --horovod", "--horovod: --loss fastclip-v3 .*torchrun"),
    (f"{OURS} --model coca_ViT-B-32", "--model: .*--loss clip with CoCa"),
    (f"{CLIP} --opt timm/adamw", "--lr: --opt timm/adamw"),
    (f"{CLIP} --distill-model RN50", "--distill-model: 'RN50' with --distill-pretrained None; give both or none"),
    (f"{CLIP} --distill-pretrained openai", "--distill-model: None with --distill-pretrained 'openai'"),
    (f"{SHAPES} --loss drrho-clip", "--distill-model: --loss drrho-clip needs a reference model"),
    (f"{OURS} {REFERENCE}", "--distill-model: 'RN50' with --loss fastclip-v3, which does not distill"),
    (f"{SHAPES} --loss siglip {REFERENCE}", r"--distill-model: 'RN50' with SigLIP's loss"),
    (
        f"{SHAPES} --loss drrho-clip --model ViT-B-32 --distill-model ViT-L-14-336 --distill-pretrained openai",
        "--distill-model: 'ViT-L-14-336' reads images or captions otherwise than --model ViT-B-32",
    ),
    (f"{CLIP} --save-frequency 2 --delete-previous-checkpoint", "--delete-previous-checkpoint: with --save-freq"),
    (f"{SHAPES} --loss neuclip --split-rows-above 0", "--split-rows-above: 0 with --loss neuclip"),
    (f"{OURS} --split-rows-above 1 --remote-sync x", "--split-rows-above: 1 with --remote-sync"),
    (f"{CLIP} --keep-best clip_val_loss --remote-sync x --remote-sync-protocol fsspec", "clip_val_loss with"),
    (f"{CLIP} --resume latest --remote-sync x --remote-sync-protocol fsspec", "'latest' with .*-protocol fsspec, for"),
    (f"{CLIP} --resume latest --remote-sync x --save-most-recent", "'latest' with .* --save-most-recent, for"),
    (f"{CLIP} --report-to nonsense", "--report-to: 'nonsense' is not wandb"),
    (f"{CLIP} --report-to wandb", "--report-to: 'wandb' needs wandb, which is not installed; pip install wandb"),
    (f"{CLIP} --report-to all", "--report-to: 'all' needs wandb"),
    (f"{CLIP} --fsdp --zeroshot-data x", "--zeroshot-data: 'x' with --fsdp"),
    (f"{OURS} --fsdp --osr-epochs 1", "--osr-epochs: 1 with --fsdp"),
    (f"{OURS} --fsdp --keep-best x", "--keep-best: 'x' with --fsdp"),
    (f"{OURS} --fsdp --precision pure_bf16", "--precision: 'pure_bf16' with --fsdp"),
    (f"{OURS} --torchcompile --torchcompile-strategy step", "--torchcompile-strategy: 'step' with --loss"),
    (f"{OURS} --text-layer-decay 2", "--text-layer-decay: 2.0"),
    (f"{OURS} --image-layer-decay 0", "--image-layer-decay: 0.0"),
]
OF_TASKS = ("--fsdp", "--json-text-key", "--torchcompile-strategy", "-layer-decay")
BEFORE_TASKS = ("--horovod",)


def is_known(arguments: str) -> bool:
    return not any(flag in arguments for flag in (BEFORE_TASKS if hosts.installed().HAS_TASKS else OF_TASKS))


def given(monkeypatch, arguments: str):
    args = parse_args(arguments.split())
    prepare_shapes(args)
    monkeypatch.setattr(hosts.installed().main(), "wandb", None)  # as where it is not installed
    monkeypatch.setenv("WORLD_SIZE", "2" if "--fsdp" in arguments or "amorlip" in arguments else "1")
    return args


@pytest.mark.parametrize("arguments, line", CASES)
def test_a_rule(monkeypatch, arguments, line):
    if not is_known(arguments):
        pytest.skip("this OpenCLIP has no such flag")
    with pytest.raises(InputError, match=line):
        check_rules(given(monkeypatch, arguments))


@pytest.mark.parametrize("part", ["multimodal_cfg", "genlip_cfg", "genlap_cfg", "audio_cfg"])
@pytest.mark.parametrize("flags", [OURS, f"{CLIP} --batch-size 1"])
def test_a_model_is_known_by_its_parts_not_its_name(monkeypatch, flags, part):
    """OpenCLIP's own loss trains a captioning part, without negatives."""
    monkeypatch.setattr(open_clip, "get_model_config", lambda name: {"vision_cfg": {}, part: {}})
    args = given(monkeypatch, f"{flags} --model other")
    if flags == OURS or part != "multimodal_cfg":
        with pytest.raises(InputError, match=f"--model: 'other' has {part}"):
            check_rules(args)
    else:
        check_rules(args)


def test_every_rule_has_a_case(monkeypatch):
    broken = set()
    for arguments, _ in filter(lambda case: is_known(case[0]), CASES):
        run = Given(given(monkeypatch, arguments))
        broken.add(next(number for number, rule in enumerate(RULES) if rule.flag in run and rule.wrong(run)))
    left = {rule.flag for number, rule in enumerate(RULES) if number not in broken}
    variable_text = {"model"}  # a model of OpenCLIP 4's
    of_tasks = {"text_layer_decay", "image_layer_decay", "torchcompile_strategy", "precision"}
    of_tasks |= {"captions_field", "json_text_key", "json_text_key_probs"}
    of_fsdp = {"osr_epochs", "keep_best", "zeroshot_data"}
    assert left <= variable_text | ({"horovod"} if hosts.installed().HAS_TASKS else of_tasks | of_fsdp)


def test_rules_read_flags_that_are_there(monkeypatch):
    """A misspelled one is an error; one of a component that was taken out, or that this OpenCLIP lacks, is not read."""
    for arguments, _ in filter(lambda case: is_known(case[0]), CASES):
        args = given(monkeypatch, arguments)
        for kind in registry().values():
            names = {option.name for option in kind.options}
            for name in set() if names & args.given_flags else names:
                delattr(args, name)
        run = Given(args)
        for rule in RULES:
            if rule.flag in run:
                rule.wrong(run)
        with pytest.raises(AttributeError):
            run.misspelled  # noqa: B018


REMOTE = "--dataset-type webdataset --train-data https://a.example/00.tar"
HUGE = "--dataset-type synthetic --train-num-samples 9000000000"
OF_MODEL = f"{SHAPES} --model ViT-B-32 --loss drrho-clip --distill-model"
SIGLIP = "ViT-B-16-SigLIP --distill-pretrained webli"
TUNE = f"{SHAPES} --loss tuneclip"
# What the parser, the parts of a loss, the features and the looks at the data refuse.
OTHERS = [
    (f"{OURS} --temperature 0.03", "--temperature: 0.03 is no scheme; FastCLIP's --temperature is --tau-init here"),
    (f"{OURS} --lr_tau 1e-4", "unknown: --lr_tau 1e-4; did you mean '--lr-tau'"),
    (f"{OURS} --fastclip_eps 1e-6", ".*give --loss-eps"),
    (f"{OURS} --data_size 16", ".*leave it out, since the samples are counted"),
    (f"{OURS} --split-rows-above -1", "--split-rows-above: -1.0 is out of range; it must be at least 0"),
    (f"{OURS} --multiply_tau", ".*fastclip-v3 and fastclip-v0"),
    (f"{OURS} --temperature_scheme global_learnable", ".*global_learnable fastclip-v3"),
    (f"{SHAPES} --loss isogclr --tau-min 0.5", ".*tau.min: 0.5 is above tau_start, 0.01"),
    (f"{OURS} --tau-init 0.02 --tau-min 0.03", "--tau-init: 0.02 is below --tau-min 0.03; give at least that"),
    (f"{SHAPES} --loss neuclipp", "--loss: 'neuclipp' .*clip, siglip, .*cyclip.*did you mean 'neuclip'?"),
    (f"{OURS} --npn-prototyps 3", "unknown: --npn-prototyps 3.*'--npn-prototypes'?"),
    (f"{SHAPES} --loss neuclip --npn-opt lion", "--npn-opt: .*'lion'.*adagrad, adam, adamw, sgd"),
    (f"{SHAPES} --loss neuclip --reference-gap", "--reference-gap: .*'prototypes'"),
    (f"{SHAPES} --loss sogclr --tau-min 0.03", "--tau-min: .*sogclr"),
    (f"{SHAPES} --loss amorlip --normalizer mlp", "--normalizer: the loss 'amorlip' does not use it"),
    (f"{OURS} --shard-sizes x.json", "--shard-sizes: .*shapes.*does not use"),
    (f"{SHAPES} --loss siglip --shard-sizes x.json", "--shard-sizes: .*--loss siglip.*does not use"),
    (f"{CLIP} --siglip", "--siglip: .*--loss clip"),
    *((f"{SHAPES} {flag}", f"{flag.split()[0]}: .*needs --loss") for flag in (
        "--shard-sizes x.json", "--same-key group", "--several-captions", "--osr-epochs 1", "--keep-best x",
        "--save-every-steps 5", "--split-rows-above 10", "--normalizer table",
    )),
    (f"{OF_MODEL} {SIGLIP}", "--distill-model: 'ViT-B-16-SigLIP' reads .*tokenizer"),
    (f"{OF_MODEL} {SIGLIP} --model ViT-B-16-SigLIP", "--distill-model: 'ViT-B-16-SigLIP' reads .*--image-mean"),
    (f"{OURS} --epochs -1", "--epochs: -1 .*from 0"),
    (f"{OURS} --epochs 1 --osr-epochs inf", "--osr-epochs: inf .*>= 0"),
    (f"{OURS} --osr-epochs 1 --epochs -1 --help", "--epochs: -1 is out of range; it must be a whole number from 0"),
    (f"{OURS} --name=../x", "--name: '../x' is not a folder inside --logs"),
    (f"{OURS} --name=", "--name: '' is not a folder inside --logs"),
    (f"{CLIP} --name /x", "--name: '/x' is not a folder inside --logs"),
    # OpenCLIP's own start
    (f"{OURS} --accum-freq 0", "--accum-freq: 0 must be an integer of at least 1"),
    (f"{CLIP} --image-std 0", "--image-std: 0.0: OpenCLIP could not make a step: ValueError: std evaluated to zero"),
    # Data
    (f"{OURS} --batch-size 32", "--batch-size: 32 .*16 samples"),
    (f"{OURS} --accum-freq 3", "--batch-size: 8 .*--accum-freq 3 .*16 samples"),
    (f"{SHAPES} --loss queue --batch-size 10", "--queue-size: 16 samples in global batches of 10.*at most 8"),
    (f"{SHAPES} --loss queue --queue-size 16 --batch-size 16", "--queue-size: 16 holds nothing"),
    (f"{HUGE} --loss queue --queue-size 9000000000", "--queue-size: 9000000000 .*GiB.*lower it"),
    (f"{HUGE} --loss neuclip --npn-prototypes 1000000000", "--npn-prototypes: 1000000000 of .*GiB.*lower"),
    (f"{HUGE}00 --loss queue --model ViT-B/32 --queue-size 2000000000", "--queue-size: 2000000000 of dimension 512"),
    (f"{OURS} --train-data x.csv", "--train-data: 'x.csv' .*--train-num-samples"),
    (f"{OURS} --val-data x.csv", "--val-data: 'x.csv' .*--val-num-samples"),
    (f"{OURS} --train-num-samples 0", "--train-num-samples: 0 .*from 1"),
    (f"{OURS} --shapes-seed -1", "--shapes-seed: -1 .*at least 0"),
    (f"{OURS} --dataset-type synthetic --shapes-seed 1", "--shapes-seed: has no effect without --dataset-type"),
    (f"{OURS} --dataset-type synthetic --shapes-shifted", "--shapes-shifted: has no effect without --dataset-type"),
    ("--dataset-type synthetic --loss neuclip", "--train-num-samples: .*synthetic.*at least 1"),
    ("--train-data x.parquet --loss neuclip", "--train-data: 'x.parquet'.*--dataset-type"),
    (f"{REMOTE} --loss fastclip-v3", "--train-data: .*'https://a.example/00.tar'.*--shard-sizes.*{\"00.tar\": "),
    ("{resampled} --loss neuclip --train-data-upsampling-factors 1::2", ".*-upsampling-factors: 1::2: OpenCLIP c"),
    ("{resampled} --loss neuclip --train-data-upsampling-factors lots", ".*-upsampling-factors: lots: OpenCLIP c"),
    ("{csv} --loss fastclip-v3 --same-key nope", "--same-key: .*'nope'.*'title'"),
    ("{shards} --loss fastclip-v3 --same-key group", "--same-key: .*'000000000'.*.tar'.*no .json.*.png"),
    (f"{SHAPES} --max-bad-samples nan", "--max-bad-samples: nan .*from 0 to 1"),
    (f"{SHAPES} --logs /dev/null", "--logs: '/dev/null' cannot be written to: '/dev/null' is a file; give a writable"),
    (f"{CLIP} --logs /proc/x --name y", "--logs: '/proc/x' cannot be written to"),
    # Recovery, evaluation, checkpoints
    (f"{TUNE} --osr-epochs 1 --osr-transfer all", "--osr-transfer: .*'all'.*both, moments, table"),
    ("--dataset-type shapes --val-num-samples 8 --loss clip --osr-epochs 1", "--osr-epochs: needs data to train on"),
    (f"{TUNE} --osr-transfer both", "--osr-transfer: .*without a recovery.*--osr-epochs"),
    (f"{TUNE} --osr-surrogate hinge", "--osr-surrogate: .*--osr-epochs"),
    (f"{TUNE} --osr-save x", "--osr-save: .*--osr-epochs"),
    (f"{CLIP} --osr-epochs 1 --osr-surrogate identity", "--osr-surrogate: .*--loss clip.*no surrogates"),
    (f"{OURS} --osr-epochs 1 --osr-surrogate hinge", "--osr-surrogate: 'hinge' is neither .*--surrogate identity"),
    (f"{CLIP} --osr-epochs 1 --osr-transfer table", "--osr-transfer: 'table' .*--loss clip.*moments"),
    (f"{TUNE} --osr-epochs 1 --osr-transfer none --osr-save x", "--osr-save: .*none"),
    (f"{TUNE} --osr-epochs 1 --osr-transfer none --osr-surrogate hinge", "--osr-surrogate: 'hinge' .*recovers nothing"),
    (f"{TUNE} --osr-epochs 1 --osr-save no/x", "--osr-save: .*no/x.*does not exist"),
    (f"{TUNE} --osr-epochs 1 --osr-save /proc/x", "--osr-save: '/proc' cannot be written to"),
    (f"{TUNE} --osr-load x --osr-save x", "--osr-save: .*--osr-load"),
    (f"{CLIP} --val-num-samples 16 --keep-best R@1", "--keep-best: 'R@1' .*image_to_text_R@1"),
    (f"{CLIP} --keep-best image_to_text_R@1", "--keep-best: .*--val-data"),
    (f"{CLIP} --val-num-samples 16 --val-frequency 0 --keep-best x", "--keep-best: .*with a frequency above 0"),
    (f"{CLIP} --val-num-samples 16 --logs none --keep-best image_to_text_R@1", "--keep-best: .*--logs none"),
    (f"{OURS} --save-every-steps 0", "--save-every-steps: 0 is out of range.*at least 1"),
    (f"{CLIP} --save-every-steps 5", "--save-every-steps: --loss clip is OpenCLIP's own"),
    (f"{OURS} --save-every-steps 5 --logs none", "--save-every-steps: 5 with --logs none"),
    (f"{OURS} --model ViT-B-99 --dry-run", "--model: 'ViT-B-99' is unknown"),
]


@pytest.mark.parametrize("arguments, line", OTHERS)
def test_what_else_is_refused(capsys, tmp_path, datasets, arguments, line):
    """By the whole command, and nothing is written."""
    logs = "" if "--logs" in arguments else f" --logs {tmp_path}"
    assert main(f"{TINY} {arguments}{logs}".format(**datasets).split()) == 2
    error = capsys.readouterr().err.strip()
    assert re.fullmatch(f"open_clip_ext: error: {line}.*", error.splitlines()[-1]) and not list(tmp_path.iterdir())
