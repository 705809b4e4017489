"""THE table of rules, row by row; and what misleads in other checks of flags."""

import re

import pytest

from open_clip_ext.errors import InputError
from training_ext.flags.params import parse_args
from training_ext.flags.preflight import prepare_shapes
from training_ext.flags.rules import RULES, Given, check_rules
from training_ext.openclip.hosts import TASKS, host

SHAPES = "--dataset-type shapes --train-num-samples 16 --epochs 4 --batch-size 8"
OURS = f"{SHAPES} --loss fastclip-v3"
CLIP = f"{SHAPES} --loss clip"
REFERENCE = "--distill-model RN50 --distill-pretrained openai"

CASES = [
    (f"{OURS} --split-rows-above -1", "--split-rows-above: -1.0"),
    ("--loss clip --dataset-type synthetic --train-num-samples 0", "--train-num-samples: 0"),
    (f"{OURS} --accum-freq 0", "--accum-freq: 0"),
    (f"{OURS} --log-every-n-steps 0", "--log-every-n-steps: 0"),
    (f"{OURS} --lr -1", "--lr: -1.0"),
    (f"{OURS} --lr nan", "--lr: nan"),
    (f"{OURS} --wd -1", "--wd: -1.0"),
    (f"{OURS} --grad-clip-norm 0", "--grad-clip-norm: 0.0 .*leave it out not to clip"),
    (f"{OURS} --force-context-length 1", "--force-context-length: 1"),
    (f"{OURS} --image-std 0", r"--image-std: \[0.0\]"),
    (f"{OURS} --image-mean 0.5 0.5", r"--image-mean: \[0.5, 0.5\]; give 1 or 3"),
    (f"{OURS} --image-std 0.5 0.5", r"--image-std: \[0.5, 0.5\]; give 1 or 3"),
    (f"{OURS} --lock-image --lock-image-unlocked-groups -1", "--lock-image-unlocked-groups: -1"),
    (f"{OURS} --lock-text --lock-text-unlocked-layers -1", "--lock-text-unlocked-layers: -1"),
    ("--loss neuclip", "--train-data: --loss neuclip needs data"),
    ("--loss clip --train-data x --val-data v.csv --dataset-type webdataset", "--dataset-type: .*--val-data is 'v.csv"),
    ("--loss neuclip --train-data x.csv --dataset-type webdataset", "--dataset-type: .*--train-data is 'x.csv'; leave"),
    ("--loss neuclip --train-data x.csv --val-data v.tar --dataset-type csv", "--dataset-type: 'csv'.*--val-data"),
    ("--loss neuclip --train-data x.tar --dataset-type csv", "--dataset-type: 'csv'.*--train-data"),
    (f"{CLIP} --several-captions", "--several-captions: is for a csv, not for 'shapes'.*--captions-field"),
    ("--loss clip --train-data x.csv --captions-field a", "--captions-field: 'a' is .*'x.csv'.*--several-captions"),
    (f"{OURS} --same-caption --same-key a", "--same-caption: with --same-key 'a'; give one of the two"),
    (f"{OURS} --same-key a", "--same-key: 'a' is a column or a field, and shapes has none; use --same-caption"),
    (f"{SHAPES} --loss amorlip --same-caption", "--same-caption: --loss amorlip as given .*--normalizer table"),
    (
        "--loss fastclip-v3 --negatives both --train-data x.csv --same-key a",
        "--same-key: --loss fastclip-v3 as given .*--negatives cross",
    ),
    (f"{CLIP} --batch-size 1", "--batch-size: 1 in 1 process"),
    (f"{SHAPES} --loss amorlip --batch-size 1", "--batch-size: 1; --loss amorlip needs more pairs"),
    (f"{OURS} --horovod", "--horovod: --loss fastclip-v3 .*torchrun"),
    (f"{OURS} --model coca_ViT-B-32", "--model: .*--loss clip with CoCa"),
    (f"{CLIP} --opt timm/adamw", "--lr: --opt timm/adamw"),
    (f"{CLIP} --distill-model RN50", "--distill-model: 'RN50' needs --distill-pretrained"),
    (f"{CLIP} --distill-pretrained openai", "--distill-pretrained: 'openai' needs --distill-model"),
    (f"{SHAPES} --loss drrho-clip", "--distill-model: --loss drrho-clip needs a reference model"),
    (f"{OURS} {REFERENCE}", "--distill-model: 'RN50' with --loss fastclip-v3, which does not distill"),
    (f"{SHAPES} --loss siglip {REFERENCE}", r"--distill-model: 'RN50' with SigLIP's loss"),
    (
        f"{SHAPES} --loss drrho-clip --model ViT-B-32 --distill-model ViT-L-14-336 --distill-pretrained openai",
        "--distill-model: 'ViT-L-14-336' reads images or captions otherwise than --model ViT-B-32",
    ),
    (f"{CLIP} --lr-scheduler const-cooldown --epochs-cooldown 5", "--epochs-cooldown: 5 is more than --epochs 4"),
    (f"{CLIP} --save-frequency 2 --delete-previous-checkpoint", "--delete-previous-checkpoint: with --save-freq"),
    (f"{SHAPES} --loss neuclip --split-rows-above 0", "--split-rows-above: 0 with --loss neuclip"),
    (f"{OURS} --split-rows-above 1 --remote-sync x", "--split-rows-above: 1 with --remote-sync"),
    (f"{CLIP} --copy-codebase", "--copy-codebase: OpenCLIP is installed"),
    (f"{CLIP} --report-to nonsense", "--report-to: 'nonsense' is not wandb"),
    (f"{CLIP} --report-to wandb", "--report-to: 'wandb' needs wandb"),
    (f"{CLIP} --report-to tensorboard", "--report-to: 'tensorboard' needs tensorboard"),
    (f"{CLIP} --fsdp --zeroshot-data x", "--zeroshot-data: 'x' with --fsdp"),
    (f"{OURS} --fsdp --osr-epochs 1", "--osr-epochs: 1 with --fsdp"),
    (f"{OURS} --fsdp --keep-best x", "--keep-best: 'x' with --fsdp"),
    (f"{OURS} --fsdp --precision pure_bf16", "--precision: 'pure_bf16' with --fsdp"),
    (f"{OURS} --torchcompile --torchcompile-strategy step", "--torchcompile-strategy: 'step' with --loss"),
    (f"{CLIP} --torchcompile --torchcompile-strategy step --accum-freq 2", "'step' with --accum-freq 2"),
    (f"{CLIP} --torchcompile --torchcompile-strategy step --precision amp", "'step' with --precision amp"),
    (f"{OURS} --text-layer-decay 2", "--text-layer-decay: 2.0"),
    (f"{OURS} --image-layer-decay 0", "--image-layer-decay: 0.0"),
]
OF_TASKS = ("--fsdp", "--torchcompile-strategy", "-layer-decay")
broken: set[int] = set()


