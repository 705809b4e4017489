"""The command `open_clip_ext.normalizers_report`: its flags and its steps."""

import argparse
import json
import os
import re
from typing import Any, NoReturn

import open_clip
import torch
import torch.distributed as dist
from open_clip_train.distributed import broadcast_object, init_distributed_device

from open_clip_ext import MODEL_CONFIGS
from open_clip_ext.diagnostics import exact
from open_clip_ext.errors import InputError
from training_ext.evaluation.models import MODEL_FLAGS
from training_ext.flags import params, preflight
from training_ext.openclip.launch import world_info
from training_ext.report.embeddings import Embedded, EmbeddingCache, embed, source_of
from training_ext.report.gradients import PAIRS
from training_ext.report.inputs import (
    Job,
    Saved,
    build_model,
    check,
    check_data_of_recipe,
    load_loss,
    training_flags,
)
from training_ext.report.numbers import compare
from training_ext.report.output import PICTURE, REPORT, table, write

PROG = "open_clip_ext.normalizers_report"
CACHE = "embeddings"


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def parse(argv: list[str]) -> tuple[argparse.Namespace, argparse.Namespace]:
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
    parser.add_argument("--anchors", type=int, default=10_000, metavar="INT", help="random anchors (default: 10000)")
    parser.add_argument(
        "--batch-sizes", metavar="INT,INT,...",
        help="batch sizes of the minibatch estimates to compare with; an empty string for none (default: 64,256,1024 "
        "and the training's own, as far as the data allow)",
    )
    parser.add_argument(
        "--gradient-batches", type=int, default=0, metavar="INT",
        help=f"also compare the gradients of {PAIRS} pairs, each in this many random batches of each size, such as 64; "
        "this computes the exact log-normalizers of all rows (default: 0, no comparison)",
    )
    parser.add_argument(
        "--taus", metavar="FLOAT,FLOAT,...",
        help="also compute the --rho that would hold a learned temperature at each of these, such as 0.02,0.03,0.05",
    )
    parser.add_argument(
        "--out", metavar="FOLDER",
        help=f"folder for {REPORT}, {PICTURE} and the embeddings (default: normalizers/NAME beside the checkpoints)",
    )
    parser.add_argument(
        "--report-seed", type=int, default=0, metavar="INT", help="seed of anchors and batches (default: 0)"
    )
    parser.add_argument(
        "--chunk-mib", type=float, default=exact.CHUNK_MIB, metavar="FLOAT",
        help=f"size of a block of similarities in MiB (default: {exact.CHUNK_MIB})",
    )
    parser.add_argument("--shard-sizes", metavar="FILE", help="as in the training")
    options, rest = parser.parse_known_args(argv)
    args = params.parse_args(training_flags(options.checkpoint, rest))
    check_data_of_recipe(args, rest)
    if args.dry_run:
        raise InputError("the report has no dry run; leave the flag out", "--dry-run")
    return options, args


def check_options(options: argparse.Namespace) -> None:
    if options.anchors < 1:
        raise InputError(f"{options.anchors} is out of range; it must be at least 1", "--anchors")
    if options.gradient_batches < 0 or options.gradient_batches == 1:
        raise InputError(
            f"{options.gradient_batches} is out of range; it must be 0 or at least 2", "--gradient-batches"
        )
    if not 1e-3 <= options.chunk_mib <= 2**20:
        raise InputError(f"{options.chunk_mib} is out of range; it must be from 0.001 to 2**20", "--chunk-mib")
    if not 0 <= options.report_seed < 2**63:
        raise InputError(f"{options.report_seed} is out of range; it must be from 0 to 2**63 - 1", "--report-seed")
    temperatures_of(options.taus)


def temperatures_of(given: str | None) -> list[float]:
    """The temperatures of `--taus`, ascending."""
    try:
        taus = sorted(map(float, given.split(","))) if given is not None else []
    except ValueError:
        raise InputError(f"{given!r} is not a list of numbers such as 0.02,0.05", "--taus") from None
    for tau in taus:
        if not 1e-3 <= tau <= 10:
            raise InputError(f"{tau:g} is out of range; it must be from 0.001 to 10", "--taus")
    return taus


def run(argv: list[str]) -> None:
    """Run the report; every process calls it.

    Raises:
        InputError: one line. Nothing has been written, unless it is about the contents of the data.
    """
    options, args = parse(argv)
    check_options(options)
    open_clip.add_model_config(MODEL_CONFIGS)
    preflight.prepare_shapes(args)
    # As in the training, process 0 checks the command line while the others wait for it in the process group.
    job: Job | None = None
    saved: Saved | None = None
    if world_info()[1] == 0:
        saved = Saved.read(options.checkpoint)
        job = check(options, args, saved)
    init_distributed_device(args)
    if args.distributed:
        job = broadcast_object(args, job)
    assert job is not None
    saved = saved or Saved.read(options.checkpoint)
    model, transforms, tokenizer = build_model(args, saved, options.checkpoint)
    loss = load_loss(args, saved, job.rows, options.checkpoint)
    source = source_of(args, job.rows.kind, job.shards, transforms, tokenizer)
    num_rows = job.rows.num_rows if job.shards is None else job.shards.num_rows
    key = cache_key(args, job, transforms[1])
    cache = EmbeddingCache(os.path.join(job.out, CACHE), key, num_rows, retries=job.shards is None)
    embedded = embed_all(model, source, cache, args)
    del model
    result = compare(options, args, job, saved, loss, embedded, temperatures_of(options.taus))
    if args.rank == 0:
        write(job.out, result)
        print(table(result, job.out), flush=True)
    if args.distributed:
        dist.barrier()
        dist.destroy_process_group()


def cache_key(args: argparse.Namespace, job: Job, transform: Any) -> dict[str, Any]:
    """What the embeddings depend on; a cache with another key is refused."""
    return {
        "weights": job.weights,
        "data": job.rows.digest if job.shards is None else job.shards.digest,
        "files": job.files,
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


def embed_all(model: torch.nn.Module, source: Any, cache: EmbeddingCache, args: argparse.Namespace) -> Embedded:
    """Embeddings of all rows; the processes divide those that are not in the cache.

    Raises:
        InputError: the cache is of other weights or data, or no row can be read.
    """
    plan: Any = None
    if args.rank == 0:
        try:
            cache.check()
            plan = cache.missing()
            cache.begin()
        except (InputError, OSError) as error:
            plan = str(error) if isinstance(error, InputError) else f"--out: {cache.folder!r}: {error}"
    if args.distributed:
        plan = broadcast_object(args, plan)
    if isinstance(plan, str):
        raise InputError(plan)
    own = plan[args.rank :: args.world_size]
    if own:
        embed(model, source, cache, own, args, show=args.rank == 0)
    if args.distributed:
        dist.barrier()
    return cache.open()
