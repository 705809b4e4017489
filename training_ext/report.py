"""How far the estimated normalizers of a checkpoint are from the true ones (neuclip.txt Eq. 9, Appendix B.6).

The train data are embedded once in the checkpoint's weights, without augmentation. For a random sample of anchors the
true log-normalizers are computed over all rows, and compared with what the checkpoint's estimator gives for the same
embeddings and with minibatch estimates. All at the checkpoint's own temperature, eps and surrogate; `mixing` is part of
the loss rather than of the estimator, and is not applied.
"""

import argparse
import hashlib
import importlib.util
import json
import logging
import math
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import open_clip
import torch
import torch.distributed as dist
from open_clip_train.distributed import broadcast_object, init_distributed_device, world_info_from_env
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from open_clip_ext import exact, factory
from open_clip_ext.errors import InputError
from open_clip_ext.losses import AmorLIPLoss, GlobalContrastiveLoss
from open_clip_ext.normalizers import Batch, BatchNormalizer, Queue
from open_clip_ext.pairs import Pairs
from open_clip_ext.surrogates import Identity
from training_ext import checkpoint, params, preflight
from training_ext.data import DataRows, find_rows, kind_of, needs_index, trains
from training_ext.embeddings import Embedded, EmbeddingCache, embed, source_of
from training_ext.loss import build_loss
from training_ext.report_figure import draw
from training_ext.shards import Shards, find_shards

PROG = "open_clip_ext.normalizers_report"
BATCH_SIZES = (64, 256, 1024)
EPS = 1e-14  # of the losses that have none
QUANTILES = (5, 50, 95)
SIDES = ("image", "text")
REPORT, PICTURE, VALUES, CACHE = "normalizers.json", "normalizers.png", "normalizers.safetensors", "embeddings"
ESTIMATED_AT_ONCE = 1024  # anchors


# The command line


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise InputError(message)


def parse(argv: list[str]) -> tuple[argparse.Namespace, argparse.Namespace]:
    """The report's own flags, and the training command's as `params.parse_args` gives them.

    Raises:
        InputError: a wrong flag or value.
    """
    # Without abbreviations, or --batch-size would be taken for --batch-sizes.
    parser = Parser(
        prog=PROG,
        allow_abbrev=False,
        description="Compares the estimated log-normalizers of a checkpoint with the true ones over all train data.",
        epilog="All other flags are those of open_clip_ext.main: repeat the training's. What matters of them is the "
        "model, the data, the loss, --precision, --device, --batch-size (of the embedding) and --workers.",
    )
    parser.add_argument("--checkpoint", required=True, metavar="PATH", help="a checkpoint of the training")
    parser.add_argument("--anchors", type=int, default=10_000, metavar="INT", help="anchors to draw (default: 10000)")
    parser.add_argument(
        "--batch-sizes", metavar="INT,INT,...",
        help="minibatch estimators to compare with; none: an empty string (default: those of 64,256,1024 that the "
        "data allow)",
    )
    parser.add_argument(
        "--out", metavar="FOLDER",
        help=f"where {REPORT}, {PICTURE} and the embeddings go (default: normalizers/NAME beside the checkpoints)",
    )
    parser.add_argument("--report-seed", type=int, default=0, metavar="INT", help="of anchors and batches (default: 0)")
    parser.add_argument(
        "--chunk-mib", type=float, default=exact.CHUNK_MIB, metavar="FLOAT",
        help=f"size of a block of similarities (default: {exact.CHUNK_MIB})",
    )
    parser.add_argument("--shard-sizes", metavar="FILE", help="as in the training")
    options, rest = parser.parse_known_args(argv)
    return options, params.parse_args(rest)


def check_options(options) -> None:
    if options.anchors < 1:
        raise InputError(f"--anchors: {options.anchors} is out of range; it must be at least 1")
    if not 1e-3 <= options.chunk_mib <= 2**20:
        raise InputError(f"--chunk-mib: {options.chunk_mib} is out of range; it must be from 0.001 to 2**20")
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("matplotlib is not installed, and draws the picture; pip install matplotlib")


