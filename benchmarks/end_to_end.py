"""Samples per second of `open_clip_ext.main --loss X` and of OpenCLIP's own main, on the same shards and model.

    python benchmarks/end_to_end.py --json end_to_end.json

Both train in turn for one epoch each, several times, in processes of their own: data pipeline, model, loss, optimizer,
logging. OpenCLIP logs the mean time of a step every 10 steps; the rate is the batch size divided by the median of these
times, without the first.
"""

import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import begin, finish, parser, table
from tqdm import tqdm

from open_clip_ext import MODEL_CONFIGS

MAKE_SHARDS = Path(__file__).parents[1] / "examples/data/make_shards.py"
LINE = re.compile(r"Train Epoch: 0 .*? Batch \(t\): ([\d.]+),")
# OpenCLIP itself does not have the tiny model's configuration.
OPEN_CLIP = """import sys, open_clip
open_clip.add_model_config(sys.argv.pop(1))
from open_clip_train.main import main
main(sys.argv[1:])"""


def rate(command: list[str], flags: list[str], folder: Path, batch_size: int, threads: int | None) -> float:
    """Samples per second of an epoch."""
    name = f"run-{len(list(folder.iterdir()))}"
    environment = {**os.environ, **({"OMP_NUM_THREADS": str(threads)} if threads else {})}
    command = [*command, *flags, "--logs", str(folder), "--name", name]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    if run.returncode:
        sys.exit(f"{run.stdout[-2000:]}{run.stderr[-2000:]}")
    logged = LINE.findall((folder / name / "out.log").read_text())
    return batch_size / statistics.median(float(seconds) for seconds in logged[1:])


def main(argv: list[str] | None = None) -> list[dict]:
    flags = parser(__doc__)
    flags.add_argument("--losses", nargs="+", default=["clip", "fastclip-v3", "neuclip", "queue"])
    flags.add_argument("--model", default="ViT-shapes-tiny")
    flags.add_argument("--batch-size", type=int, default=128)
    flags.add_argument("--samples", type=int, default=5120, help="samples per epoch")
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument("--workers", type=int, default=1)
    flags.add_argument("--precision", default="fp32")
    flags.add_argument("--flags", default="", help="flags added to every run")
    args = flags.parse_args(argv)
    device = begin(args)
    with tempfile.TemporaryDirectory() as folder:
        data, logs = Path(folder, "data"), Path(folder, "logs")
        logs.mkdir()
        make = [str(MAKE_SHARDS), "shapes", "--out", str(data), "--num-samples", str(args.samples)]
        subprocess.run([sys.executable, *make], check=True, capture_output=True)
        shards = sorted(str(path) for path in data.glob("train-*.tar"))
        common = [
            "--model", args.model, "--train-data", "::".join(shards), "--dataset-type", "webdataset",
            "--train-num-samples", str(args.samples), "--batch-size", str(args.batch_size), "--epochs", "1",
            "--precision", args.precision, "--workers", str(args.workers), "--device", device.type,
            "--log-every-n-steps", "10", "--warmup", "10", *args.flags.split(),
        ]
        commands = {"OpenCLIP": ([sys.executable, "-c", OPEN_CLIP, str(MODEL_CONFIGS)], common)}
        for loss in args.losses:
            commands[loss] = ([sys.executable, "-m", "open_clip_ext.main"], [*common, "--loss", loss, "--log-all"])
        rates: dict[str, list[float]] = {name: [] for name in commands}
        with tqdm(total=args.rounds * len(commands), desc="epochs") as bar:
            for _ in range(args.rounds):
                for name, (command, run_flags) in commands.items():
                    rates[name].append(rate(command, run_flags, logs, args.batch_size, args.threads))
                    bar.update()
    results = []
    for name, values in rates.items():
        ratios = [ours / theirs for ours, theirs in zip(values, rates["OpenCLIP"], strict=True)]
        results.append({
            "loss": name, "samples_per_second": values, "median": statistics.median(values),
            "ratio": statistics.median(values) / statistics.median(rates["OpenCLIP"]), "ratios": ratios,
        })
    print(table([
        {
            "loss": result["loss"], "samples/s": f"{result['median']:.0f}", "of OpenCLIP's": f"{result['ratio']:.3f}",
            "single rounds": f"{min(result['ratios']):.2f}-{max(result['ratios']):.2f}",
        }
        for result in results
    ]))
    finish(args, device, results)
    return results


if __name__ == "__main__":
    main()
