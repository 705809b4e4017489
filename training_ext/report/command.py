"""The command `open_clip_ext.normalizers_report`: its flags and its steps."""

import json
import os
import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from typing import Any, NoReturn

import open_clip
import torch.distributed as dist
from open_clip_train.distributed import broadcast_object, init_distributed_device

from open_clip_ext import MODEL_CONFIGS
from open_clip_ext.diagnostics import exact
from open_clip_ext.errors import InputError
from open_clip_ext.recovery import digest_of
from training_ext.core.reading import source_of
from training_ext.evaluation.models import MODEL_FLAGS
from training_ext.flags import params, preflight
from training_ext.openclip.machine import world_info
from training_ext.report.embeddings import EmbeddingCache, embed
from training_ext.report.gradients import PAIRS
from training_ext.report.inputs import (
    Job,
    Saved,
    check,
    check_data_of_recipe,
    default_folder,
    files_of,
    training_flags,
)
from training_ext.report.numbers import compare
from training_ext.report.output import PICTURE, REPORT, table, write

PROG = "open_clip_ext.normalizers_report"
CACHE = "embeddings"


class Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def number(kind: Callable, holds: Callable[[Any], bool], expected: str) -> Callable[[str], Any]:
    """A type for argparse: a number in a range, which `expected` names."""

    def parse(text: str) -> Any:
        value = kind(text)
        if not holds(value):
            raise ArgumentTypeError(f"{text} is out of range; it must be {expected}")
        return value

    parse.__name__ = kind.__name__  # argparse says "invalid int value"
    return parse


def several(one: Callable[[str], Any], example: str) -> Callable[[str], list[Any]]:
    """A type for argparse: numbers separated by commas, ascending."""

    def parse(text: str) -> list[Any]:
        try:
            return sorted({one(part) for part in text.split(",")}) if text.strip() else []
        except ValueError:
            raise ArgumentTypeError(f"{text!r} is not a list of {example}") from None

    return parse


def parse(argv: list[str]) -> tuple[Namespace, Namespace]:
    """Parse into the report's own flags and the training's, the latter as `params.parse_args` gives them.

    Raises:
        InputError: a wrong flag or value.
    """
    # With abbreviations --batch-size would mean --batch-sizes.
    parser = Parser(
        prog=PROG,
        allow_abbrev=False,
        description="Compares the estimated log-normalizers of a checkpoint with the true ones over all train data.",
        epilog="All other flags are those of open_clip_ext.main, read from recipe.yaml beside the checkpoints; "
        "flags given here override it. Without that file repeat the training's flags. The report uses those of the "
        "model, the data and the loss, --precision, --device, --batch-size (of the embedding) and --workers.",
    )
    parser.add_argument("--checkpoint", required=True, metavar="PATH", help="a checkpoint of the training")
    parser.add_argument(
        "--anchors", type=number(int, lambda count: count >= 1, "at least 1"), default=10_000, metavar="INT",
        help="random anchors (default: 10000)",
    )
    parser.add_argument(
        "--batch-sizes", type=several(int, "integers such as 64,256"), metavar="INT,INT,...",
        help="batch sizes of the minibatch estimates to compare with; an empty string for none (default: 64,256,1024 "
        "and the training's own, as far as the data allow)",
    )
    parser.add_argument(
        "--gradient-batches", type=number(int, lambda count: count == 0 or count > 1, "0 or at least 2"), default=0,
        metavar="INT",
        help=f"also compare the gradients of {PAIRS} pairs, each in this many random batches of each size, such as 64; "
        "this computes the exact log-normalizers of all rows (default: 0, no comparison)",
    )
    tau = number(float, lambda tau: 1e-3 <= tau <= 10, "from 0.001 to 10")
    parser.add_argument(
        "--taus", type=several(tau, "numbers such as 0.02,0.05"), default=[], metavar="FLOAT,FLOAT,...",
        help="also compute the --rho that would hold a learned temperature at each of these, such as 0.02,0.03,0.05",
    )
    parser.add_argument(
        "--out", metavar="FOLDER",
        help=f"folder for {REPORT}, {PICTURE} and the embeddings (default: normalizers/NAME beside the checkpoints)",
    )
    parser.add_argument(
        "--report-seed", type=number(int, lambda seed: 0 <= seed < 2**63, "from 0 to 2**63 - 1"), default=0,
        metavar="INT", help="seed of anchors and batches (default: 0)",
    )
    parser.add_argument(
        "--chunk-mib", type=number(float, lambda size: 1e-3 <= size <= 2**20, "from 0.001 to 2**20"),
        default=exact.CHUNK_MIB, metavar="FLOAT",
        help=f"size of a block of similarities in MiB (default: {exact.CHUNK_MIB})",
    )
    parser.add_argument("--shard-sizes", metavar="FILE", help="as in the training")
    options, rest = parser.parse_known_args(argv)
    options.out = options.out or default_folder(options.checkpoint)
    args = params.parse_args(training_flags(options.checkpoint, rest))
    check_data_of_recipe(args, rest)
    if args.dry_run:
        raise InputError("the report has no dry run; leave the flag out", "--dry-run")
    return options, args


