"""THE table of rules: what flags and combinations of flags are refused before anything is written, and why.

Parts of a loss check their own options (`open_clip_ext.options`). OpenCLIP's flags are OpenCLIP's: what it refuses
itself is found by `flags.trial`, so they stand here only where it is silent and a training is lost.
"""

import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import open_clip

from open_clip_ext import factory
from open_clip_ext.errors import InputError, did_you_mean
from open_clip_ext.options import flag_of
from training_ext.core.loss import build_loss
from training_ext.core.plan import Plan, global_batch, trains, world_info
from training_ext.core.temperature import trains_logit_scale
from training_ext.data.keys import key_name
from training_ext.data.rows import kind_of, needs_index
from training_ext.flags.reference import is_unlike_reference
from training_ext.openclip.hosts import has_lora, loggers
from training_ext.openclip.loading import CAPTIONING, beyond_towers, known_config


class Given(Namespace):
    """The flags of a run, and what the rules ask of it besides."""

    def __init__(self, args: Namespace):
        super().__init__(**vars(args))
        self.processes = world_info()[2]
        self.trains = trains(args)
        self.shards_model = Plan(args).shards_model
        self.loggers = [name.strip() for name in args.report_to.split(",") if name.strip()]

    @property
    def kind(self) -> str | None:
        """The kind of the train data; None without."""
        return kind_of(self, self.train_data) if self.trains else None


@dataclass(frozen=True)
class Rule:
    """What is wrong with a flag.

    Args:
        flag: its name; the message starts with it. The rule is passed over if this OpenCLIP lacks the flag, or the
            component that has it was taken out.
        wrong: whether the rule is broken, or by what.
        text: the value and what would be right, with {names} of attributes of `Given`, and {wrong}.
    """

    flag: str
    wrong: Callable[[Given], Any]
    text: str


POSITIVE, BELOW_ONE, FINITE = sys.float_info.min, 1 - sys.float_info.epsilon, sys.float_info.max


def within(name: str, low: float, high: float = FINITE, expected: str = "") -> Rule:
    """A rule on the range of a number, which a list has for each; None means that the flag is not given."""

    def outside(run: Given) -> bool:
        value = getattr(run, name)
        numbers = value if isinstance(value, list) else [] if value is None else [value]
        return not all(low <= number <= high for number in numbers)

    return Rule(name, outside, f"{{{name}}} is out of range; it must be {expected or f'a number of at least {low:g}'}")


def needs(name: str, other: Callable[[Given], Any], requirement: str) -> Rule:
    """A rule on a flag of OpenCLIP's that does nothing unless `other` holds."""
    return Rule(
        name,
        lambda run: getattr(run, name) and not other(run),
        f"does nothing without {requirement}; add it, or leave this out",
    )


# Of names, by --dataset-type
OTHER_ENDS = {"webdataset": (".csv", ".tsv"), "csv": (".tar",), "folder": (".csv", ".tsv", ".tar")}


def of_another_type(name: str) -> Rule:
    return Rule(
        "dataset_type",
        lambda run: (getattr(run, name) or "").endswith(OTHER_ENDS.get(run.dataset_type, ())),
        f"{{dataset_type!r}} holds for --train-data and --val-data, and {flag_of(name)} is {{{name}!r}}; leave it out, "
        "since auto tells by the ends of their names",
    )


def needs_named_entries(name: str) -> Rule:
    return Rule(
        name,
        lambda run: getattr(run, name) == key_name(run) is not None and run.kind not in (None, "csv", "webdataset"),
        f"{{{name}!r}} is a column or a field, and {{dataset_type}} has none",
    )


def of_shards(name: str) -> Rule:
    return Rule(
        name,
        lambda run: getattr(run, name) and run.kind not in (None, "webdataset"),
        f"{{{name}!r}} is a field in shards, not in {{train_data!r}}; for a csv give --several-captions",
    )


def needs_single_negatives(name: str) -> Rule:
    return Rule(
        name,
        lambda run: run.trains and getattr(run, name) and not build_loss(run, 1, "cpu").takes_keys,
        "--loss {loss} as given cannot leave out single negatives; use one with --normalizer table, prototypes, queue "
        "or batch, and --negatives cross",
    )


def needs_whole_model(name: str, form: str = "!r") -> Rule:
    return Rule(
        name,
        lambda run: run.shards_model and getattr(run, name),
        f"{{{name}{form}}} with --fsdp, which shards the weights; leave one out",
    )


def unusable_logger(run: Given) -> str | None:
    installed = loggers()
    if not set(run.loggers) <= {*installed, "all", "none"}:
        return f"is not {', '.join(installed)}, several with commas, or all, so nothing would be reported"
    named = {*run.loggers, *(("wandb", "tensorboard") if "all" in run.loggers else ())}
    missing = (name for name in installed if name in named and not installed[name])
    return next((f"needs {name}, which is not installed; pip install {name}" for name in missing), None)