def batch_sizes(given: str | None, num_rows: int) -> list[int]:
    """The sizes that `--batch-sizes` asks for, ascending."""
    if given is None:
        return [size for size in BATCH_SIZES if size <= num_rows]
    try:
        sizes = sorted({int(part) for part in given.split(",")}) if given.strip() else []
    except ValueError:
        raise InputError(f"--batch-sizes: {given!r} is no list of numbers such as 64,256") from None
    for size in sizes:
        if not 2 <= size <= num_rows:
            raise InputError(f"--batch-sizes: {size} is out of range; it must be from 2 to the {num_rows} rows")
    return sizes


def default_folder(path: str) -> str:
    """normalizers/epoch_3 in the experiment's folder, for its checkpoints/epoch_3.pt."""
    folder, name = os.path.split(os.path.abspath(path))
    experiment = os.path.dirname(folder) if os.path.basename(folder) == "checkpoints" else folder
    return os.path.join(experiment, "normalizers", os.path.splitext(name)[0])


# What is checked before anything is written


@dataclass
class Saved:
    """A checkpoint.

    Args:
        weights: the model's, by names without wrappers.
        entry: of `training_ext.checkpoint`, or None.
        epoch: completed epochs, or None.
    """

    weights: dict[str, Tensor]
    entry: dict[str, Any] | None
    epoch: int | None

    @classmethod
    def read(cls, path: str) -> "Saved":
        """Tensors stay on disk until they are used.

        Raises:
            InputError: there is no such file, or no model in it.
        """
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except FileNotFoundError:
            raise InputError(f"--checkpoint: {path!r} does not exist") from None
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"--checkpoint: {path!r} is not a complete checkpoint: {reason}") from None
        weights = content.get("state_dict", content) if isinstance(content, dict) else {}
        weights = {name.removeprefix("module."): value for name, value in weights.items()}
        if "logit_scale" not in weights:
            raise InputError(f"--checkpoint: {path!r} holds no CLIP model")
        return cls(weights, checkpoint.take_entry(content), content.get("epoch"))

    @property
    def tau(self) -> float:
        return math.exp(-self.weights["logit_scale"].double().item())

    def digest(self) -> str:
        """SHA-256 (hex) of the weights."""
        digest = hashlib.sha256()
        for name, value in sorted(self.weights.items()):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()


@dataclass
class Job:
    """What process 0 finds out for all.

    Args:
        rows: of the train data.
        shards: their shards, if they have any.
        weights: digest of the checkpoint's.
        sizes: of the minibatch estimators.
        out: folder.
    """

    rows: DataRows
    shards: Shards | None
    weights: str
    sizes: list[int]
    out: str


def check(options, args, saved: Saved) -> Job:
    """All that can be wrong with the command line.

    Raises:
        InputError: one line that names the flag, its value and what would be right.
    """
    if not trains(args):
        raise InputError("--train-data: the report is about train data; repeat the flags of the training")
    if args.horovod:
        raise InputError("--horovod: the report runs under torch.distributed only; use torchrun")
    if args.loss is not None and issubclass(factory.find_preset(args.loss).loss or object, AmorLIPLoss):
        raise InputError(
            f"--loss: the networks of {args.loss!r} predict a partition function that depends on the batch size, and "
            "has no true value over all data; give a checkpoint of another loss"
        )
    for name in ("batch_size", "workers"):
        value, least = getattr(args, name), preflight.AT_LEAST[name]
        if value < least:
            raise InputError(f"--{name.replace('_', '-')}: {value} is out of range; it must be at least {least}")
    rows, shards = find_all_rows(options, args)
    instead = "repeat the flags of its training"
    checkpoint.check_entry(saved.entry, options.checkpoint, args, rows, flag="--checkpoint", instead=instead)
    num_rows = rows.num_rows if shards is None else shards.num_rows
    if num_rows < 2:
        raise InputError(f"--train-data: {num_rows} row has no negatives; at least 2 are needed")
    sizes = batch_sizes(options.batch_sizes, num_rows)
    out = options.out or default_folder(options.checkpoint)
    if os.path.exists(out) and not os.path.isdir(out):
        raise InputError(f"--out: {out!r} is a file; give a folder")
    return Job(rows, shards, saved.digest(), sizes, out)


