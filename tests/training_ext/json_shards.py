"""Tars of given members, and shards of tiny pictures with a .json each."""

import io
import json
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

from open_clip_ext.data import Scenes

PER_SHARD = 8


def tar(path: Path, members: Iterable[tuple[str, bytes]], mode: str = "w") -> None:
    with tarfile.open(path, mode) as file:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))


def write(folder: Path, rows: int, fields: Callable[[int], object], has_text: bool = True) -> str:
    """Write `rows` samples with what `fields` gives for each row as their .json; the flags of the data, where the last
    shard's number is `{last}`."""
    members: list[tuple[str, bytes]] = []
    for row, (image, caption) in enumerate(Scenes(rows, image_size=48)):
        stream = io.BytesIO()
        image.save(stream, "PNG")
        text = {"txt": caption.encode()} if has_text else {}
        sample = {"json": json.dumps(fields(row)).encode(), "png": stream.getvalue(), **text}
        members += [(f"{row:09d}.{suffix}", content) for suffix, content in sample.items()]
        if row % PER_SHARD == PER_SHARD - 1 or row == rows - 1:
            tar(folder / f"train-{row // PER_SHARD:06d}.tar", members)
            members = []
    return f"--dataset-type webdataset --train-data {folder}/train-{{{{000000..00000{{last}}}}}}.tar"
