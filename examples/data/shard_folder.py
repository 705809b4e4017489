"""A folder of shards: which one may be written to, and writing it so that each file is complete or absent."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import evalset
from tqdm import tqdm

from open_clip_ext.files import PARTIAL, whole_file
from training_ext.tools.pairs.shards import SIZES, why_unfit, write_shard

_OWN_FILE = re.compile(
    r"((train|val|test)-\d{6}\.tar|sizes\.json|licenses\.tsv"
    r"|zeroshot-(concepts|emoji)/(classnames\.txt|zeroshot_classification_templates\.txt|test/(nshards\.txt|0\.tar)))"
    r"(\.([0-9a-f]{8}\.)?partial)?"
)

# Key, image, caption, label.
Sample = tuple[str, bytes, str, int | None]
Samples = tuple[int, Iterator[Sample]]


def check_out(out: str, overwrite: bool) -> Path:
    """The folder `--out`; ValueError if shards cannot be written there, or are there and may not be overwritten."""
    if wrong := why_unfit(out):
        raise ValueError(f"argument --out: {wrong}")
    folder = Path(out)
    try:
        _check_folder(folder, out, overwrite)
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise ValueError(f"argument --out: the folder {out!r} cannot be made: {error.strerror or error}") from error
    return folder


def _check_folder(folder: Path, out: str, overwrite: bool) -> None:
    """Raise ValueError or OSError if `folder`, given as `out`, cannot be made or has shards already."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"argument --out: must be a folder, got the file {out!r}")
    held = [path for name in ("*.tar", SIZES, evalset.TASKS_FILE) for path in sorted(folder.glob(name))]
    held += [path for path in sorted(_own_files(folder)) if path.suffix != PARTIAL] if folder.exists() else []
    if held and not overwrite:
        holds = held[0].relative_to(folder).as_posix()
        raise ValueError(f"argument --out: {out!r} already holds {holds}; name another folder or add --overwrite")
    _check_sizes(folder)
    # Checked before minutes of rendering, and without creating anything.
    above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ValueError(f"argument --out: the folder {out!r} cannot be made in {str(above)!r}")


def _check_sizes(folder: Path) -> None:
    """Raise ValueError if the folder's sizes.json, which will be replaced, counts shards of other names."""
    try:
        sizes = json.loads((folder / SIZES).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return
    other = [name for name in sizes if not _OWN_FILE.fullmatch(name)] if isinstance(sizes, dict) else []
    if other:
        raise ValueError(f"argument --out: {SIZES} in {str(folder)!r} counts {other[0]}, too; name another folder")


def _own_files(folder: Path) -> list[Path]:
    paths = [*folder.iterdir(), *folder.glob("zeroshot-*/*"), *folder.glob("zeroshot-*/test/*")]
    return [path for path in paths if _OWN_FILE.fullmatch(path.relative_to(folder).as_posix())]


def _write_shard(path: Path, samples: Iterator[Sample], count: int, image_format: str, bar: tqdm) -> None:
    def members() -> Iterator[dict[str, str | bytes]]:
        for key, image, caption, label in islice(samples, count):
            named = {} if label is None else {"cls": str(label).encode()}
            yield {"__key__": key, image_format: image, "txt": caption.encode(), **named}
            bar.update()

    write_shard(path, members())


def write_all(
    folder: Path,
    splits: dict[str, Samples],
    beside: dict[str, str | Samples],
    per_shard: int,
    image_format: str,
) -> dict[str, int]:
    """Write the splits' shards and the other files, `beside`, in place of those that an earlier run wrote; return the
    number of samples in each shard."""
    own = _own_files(folder)
    # sizes.json is removed first, so that an interrupted run never looks complete.
    for path in sorted(own, key=lambda path: path.name != SIZES):
        path.unlink()
    sizes: dict[str, int] = {}
    for split, (total, samples) in splits.items():
        with tqdm(total=total, desc=split, unit="sample", disable=not total) as bar:
            for shard, start in enumerate(range(0, total, per_shard)):
                count = min(per_shard, total - start)
                path = folder / f"{split}-{shard:06d}.tar"
                _write_shard(path, samples, count, image_format, bar)
                sizes[path.name] = count
    for name, content in beside.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            _write_text(path, content)
            continue
        total, samples = content
        with tqdm(total=total, desc=name, unit="sample") as bar:
            _write_shard(path, samples, total, image_format, bar)
    _write_text(folder / SIZES, json.dumps(sizes, indent=2) + "\n")
    return sizes


def _write_text(path: Path, text: str) -> None:
    with whole_file(path, text=True) as file:
        file.write(text)