def find_all_rows(options, args) -> tuple[DataRows, Shards | None]:
    """The rows as the training finds them, and the shards also where its loss does not need to look into them."""
    if kind_of(args, args.train_data) != "webdataset":
        args.shard_sizes = options.shard_sizes
        return find_rows(args), None
    looks = args.train_num_samples is None or needs_index(args)
    args.shard_sizes = options.shard_sizes if looks else None
    rows = find_rows(args)
    return rows, rows.shards or find_shards(args.train_data, options.shard_sizes)


# The parts of a report


def run(argv: list[str]) -> None:
    """The command.

    Raises:
        InputError: one line; nothing was written before it unless it is about what is in the data.
    """
    options, args = parse(argv)
    check_options(options)
    open_clip.add_model_config(preflight.MODEL_CONFIGS)
    preflight.prepare_shapes(args)
    # As in the training: process 0 looks for what can be wrong, and the others wait for it in the process group.
    job = saved = None
    if world_info_from_env()[1] == 0:
        saved = Saved.read(options.checkpoint)
        job = check(options, args, saved)
    init_distributed_device(args)
    if args.distributed:
        job = broadcast_object(args, job)
    saved = saved or Saved.read(options.checkpoint)
    model, transforms, tokenizer = build_model(args, saved, options.checkpoint)
    loss = load_loss(args, saved, job.rows)
    source = source_of(args, job.rows.kind, job.shards, transforms, tokenizer)
    num_rows = job.rows.num_rows if job.shards is None else job.shards.num_rows
    cache = EmbeddingCache(os.path.join(job.out, CACHE), cache_key(args, job, transforms[1]), num_rows)
    embedded = embed_all(model, source, cache, args)
    del model
    result = compare(options, args, job, saved, loss, embedded)
    if args.rank == 0:
        write(job.out, result)
        print(table(result, job.out), flush=True)
    if args.distributed:
        dist.barrier()
        dist.destroy_process_group()


def build_model(args, saved: Saved, path: str) -> tuple[torch.nn.Module, tuple, Callable]:
    """The checkpoint's model in evaluation mode, the transforms for training and evaluation, and the tokenizer.

    Raises:
        InputError: the weights are of another model.
    """
    size = args.force_image_size
    logging.disable(logging.WARNING)  # of random weights, which they are for a moment
    tokenizer = open_clip.get_tokenizer(args.model, cache_dir=args.cache_dir, context_length=args.force_context_length)
    model, *transforms = open_clip.create_model_and_transforms(
        args.model,
        args.pretrained or None,
        load_weights=False,
        precision=args.precision,
        device=args.device,
        force_quick_gelu=args.force_quick_gelu,
        force_custom_text=args.force_custom_text,
        force_patch_dropout=args.force_patch_dropout,
        force_image_size=size[0] if isinstance(size, (tuple, list)) and len(size) == 1 else size,
        force_context_length=args.force_context_length,
        image_mean=args.image_mean,
        image_std=args.image_std,
        image_interpolation=args.image_interpolation,
        image_resize_mode=args.image_resize_mode,
        aug_cfg=args.aug_cfg,
        output_dict=True,
        cache_dir=args.cache_dir,
        **({"init_logit_bias": 0.0} if "logit_bias" in saved.weights else {}),
    )
    logging.disable(logging.NOTSET)
    try:
        model.load_state_dict(saved.weights)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1].strip()[:200]
        raise InputError(f"--model: {path!r} holds another model than {args.model!r}: {reason}") from None
    return model.eval(), tuple(transforms), tokenizer