def run(argv: list[str]) -> None:
    """Run the report; every process calls it.

    Raises:
        InputError: one line. Nothing has been written, unless it is about the contents of the data.
    """
    options, args = parse(argv)
    open_clip.add_model_config(MODEL_CONFIGS)
    preflight.prepare_shapes(args)
    # As in the training, process 0 checks the command line while the others wait for it in the process group.
    first = world_info()[1] == 0
    saved = Saved.read(options.checkpoint) if first else None
    job = check(options, args, saved) if saved is not None else None
    init_distributed_device(args)
    if args.distributed:
        job = broadcast_object(args, job)
    assert job is not None
    saved = saved or Saved.read(options.checkpoint)
    model: Any
    model, transform, tokenizer = saved.load_model(args)
    loss = saved.load_loss(args, job.rows)
    cache = EmbeddingCache(os.path.join(options.out, CACHE), job.num_rows, retries=job.shards is None)
    blocks: Any = None
    if args.rank == 0:
        try:
            blocks = cache.begin(cache_key(args, job, saved, transform))
        except InputError as error:
            blocks = error
    if args.distributed:
        blocks = broadcast_object(args, blocks)
    if isinstance(blocks, InputError):
        raise blocks
    if own := blocks[args.rank :: args.world_size]:
        size = model.visual.image_size if job.rows.kind == "shapes" else None
        source = source_of(args, job.rows.kind, job.shards, transform, size, tokenizer)
        embed(model, source, cache, own, args)
    del model
    if args.distributed:
        dist.barrier()
    result = compare(options, args, job, saved, loss, cache.open())
    if args.rank == 0:
        write(options.out, result)
        print(table(result, options.out), flush=True)
    if args.distributed:
        dist.barrier()
        dist.destroy_process_group()


def cache_key(args: Namespace, job: Job, saved: Saved, transform: Any) -> dict[str, Any]:
    """What the embeddings depend on; a cache with another key is refused."""
    return {
        "weights": digest_of(saved.weights),
        "data": job.rows.digest if job.shards is None else job.shards.digest,
        "files": files_of(args, job.shards),
        "captions": {
            name: getattr(args, name)
            for name in ("captions_field", "several_captions", "csv_img_key", "csv_caption_key")
        }
        | {"seed": args.seed if args.captions_field or args.several_captions else None},  # which draws among several
        "model": args.model,
        "flags": json.loads(json.dumps({name: getattr(args, name, None) for name in MODEL_FLAGS})),  # tuples are lists
        "precision": args.precision,
        "transform": described(transform),
    }


def described(transform: Any) -> str:
    """The transform in words, the same in every process; before OpenCLIP 3.3 it contains a function."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(transform))