def trained_on(run: Given) -> str | None:
    from training_ext.flags.val_data import shared_data

    return shared_data(run)


RULES = (
    # Ranges
    *(within(name, 1) for name in ("log_every_n_steps", "train_num_samples", "remote_sync_frequency")),
    *(within(name, 0) for name in ("lr", "warmup", "workers", "save_frequency", "val_frequency", "zeroshot_frequency")),
    *(within(name, 0) for name in ("lock_image_unlocked_groups", "lock_text_unlocked_layers")),
    within("lr_cooldown_end", 0),
    within("lr_cooldown_power", POSITIVE, expected="above 0"),
    within("momentum", 0, BELOW_ONE, "in [0, 1)"),
    within("wd", 0, expected="at least 0, since a negative one makes the weights grow"),
    within("grad_clip_norm", POSITIVE, expected="above 0: at 0 every gradient is 0; leave it out not to clip"),
    within("force_context_length", 2, 2**16, "from 2, a caption's start and end, to 65536"),
    within("force_patch_dropout", 0, BELOW_ONE, "in [0, 1)"),
    within("json_text_key_probs", 0),
    within("text_layer_decay", POSITIVE, 1, "in (0, 1]"),
    within("image_layer_decay", POSITIVE, 1, "in (0, 1]"),
    Rule(
        "epochs_cooldown",
        lambda run: not 0 <= (run.epochs_cooldown or 0) <= run.epochs,
        "{epochs_cooldown} of --epochs {epochs}; give from 0 to these",
    ),
    needs("epochs_cooldown", lambda run: run.lr_scheduler == "const-cooldown", "--lr-scheduler const-cooldown"),
    needs("lock_image_unlocked_groups", lambda run: run.lock_image or has_lora(run), "--lock-image"),
    needs("lock_text_unlocked_layers", lambda run: run.lock_text or has_lora(run), "--lock-text"),
    # Data
    Rule(
        "train_data",
        lambda run: run.uses_ext_loss and not (
            run.trains or run.val_data or run.imagenet_val or run.imagenet_v2 or getattr(run, "zeroshot_data", None)
        ),
        "--loss {loss} needs data to train on, or --val-data to evaluate on",
    ),
    of_another_type("train_data"),
    of_another_type("val_data"),
    Rule(
        "val_data",
        lambda run: run.trains and run.val_data and trained_on(run),
        "{wrong!r} is trained on, by --train-data {train_data!r}, so its metrics say nothing of new pairs; hold others "
        "out, as make_shards does, or leave it out",
    ),
    needs("train_data_upsampling_factors", lambda run: run.dataset_resampled, "--dataset-resampled"),
    Rule(
        "model",
        lambda run: ":" not in run.model and known_config(run.model) is None
        and did_you_mean(run.model, open_clip.list_models(), "see open_clip.list_models()"),
        "{model!r} is unknown to this open_clip_torch{wrong}",
    ),
    Rule(
        "model",
        lambda run: run.uses_ext_loss and (known_config(run.model) or {}).get("text_cfg", {}).get("variable_text"),
        "{model!r} takes captions of variable length; --loss {loss} does not",
    ),
    needs(
        "pretrained_image",
        lambda run: "timm_model_name" in (known_config(run.model) or {"vision_cfg": "timm_model_name"})["vision_cfg"],
        "a --model with an image tower of timm's",
    ),
    Rule(
        "several_captions",
        lambda run: run.several_captions and run.kind not in (None, "csv"),
        "is for a csv, not for {train_data!r}; for shards (webdataset) give --captions-field",
    ),
    of_shards("captions_field"),
    of_shards("json_text_key"),
    Rule(
        "captions_field",
        lambda run: run.captions_field and getattr(run, "json_text_key", None),  # of OpenCLIP 4
        "{captions_field!r} with --json-text-key {json_text_key!r}; give one of the two",
    ),
    needs(
        "json_text_key_probs",
        lambda run: run.json_text_key and len(run.json_text_key_probs) <= len(run.json_text_key.split(";")),
        "a field in --json-text-key for each",
    ),
    Rule(
        "same_caption",
        lambda run: run.same_caption and run.same_key is not None,
        "with --same-key {same_key!r}; give one of the two",
    ),
    Rule(
        "positives",
        lambda run: run.positives is not None and (run.same_caption or run.same_key is not None),
        "{positives!r} with --same-key or --same-caption; give one of the three",
    ),
    # The loss
    needs_named_entries("same_key"),
    needs_named_entries("positives"),
    needs_single_negatives("same_key"),
    needs_single_negatives("same_caption"),
    Rule(
        "positives",
        lambda run: run.trains and run.positives is not None and not build_loss(run, 1, "cpu").takes_positives,
        "--loss {loss} as given cannot take several; use clip-chunked, or one with --normalizer table, prototypes, "
        "queue or batch, --surrogate identity and --negatives cross",
    ),
    Rule(
        "batch_size",
        lambda run: run.trains and not run.siglip and not beyond_towers(run.model) and global_batch(run) < 2,
        "{batch_size} in {processes} process; a contrastive loss needs at least 2 pairs per step, since the other "
        "pairs are the negatives",
    ),
    Rule(
        "batch_size",
        lambda run: run.uses_ext_loss
        and run.batch_size * run.accum_freq < factory.find_preset(run.loss).loss.least_pairs,  # type: ignore[union-attr]
        "{batch_size}; --loss {loss} needs more pairs per step in each process",
    ),
    Rule(
        "horovod",
        lambda run: run.uses_ext_loss and run.horovod,
        "--loss {loss} runs under torch.distributed only; use torchrun",
    ),
    Rule(
        "model",
        lambda run: (run.uses_ext_loss or beyond_towers(run.model) != CAPTIONING) and beyond_towers(run.model),
        "{model!r} has {wrong}; give a model of an image and a text tower, or --loss clip with CoCa",
    ),
    Rule(
        "lr",
        lambda run: run.trains and run.lr is None,
        "--opt {opt} needs a learning rate",
    ),
    # Distillation
    Rule(
        "distill_model",
        lambda run: (run.distill_model is None) != (run.distill_pretrained is None),
        "{distill_model!r} with --distill-pretrained {distill_pretrained!r}; give both or none",
    ),
    Rule(
        "distill_model",
        lambda run: run.reference_gap and run.distill_model is None,
        "--loss {loss} needs a reference model; give it and --distill-pretrained",
    ),
    Rule(
        "distill_model",
        lambda run: run.uses_ext_loss and not run.reference_gap and run.distill_model is not None,
        "{distill_model!r} with --loss {loss}, which does not distill; use --loss clip for that, or as a reference "
        "--loss drrho-clip",
    ),
    Rule(
        "distill_model",
        lambda run: run.siglip and run.distill_model is not None,
        "{distill_model!r} with SigLIP's loss (--siglip), which does not distill; leave one out",
    ),
    Rule(
        "distill_model",
        lambda run: run.uses_ext_loss and run.distill_model is not None and is_unlike_reference(run),
        "{distill_model!r} reads images or captions otherwise than --model {model}, whose tensors it gets: another "
        "image size, normalization (see --image-mean, --image-std) or tokenizer",
    ),
    # Checkpoints
    Rule(
        "delete_previous_checkpoint",  # also after an epoch that saves none
        lambda run: run.delete_previous_checkpoint and not run.save_most_recent
        and 1 < run.save_frequency < run.epochs - 1,
        "with --save-frequency {save_frequency} it removes the only checkpoint; give --save-frequency 1 or "
        "--save-most-recent",
    ),
    Rule(
        "resume",
        lambda run: run.resume == "latest" and run.remote_sync is not None
        and (run.save_most_recent and "--save-most-recent"
             or run.remote_sync_protocol != "s3" and f"--remote-sync-protocol {run.remote_sync_protocol}"),
        "'latest' with --remote-sync and {wrong}, for which OpenCLIP does not find it; leave out one of the three, or "
        "give the checkpoint's path",
    ),
    Rule(
        "split_rows_above",
        lambda run: run.split_rows_above is not None and not needs_index(run),
        "{split_rows_above:g} with --loss {loss}, which keeps nothing per sample; leave it out",
    ),
    Rule(
        "split_rows_above",
        lambda run: run.split_rows_above is not None and run.remote_sync is not None,
        "{split_rows_above:g} with --remote-sync, which resumes from a single file; leave out one of the two",
    ),
    Rule(
        "keep_best",
        lambda run: run.keep_best is not None and run.remote_sync is not None and run.remote_sync_protocol == "fsspec",
        "{keep_best} with --remote-sync-protocol fsspec, which does not copy a changed file of the same size; give s3",
    ),
    Rule("report_to", unusable_logger, "{report_to!r} {wrong}"),
    # The task loop
    Rule(
        "torchcompile_strategy",
        lambda run: run.uses_ext_loss and run.torchcompile and run.torchcompile_strategy == "step",
        "'step' with --loss {loss}, which has state; give 'model'",
    ),
    Rule(
        "precision",
        lambda run: run.shards_model and run.precision == "pure_bf16" and trains_logit_scale(run),
        "'pure_bf16' with --fsdp and a learned temperature, whose steps are below the spacing of 16-bit numbers; give "
        "amp_bf16, or --temperature fixed",
    ),
    needs_whole_model("osr_epochs", ":g"),
    needs_whole_model("keep_best"),
    needs_whole_model("zeroshot_data"),
)


def check_rules(args: Namespace) -> None:
    """Raise InputError for the first rule that the run breaks."""
    run = Given(args)
    for rule in RULES:
        if rule.flag in run and (violation := rule.wrong(run)):
            raise InputError(rule.text.format_map({**vars(run), "wrong": violation}), flag_of(rule.flag))