def load_loss(args, saved: Saved, rows: DataRows) -> GlobalContrastiveLoss | None:
    """The checkpoint's loss with its state, in evaluation mode; None for one without normalizers.

    Raises:
        InputError: the state does not fit the settings.
    """
    if args.loss is None or not factory.find_preset(args.loss).has_parts:
        return None
    loss = build_loss(args, rows.num_rows, args.device)
    try:
        loss.load_full_state(saved.entry["state"])
    except ValueError as error:
        raise InputError(f"--checkpoint: its state does not fit: {error}") from None
    return loss.eval()


def cache_key(args, job: Job, transform: Any) -> dict[str, Any]:
    """What embeddings depend on."""
    return {
        "weights": job.weights,
        "data": job.rows.digest if job.shards is None else job.shards.digest,
        "model": args.model,
        "precision": args.precision,
        "transform": str(transform),
    }


def embed_all(model: torch.nn.Module, source: Any, cache: EmbeddingCache, args) -> Embedded:
    """The embeddings of all rows, those that are missing computed by all processes.

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


@dataclass
class Result:
    """Args:
    summary: what goes into the JSON file.
    anchors: rows of the anchors, (k,).
    exact: true log-normalizers, (2, k) float64.
    estimates: by name, (2, k) float64; NaN where the estimator has none.
    """

    summary: dict[str, Any]
    anchors: Tensor
    exact: Tensor
    estimates: dict[str, Tensor]


@torch.no_grad()
def compare(options, args, job: Job, saved: Saved, loss: GlobalContrastiveLoss | None, embedded: Embedded) -> Result:
    """True and estimated log-normalizers of a random sample of anchors; the same on every process."""
    num_read = len(embedded.rows)
    for size in job.sizes:
        if size > num_read:
            raise InputError(f"--batch-sizes: {size} is more than the {num_read} rows that can be read")
    draw_anchors = torch.Generator().manual_seed(options.report_seed)
    places = torch.randperm(num_read, generator=draw_anchors)[: options.anchors].sort().values
    index = embedded.rows[places]
    tau = torch.tensor(saved.tau, dtype=torch.float32, device=args.device)
    if loss is not None:
        tau = loss.temperature.taus(tau, index.to(args.device))
    common = {
        "surrogate": Identity() if loss is None else loss.surrogate,
        "eps": EPS if loss is None else loss.eps,
        "both_sides": loss is not None and loss.both_sides,
        "device": args.device,
    }
    true = in_parts(
        exact.exact_log_normalizers, embedded, places, tau, args, unit=1, what="Exact", total=num_read,
        chunk_mib=options.chunk_mib, **common,
    )
    estimates = {}
    if loss is not None and not isinstance(loss.normalizer, BatchNormalizer):
        estimates[loss.normalizer.name] = checkpoint_estimate(loss, embedded, places, tau, args)
    for size in job.sizes:
        estimates[f"batch of {size}"] = in_parts(
            exact.minibatch_log_normalizers, embedded, places, tau, args, unit=exact.group_size(size),
            what=f"Batches of {size}", batch_size=size, seed=options.report_seed, **common,
        )
    summary = {
        "checkpoint": os.path.abspath(options.checkpoint),
        "epoch": saved.epoch,
        "model": args.model,
        "rows": embedded.num_rows,
        "rows_left_out": embedded.num_rows - num_read,
        "first_problem": embedded.problem,
        "anchors": len(places),
        "seed": options.report_seed,
        **settings(args, loss, tau, common),
        "exact": {side: spread_of(true[i]) for i, side in enumerate(SIDES)},
        "estimators": [{"name": name, **errors(value, true)} for name, value in estimates.items()],
    }
    return Result(summary, index, true, estimates)


def in_parts(function: Callable, embedded: Embedded, places: Tensor, tau: Tensor, args, unit: int, what: str,
             total: int | None = None, **settings: Any) -> Tensor:
    """A function of `open_clip_ext.exact` for all anchors, (2, k) on the CPU, the anchors divided over processes.

    Args:
        unit: anchors that must stay together.
        what: names the progress bar; `total`: its length, by default the process's anchors.
    """
    units = math.ceil(len(places) / unit)
    start, stop = (unit * (units * rank // args.world_size) for rank in (args.rank, args.rank + 1))
    own, own_tau = places[start:stop], tau[:, start:stop] if tau.dim() else tau
    values = torch.empty(2, 0, dtype=torch.float64)
    if len(own):
        counted = " anchors" if total is None else " pairs"
        with tqdm(total=total or len(own), desc=what, unit=counted, unit_scale=True, disable=args.rank != 0) as bar:
            values = function(embedded.image, embedded.text, own, own_tau, progress=bar.update, **settings).cpu()
    if not args.distributed:
        return values
    parts: list[Any] = [None] * args.world_size
    dist.all_gather_object(parts, values)
    return torch.cat(parts, dim=1)


def checkpoint_estimate(loss: GlobalContrastiveLoss, embedded: Embedded, places: Tensor, tau: Tensor, args) -> Tensor:
    """alpha of all anchors from the checkpoint's normalizer, (2, k) float64, NaN where it has none.

    Every process computes all, in the same order: a normalizer may communicate.
    """
    image, text = (exact.Rows(side, args.device).take(places) for side in (embedded.image, embedded.text))
    index = embedded.rows[places].to(args.device)
    normalizer, step, queued = loss.normalizer, ESTIMATED_AT_ONCE, None
    if isinstance(normalizer, Queue) and normalizer.ring is not None:
        step = min(step, args.batch_size * args.accum_freq)
        texts, images = normalizer.ring.rows[:, : normalizer.ring.active]
        queued = exact.nearest_rows(embedded.image, embedded.text, images, texts, args.device)
    parts = []
    with exact.full_precision():
        for start in range(0, len(places), step):
            part = slice(start, start + step)
            if queued is not None:
                leave_out_own(normalizer, torch.isin(queued, places[part]).nonzero()[:, 0].to(args.device))
            positives = (image[part] * text[part]).sum(dim=1)
            part_tau = tau[:, part] if tau.dim() else tau
            # What falls back on its batch's own estimate has none.
            unknown = torch.full((2, len(positives)), math.nan, device=image.device)
            finite = torch.ones((), dtype=torch.bool, device=image.device)
            batch = Batch(image[part], text[part], positives, unknown, part_tau, index[part], finite)
            pairs = Pairs(image[part], text[part], image[part], text[part], 0)
            parts.append(normalizer(pairs, positives, part_tau, batch).double().cpu())
    return torch.cat(parts, dim=1)


def leave_out_own(queue: Queue, places: Tensor) -> None:
    """Let the queue leave out `places`, as in a training step those of the step's own batch: an anchor's own positive
    would hide every log-normalizer below -log k."""
    queue.own = places
    queue.train(len(places) > 0)


# Numbers and files


def settings(args, loss: GlobalContrastiveLoss | None, tau: Tensor, common: dict[str, Any]) -> dict[str, Any]:
    """What the normalizers depend on, for the JSON file."""
    surrogate = common["surrogate"]
    shown = {
        "loss": args.loss or ("siglip" if args.siglip else "clip"),
        "normalizer": None if loss is None else loss.normalizer.name,
        "temperature": None if loss is None else loss.temperature.name,
        "tau": tau.item() if tau.dim() == 0 else {side: spread_of(tau[i].cpu()) for i, side in enumerate(SIDES)},
        "eps": common["eps"],
        "surrogate": surrogate.name,
        "negatives": "both" if common["both_sides"] else "cross",
        "mixing": 0.0 if loss is None else loss.mixing,
        "mixing_applied": False,
    }
    return shown | {option.name: getattr(args, option.name) for option in surrogate.options}


def quantiles(values: Tensor) -> dict[str, float]:
    at = torch.tensor(QUANTILES, dtype=torch.float64) / 100
    return {str(name): value for name, value in zip(QUANTILES, values.double().quantile(at).tolist(), strict=True)}


def spread_of(values: Tensor) -> dict[str, Any]:
    """Mean, standard deviation and quantiles of values (k,)."""
    values = values.double()
    return {"mean": values.mean().item(), "std": values.std(correction=0).item(), "quantiles": quantiles(values)}


def errors(estimate: Tensor, true: Tensor) -> dict[str, Any]:
    """Of images, of texts and of both as anchors: `mse`, `bias` (mean of estimate - true) and `spread` (standard
    deviation of the same), so that mse = bias^2 + spread^2, its quantiles, and how many anchors had an estimate.

    Args:
        estimate, true: (2, k) float64.
    """
    image, text = estimate - true
    both = torch.cat([image, text])
    return {"image": error_of(image), "text": error_of(text), "both": error_of(both)}


def error_of(difference: Tensor) -> dict[str, Any]:
    known = difference[~difference.isnan()]
    counts = {"anchors": len(known), "without_estimate": len(difference) - len(known)}
    if len(known) == 0:
        return {**counts, "mse": None, "bias": None, "spread": None, "quantiles": None}
    shape = spread_of(known)
    mse = known.square().mean().item()
    return {**counts, "mse": mse, "bias": shape["mean"], "spread": shape["std"], "quantiles": shape["quantiles"]}


def write(folder: str, result: Result) -> None:
    """The picture, the anchors' values and, last, the report, each complete or absent."""

    def save(name: str, to: Callable[[str], Any]) -> None:
        path = os.path.join(folder, name)
        to(f"{path}.partial")
        os.replace(f"{path}.partial", path)

    def save_report(path: str) -> None:
        with open(path, "w") as file:
            json.dump(result.summary, file, indent=1, allow_nan=False)
            file.write("\n")

    values = {"anchors": result.anchors, "exact": result.exact, **result.estimates}
    save(PICTURE, lambda path: draw(path, result.exact, result.estimates, title(result.summary)))
    save(VALUES, lambda path: save_file({name: value.contiguous() for name, value in values.items()}, path))
    save(REPORT, save_report)


