"""Time and peak memory of every loss, forward and backward, as ratios to OpenCLIP's ClipLoss.

    python benchmarks/loss.py --json loss.json

Our loss and ClipLoss alternate on the same features in one process. The ratio is that of the medians; the quartiles are
those of the rounds' ratios. Memory is the largest amount that a call has allocated at a time. A network's updates are
left out (see `network.py`). Losses that compare anchors with m other vectors are also compared with ClipLoss plus the
bare matrix products that this takes: forward, and backward in the anchors if alpha has a gradient. `amorlip` and
ClipLoss are called eight times, since one call in eight trains AmorLIP's networks. `siglip-chunked` is compared with
SigLipLoss.

"Of the limit" is the time of the matrix products alone over that of the loss: four of B x B x d in two passes (three in
the one pass of `siglip-chunked`), and those with the m other vectors. No loss of this form can be faster than 100 %;
the same is given for ClipLoss. In batches for which ClipLoss has too little memory it is left out.

`--kernels auto eager` measures the losses of our kernels in both ways; `fused` is `auto` for every size of a batch.

`--peers FILE` adds losses of other code: FILE, in Python, defines PEERS, a dict from name to a function of
(rows, device) that returns a loss, called as ours with features, logit scale and `index=`.
"""

import runpy
from unittest.mock import patch

import torch
from measuring import (
    BareProducts,
    BatchProducts,
    Repeated,
    alternate,
    begin,
    fill,
    finish,
    note,
    parser,
    peak_memory,
    reference_of,
    shown,
    summary,
    table,
)
from open_clip.loss import ClipLoss, SigLipLoss
from torch.nn.functional import normalize
from tqdm import tqdm

import open_clip_ext
from open_clip_ext.kernels import choice
from open_clip_ext.losses import ChunkedCLIPLoss, ChunkedSigLIPLoss, GlobalContrastiveLoss
from open_clip_ext.memory import total_memory

CLIP_BLOCKS = 8  # B x B matrices that ClipLoss holds at a time


class Call:
    """One loss on one batch, forward and backward."""

    def __init__(
        self, loss: torch.nn.Module, batch: int, dim: int, dtype: torch.dtype, device: torch.device, rows: int
    ):
        generator = torch.Generator().manual_seed(1)
        image = normalize(torch.randn(batch, dim, generator=generator), dim=1)
        text = normalize(image + torch.randn(batch, dim, generator=generator) / dim**0.5, dim=1)
        self.features = [side.to(device, dtype).requires_grad_() for side in (image, text)]
        self.logit_scale = torch.tensor(1 / 0.03, device=device, requires_grad=True)
        self.loss = loss
        self.more = reference_of(loss, *self.features)
        if isinstance(loss, open_clip_ext.losses.Loss):
            loss.set_epoch(0)
        if isinstance(loss, (SigLipLoss, ChunkedSigLIPLoss)):
            self.more["logit_bias"] = torch.tensor(-10.0, device=device, requires_grad=True)
        if not isinstance(loss, (ClipLoss, SigLipLoss)):
            self.more["index"] = torch.randint(rows, (batch,), generator=generator).to(device)
        self.autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)

    def __call__(self) -> None:
        with self.autocast:
            value = self.loss(*self.features, self.logit_scale, **self.more)
        value.backward()
        for tensor in (*self.features, self.logit_scale):
            tensor.grad = None


