"""Start-up with many shards: seconds, memory, and what is shown meanwhile.

    python benchmarks/startup.py --json startup.json

What the command does with its shards before anything is written: list them, look whether they are there, find their
samples (`find_rows`), and check that every loader worker gets a batch. Three data sets: local shards with a sizes.json
beside them; the same without, so that their headers are read; remote ones with --shard-sizes. Each is started twice,
since counts are remembered. The tars are hard links to a few, in the system's cache: what a disk or a network adds is
not in the figures. Memory is the most held at a time beyond what was held before. Linux only.
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import pickle
import tarfile
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from measuring import peak_resident, table
from PIL import Image
from tqdm import tqdm

LINKS = 30_000  # to one tar; file systems allow 65,000 and fewer


def write_tar(path: Path, samples: int) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (8, 8)).save(picture, "jpeg")
    with tarfile.open(path, "w") as tar:
        for sample in range(samples):
            for suffix, content in (("jpg", picture.getvalue()), ("txt", b"a caption")):
                member = tarfile.TarInfo(f"{sample:06}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def make(folder: Path, name: str, shards: int, samples: int) -> str:
    """A data set of local or remote shards; the flags that train on it."""
    sizes = {f"{shard:06}.tar": samples for shard in range(shards)}
    if name == "remote, --shard-sizes":
        (folder / "given.json").write_text(json.dumps(sizes))
        urls = f"s3://bucket/data/{{000000..{shards - 1:06}}}.tar"
        return f"--train-data {urls} --shard-sizes {folder}/given.json"
    for shard, path in enumerate(tqdm(sizes, desc=f"making {name}")):
        if shard % LINKS == 0:
            source = folder / f"source-{shard}.tar"
            write_tar(source, samples)
        os.link(source, folder / path)
    if name == "local, sizes.json":
        (folder / "sizes.json").write_text(json.dumps(sizes))
    return f"--train-data {folder}/{{000000..{shards - 1:06}}}.tar"


def start(flags: str) -> dict:
    """One start, in a process of its own."""
    from training_ext.data.counting import check_loaders
    from training_ext.data.epochs import check_steps, samples_per_epoch
    from training_ext.data.rows import find_rows
    from training_ext.flags import params

    multiprocessing.set_start_method("fork", force=True)  # as in a command; this process was spawned
    common = "--loss fastclip-v3 --dataset-type webdataset --workers 1"
    args = params.parse_args([*common.split(), *flags.split()])
    found = []

    def look() -> None:
        rows = find_rows(args)
        check_loaders(args, rows, 1)
        check_steps(args, rows.kind, samples_per_epoch(args, rows), 1)
        found.append(rows)

    with contextlib.redirect_stderr(io.StringIO()) as shown:
        before = time.process_time()
        seconds, memory = peak_resident(look)
        cpu_seconds = time.process_time() - before
    bars = sorted({line.partition(":")[0] for line in shown.getvalue().replace("\r", "\n").splitlines() if ":" in line})
    return {
        "rows": found[0].num_rows, "seconds": seconds, "cpu_seconds": cpu_seconds, "memory_bytes": memory,
        "sent_bytes": len(pickle.dumps(found[0])), "progress": bars,
    }


def main(argv: list[str] | None = None) -> list[dict]:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--listed", type=int, default=100_000, help="shards whose sizes are in a file")
    flags.add_argument("--scanned", type=int, nargs="+", default=[2_000], help="shards that are counted")
    flags.add_argument("--samples", type=int, default=1_000, help="in each shard that is counted; 100 in the others")
    flags.add_argument("--json", help="write the results here, too")
    args = flags.parse_args(argv)
    cases = [("local, sizes.json", args.listed, 100), ("remote, --shard-sizes", args.listed, 100)]
    cases += [("local, counted", shards, args.samples) for shards in args.scanned]
    context = multiprocessing.get_context("spawn")
    results = []
    for name, shards, samples in cases:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["XDG_CACHE_HOME"] = os.path.join(folder, "cache")
            data = make(Path(folder), name, shards, samples)
            for turn in ("first", "second"):
                with ProcessPoolExecutor(1, context) as process:
                    result = process.submit(start, data).result()
                results.append({"shards": name, "number": shards, "samples": samples, "start": turn, **result})
    print(table([
        {
            "shards": result["shards"], "number": f"{result['number']:,}", "samples each": result["samples"],
            "start": result["start"], "s": f"{result['seconds']:.1f}", "of the CPU": f"{result['cpu_seconds']:.1f}",
            "memory, MiB": f"{result['memory_bytes'] / 2**20:.0f}",
            "to each process, MiB": f"{result['sent_bytes'] / 2**20:.1f}",
            "progress": ", ".join(result["progress"]) or "-",
        }
        for result in results
    ]))
    if args.json:
        Path(args.json).write_text(f"{json.dumps(results, indent=1)}\n")
    return results


if __name__ == "__main__":
    main()