def title(summary: dict[str, Any]) -> str:
    tau = summary["tau"]
    shown = f"tau = {tau:.4g}" if isinstance(tau, float) else "tau = " + ", ".join(
        f"{tau[side]['mean']:.3g} ± {tau[side]['std']:.2g} ({side}s)" for side in SIDES
    )
    epoch = "" if summary["epoch"] is None else f" after epoch {summary['epoch']}"
    rows = summary["rows"] - summary["rows_left_out"]
    return f"Log-normalizers of {summary['loss']}{epoch}: n = {rows:,}, {summary['anchors']:,} anchors a side, {shown}"


def table(result: Result, folder: str) -> str:
    """What goes to stdout."""
    summary = result.summary
    lines = [title(summary)]
    if summary["rows_left_out"]:
        lines.append(f"{summary['rows_left_out']} of {summary['rows']} rows left out: {summary['first_problem']}")
    columns = ("mse", "bias", "spread", *(f"{name} %" for name in QUANTILES))
    lines.append(f"{'estimator':16}{'anchors':8}" + "".join(f"{name:>11}" for name in columns))
    for estimator in summary["estimators"]:
        for side in SIDES:
            error = estimator[side]
            numbers = [error[name] for name in ("mse", "bias", "spread")]
            numbers += [(error["quantiles"] or {}).get(str(name)) for name in QUANTILES]
            cells = "".join(f"{'-' if number is None else f'{number:.3g}':>11}" for number in numbers)
            lines.append(f"{estimator['name'] if side == 'image' else '':16}{side:8}{cells}")
        if missing := estimator["both"]["without_estimate"]:
            lines.append(f"{'':16}{missing} of {2 * summary['anchors']} have no estimate yet and are left out")
    lines.append(os.path.join(folder, REPORT))
    return "\n".join(lines)
