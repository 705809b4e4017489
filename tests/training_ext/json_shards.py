"""Shards of tiny pictures with a .json each."""

import io
import json
from collections.abc import Callable
from pathlib import Path

from webdataset import TarWriter

from open_clip_ext.data import Scenes

PER_SHARD = 8


def write(folder: Path, rows: int, fields: Callable[[int], object], has_text: bool = True) -> str:
    """Write `rows` samples with what `fields` gives for each row as their .json; the flags of the data, where the last
    shard's number is `{last}`."""
    for row, (image, caption) in enumerate(Scenes(rows, image_size=48)):
        if row % PER_SHARD == 0:
            tar = TarWriter(str(folder / f"train-{row // PER_SHARD:06d}.tar"), encoder=False)
        stream = io.BytesIO()
        image.save(stream, "PNG")
        text = {"txt": caption.encode()} if has_text else {}
        tar.write({"__key__": f"{row:09d}", "png": stream.getvalue(), **text, "json": json.dumps(fields(row)).encode()})
        if row % PER_SHARD == PER_SHARD - 1 or row == rows - 1:
            tar.close()
    return f"--dataset-type webdataset --train-data {folder}/train-{{{{000000..00000{{last}}}}}}.tar"