@pytest.mark.parametrize("arguments, line", CASES)
def test_a_rule(monkeypatch, arguments, line):
    if host().loop != TASKS and any(flag in arguments for flag in OF_TASKS):
        pytest.skip("this OpenCLIP has no such flag")
    for logger in ("wandb", "tensorboard"):
        monkeypatch.setattr(host().main_module, logger, None)
    args = parse_args(arguments.split())
    prepare_shapes(args)
    processes = 2 if "--fsdp" in arguments or "amorlip" in arguments else 1
    with pytest.raises(InputError, match=line) as refused:
        check_rules(args, processes)
    assert refused.value.argument is not None
    run = Given(args, processes)
    broken.add(next(number for number, rule in enumerate(RULES) if rule.wrong(run)))


def test_every_rule_has_a_case():
    """The table's, after the cases above."""
    if not broken:
        pytest.skip("without the cases")
    left = {rule.flag for number, rule in enumerate(RULES) if number not in broken}
    variable_text = {"model"}  # a model of OpenCLIP 4's
    of_tasks = {"text_layer_decay", "image_layer_decay", "torchcompile_strategy", "precision"}
    of_fsdp = {"osr_epochs", "keep_best", "zeroshot_data"}
    assert left <= variable_text | (set() if host().loop == TASKS else of_tasks | of_fsdp)


@pytest.mark.parametrize(
    "arguments, line",
    [
        (f"{OURS} --temperature 0.03", "--temperature: 0.03 is no scheme; FastCLIP's --temperature is --tau-init here"),
        (f"{OURS} --lr_tau 1e-4", "unknown: --lr_tau 1e-4; did you mean '--lr-tau'?"),
        (f"{OURS} --fastclip_eps 1e-6", "give --loss-eps"),
        (f"{OURS} --data_size 16", "leave it out, since the samples are counted"),
        (f"{OURS} --multiply_tau", "fastclip-v3 and fastclip-v0"),
        (f"{OURS} --temperature_scheme global_learnable", "global_learnable fastclip-v3"),
        (f"{SHAPES} --loss isogclr --tau-min 0.5", "tau_min: 0.5 is above tau_start, 0.01"),
        (f"{OURS} --tau-init 0.02 --tau-min 0.03", "--tau-init: 0.02 is below --tau-min 0.03; give at least that"),
    ],
)
def test_a_flag_that_the_parser_refuses(arguments, line):
    with pytest.raises(InputError, match=re.escape(line)):
        parse_args(arguments.split())
