"""The command `open_clip_ext.normalizers_report`: its flags and its steps."""

import os
from argparse import Namespace
from typing import Any

import open_clip
import torch.distributed as dist

from open_clip_ext import MODEL_CONFIGS
from open_clip_ext.errors import InputError
from training_ext.core.flags import OneLineParser
from training_ext.data.reading import source_of
from training_ext.flags import params, preflight
from training_ext.tools.evaluation.arguments import checked_by_first, numbers
from training_ext.tools.evaluation.models import experiment_of
from training_ext.tools.report.embeddings import embed, read
from training_ext.tools.report.inputs import (
    Saved,
    check,
    check_data_of_recipe,
    embeddings_digest,
    training_flags,
)
from training_ext.tools.report.numbers import compare
from training_ext.tools.report.output import PICTURE, REPORT, table, write

PROG = "open_clip_ext.normalizers_report"
CACHE = "embeddings"


def parse(argv: list[str]) -> tuple[Namespace, Namespace]:
    """Parse into the report's own flags and the training's, the latter as `params.parse_args` gives them.

    Raises:
        InputError: a wrong flag or value.
    """
    # With abbreviations --batch-size would mean --batch-sizes.
    parser = OneLineParser(
        prog=PROG,
        allow_abbrev=False,
        description="Compares the estimated log-normalizers of a checkpoint with the true ones over all train data.",
        epilog="All other flags are those of open_clip_ext.main, read from recipe.yaml beside the checkpoints; "
        "flags given here override it. Without that file repeat the training's flags. The report uses those of the "
        "model, the data and the loss, --precision, --device, --batch-size (of the embedding) and --workers.",
    )
    add = parser.add_argument
    add("--checkpoint", required=True, metavar="PATH", help="a checkpoint of the training")
    add("--anchors", type=int, default=10_000, metavar="INT", help="random anchors (default: 10000)")
    add(
        "--batch-sizes", metavar="INT,INT,...",
        help="batch sizes of the minibatch estimates to compare with; an empty string for none (default: 64,256,1024 "
        "and the training's own, as far as the data allow)",
    )
    add(
        "--taus", metavar="FLOAT,FLOAT,...",
        help="also compute the --rho that would hold a learned temperature at each of these, such as 0.02,0.03,0.05",
    )
    add(
        "--out", metavar="FOLDER",
        help=f"folder for {REPORT}, {PICTURE} and the embeddings (default: normalizers/NAME beside the checkpoints)",
    )
    add("--shard-sizes", metavar="FILE", help="as in the training")
    options, training_words = parser.parse_known_args(argv)
    if options.anchors < 1:
        raise InputError(f"{options.anchors} is out of range; it must be at least 1", "--anchors")
    if options.batch_sizes:
        options.batch_sizes = sorted(numbers(options.batch_sizes, int, "--batch-sizes", "integers such as 64,256"))
    if options.taus:
        expected = "numbers from 0.001 to 10 such as 0.02,0.05"
        options.taus = sorted(numbers(options.taus, float, "--taus", expected, lambda tau: 1e-3 <= tau <= 10))
    name = os.path.splitext(os.path.basename(options.checkpoint))[0]
    options.out = options.out or os.path.join(experiment_of(options.checkpoint), "normalizers", name)
    args = params.parse_args(training_flags(options.checkpoint, training_words))
    check_data_of_recipe(args, training_words)
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
    with checked_by_first(args, lambda: check(options, args)) as (_, data):
        saved = Saved.read(options.checkpoint)
        model: Any
        model, transform, tokenizer = saved.load_model(args)
        loss = saved.load_loss(args, data.rows)
        folder = os.path.join(options.out, CACHE, embeddings_digest(args, data, saved, transform))
        os.makedirs(folder, exist_ok=True)
        size = model.visual.image_size if data.rows.kind == "shapes" else None
        source = source_of(args, data.rows.kind, data.shards, transform, size, tokenizer)
        embed(model, source, folder, data.num_rows, args)
        del model
        if args.distributed:
            dist.barrier()
        result = compare(options, args, data.num_rows, saved, loss, read(folder, data.num_rows))
        if args.rank == 0:
            write(options.out, result)
            print(table(result, options.out), flush=True)