def compare(
    name: str, batch: int, dim: int, dtype: torch.dtype, kernels: str | None, device: torch.device, args
) -> dict:
    """One loss's figures; `kernels`: those of `--kernels`, or None for the default."""
    title, name = name, name.removesuffix(", loss graph")
    settings, m = ({"npn_updates": 0} if name == "neuclip" else {}), args.m
    if name == "queue":  # a shorter one would hold only the batch
        m = max(m, 4 * batch)
        settings["queue_size"] = m
    if name == "neuclip":
        settings["npn_prototypes"] = m
    needs_products = bool(settings)
    if title != name:
        settings["loss_graph"] = True
    if kernels:
        settings["kernels"] = "eager" if kernels == "eager" else "auto"
    rows = args.num_samples
    if name in args.peers:
        loss = args.peers[name](rows, device)
    else:
        loss = open_clip_ext.create_loss(name, num_samples=rows, epochs=8, device=device, **settings)
    ours = Call(loss, batch, dim, dtype, device, rows)
    sigmoid = isinstance(loss, ChunkedSigLIPLoss)
    clip = Call(SigLipLoss() if sigmoid else ClipLoss(), batch, dim, dtype, device, rows)
    fill(loss, ours, batch)
    label = f"{title}, {kernels}" if kernels else title
    result = {"loss": label, "kernels": kernels, "batch": batch, "dim": dim, "dtype": str(dtype).removeprefix("torch.")}
    functions = {"ours": ours, "clip": clip, "batch": BatchProducts(batch, dim, device, 1 if sigmoid else 2)}
    if CLIP_BLOCKS * 4 * batch**2 >= total_memory(device):
        del functions["clip"]
        times = alternate(functions, device, seconds=args.seconds, is_ahead=args.ahead)
        limit = summary(times, "ours", "batch")
        result |= {"seconds": limit["seconds"], "limit": limit, "bytes": peak_memory(ours, device)}
        return result
    if needs_products:
        back = "anchors" if loss.objective.through_alpha else None
        functions["products"] = BareProducts(batch, dim, m, back, device)
    if name == "amorlip":  # the steps between two trainings of its networks, after the first epoch
        ours()
        loss.set_epoch(1)
        functions = {name: Repeated(function, loss.amor_online_every) for name, function in functions.items()}
    times = alternate(functions, device, seconds=args.seconds, is_ahead=args.ahead)
    result |= summary(times, "ours", "clip")
    if needs_products:
        result["to_clip_and_products"] = summary(times, "ours", ["clip", "products"])
    if isinstance(loss, (ChunkedCLIPLoss, ChunkedSigLIPLoss, GlobalContrastiveLoss)):
        result["limit"] = summary(times, "ours", ["batch", "products"] if needs_products else "batch")
        result["clip_limit"] = summary(times, "clip", "batch")
    result["bytes"], result["base_bytes"] = (peak_memory(functions[name], device) for name in ("ours", "clip"))
    return result


def cells(result: dict) -> dict[str, str]:
    extra, limit, alone = result.get("to_clip_and_products"), result.get("limit"), "base_seconds" not in result
    time = {"time": "", "quartiles": "", "ms": f"{1e3 * result['seconds']:.1f}"} if alone else shown(result)
    return {
        "loss": result["loss"], "B": result["batch"], "d": result["dim"], "features": result["dtype"], **time,
        "clip ms": "" if alone else f"{1e3 * result['base_seconds']:.1f}",
        "products ms": f"{1e3 * limit['base_seconds']:.1f}" if limit else "",
        "memory": "" if alone else f"{result['bytes'] / result['base_bytes']:.2f}",
        "MiB": f"{result['bytes'] / 2**20:.1f}",
        "to clip + products": f"{extra['ratio']:.2f}" if extra else "",
        "of the limit": f"{100 / limit['ratio']:.0f} %" if limit else "",
        "clip": "" if alone or not limit else f"{100 / result['clip_limit']['ratio']:.0f} %",
    }


def main(argv: list[str] | None = None) -> list[dict]:
    flags = parser(__doc__)
    flags.add_argument("--losses", nargs="+", help="default: all; 'NAME, loss graph' is with --loss-graph")
    flags.add_argument("--batch-sizes", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    flags.add_argument("--dims", type=int, nargs="+", default=[512])
    flags.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32"])
    flags.add_argument("-m", type=int, default=4096, help="prototypes of neuclip, length of the queue (at least 4 B)")
    flags.add_argument("--num-samples", type=int, default=1_000_000, help="rows of the tables")
    flags.add_argument("--kernels", nargs="+", choices=("auto", "eager", "fused"), default=[None], help="default: auto")
    flags.add_argument("--ahead", action="store_true", help="on a GPU times where the host is ahead, as in a training")
    flags.add_argument(
        "--peers", default={}, type=lambda path: runpy.run_path(path)["PEERS"], help="file with losses of other code"
    )
    args = flags.parse_args(argv)
    device = begin(args)
    names = args.losses or [preset.name for preset in open_clip_ext.list_losses() if not preset.is_open_clip]
    names += args.peers
    cases = [
        (name, batch, dim, getattr(torch, dtype), kernels)
        for dtype in args.dtypes for dim in args.dims for batch in args.batch_sizes for name in names
        for kernels in args.kernels
    ]
    results = []
    for case in tqdm(cases, desc="losses"):
        least = dict.fromkeys(choice.LEAST_PAIRS, 0) if case[-1] == "fused" else {}
        with patch.dict(choice.LEAST_PAIRS, least):
            results.append(note(compare(*case, device, args)))
    print(table([cells(result) for result in results]))
    finish(args, device, results)
    return results


if __name__ == "__main__":
    main()
