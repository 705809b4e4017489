"""Write an HTML page of the samples with the largest and smallest temperatures, with thumbnails and captions.

As in iSogCLR, Section 6.3: samples of common meaning, with many similar negatives, have large temperatures, and rare
samples small ones.
"""

import base64
import html
import io
import logging
from argparse import Namespace
from typing import Any

from PIL import Image
from torch import Tensor

from open_clip_ext.files import whole_file
from open_clip_ext.temperatures import IndividualTemperature
from training_ext.context import Run
from training_ext.core.checkpoint import read_entry
from training_ext.core.checkpoint_files import most_trained
from training_ext.core.reading import source_of
from training_ext.core.rows import DataRows
from training_ext.core.shards import is_local
from training_ext.feature import Feature

FILE = "temperatures.html"
SHOWN = 12  # samples of each kind
THUMBNAIL = 128  # pixels
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
STYLE = """body { font: 14px sans-serif; margin: 2em; max-width: 75em } table { border-collapse: collapse }
td, th { padding: 0.2em 0.8em; text-align: right } section { display: flex; flex-wrap: wrap; gap: 12px }
figure { margin: 0; width: 132px } figcaption { font-size: 12px; overflow-wrap: anywhere } img { max-width: 128px }"""


class TemperatureSheet(Feature):
    """Writes the page after the training on process 0, unless the temperatures lie in files beside the checkpoint."""

    files = {FILE: "samples by temperature"}

    def __init__(self, run: Run):
        super().__init__(run)
        self._rows: DataRows | None = None

    def data_built(self, data: dict[str, Any], rows: DataRows | None) -> None:
        self._rows = rows

    def end(self, trained: bool) -> None:
        args = self.run.args
        path = self.run.file(FILE) if trained and args.temperature == IndividualTemperature.name else None
        if path is None:
            return
        try:
            _, entry = read_entry(most_trained(args.checkpoint_path) or "")
            taus = None if entry is None else entry["state"].get("temperature.tau")
            if taus is not None:
                write_sheet(path, taus, args, self._rows)
                logging.info(f"The samples with the largest and smallest temperatures: {path}")
        except Exception as error:  # the training has succeeded without it
            logging.warning(f"The page of temperatures was not written: {error!r}")


def write_sheet(path: str, taus: Tensor, args: Namespace, rows: Any) -> None:
    """Write the page to `path`.

    Args:
        taus: temperatures of the n samples as image and as text anchors, (n, 2).
        args, rows: command line and data rows of the training.
    """
    chosen = {
        (side, end): taus[:, number].topk(min(SHOWN, len(taus)), largest=end == "largest").indices.tolist()
        for number, side in enumerate(("images", "texts"))
        for end in ("largest", "smallest")
    }
    samples = _read({row for found in chosen.values() for row in found}, args, rows)
    parts = [
        "<!doctype html><meta charset='utf-8'><title>Temperatures</title>",
        f"<style>{STYLE}</style><h1>Temperatures of {len(taus):,} samples</h1>",
        f"<p>{html.escape(args.name)}, --loss {html.escape(args.loss)}, after {args.epochs} epochs</p>",
        _quantiles(taus),
    ]
    for (side, end), found in chosen.items():
        number = 0 if side == "images" else 1
        figures = (_figure(row, taus[row, number].item(), samples.get(row)) for row in found)
        parts.append(f"<h2>The {end} of {side}</h2><section>{''.join(figures)}</section>")
    with whole_file(path, text=True) as file:
        file.write("\n".join(parts))


def _quantiles(taus: Tensor) -> str:
    ordered = taus.sort(dim=0).values
    places = [round(q * (len(taus) - 1)) for q in QUANTILES]
    lines = ["<tr><th></th>" + "".join(f"<th>{100 * q:g} %</th>" for q in QUANTILES) + "</tr>"]
    for number, side in enumerate(("images", "texts")):
        cells = "".join(f"<td>{ordered[place, number]:.4g}</td>" for place in places)
        lines.append(f"<tr><th>{side}</th>{cells}</tr>")
    return f"<table>{''.join(lines)}</table>"


def _figure(row: int, tau: float, sample: tuple[Image.Image, str] | None) -> str:
    picture, caption = "", "(cannot be shown)"
    if sample is not None:
        image, caption = sample
        image = image.convert("RGB")
        image.thumbnail((THUMBNAIL, THUMBNAIL))
        content = io.BytesIO()
        image.save(content, "png")
        picture = f"<img src='data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}' alt=''>"
    return f"<figure>{picture}<figcaption><b>{tau:.4g}</b> row {row}<br>{html.escape(caption)}</figcaption></figure>"


def _read(wanted: set[int], args: Namespace, rows: Any) -> dict[int, tuple[Image.Image, str]]:
    """Image and caption by row; rows that cannot be read, or are not on this machine, are left out."""
    if args.dataset_type == "synthetic" or (rows.shards is not None and not all(map(is_local, rows.shards.urls))):
        return {}
    as_list = lambda text: [text] if isinstance(text, str) else text  # noqa: E731
    source = source_of(args, rows.kind, rows.shards, lambda image: image, THUMBNAIL, as_list)
    found = [source(row, row + 1, lambda problem: None) for row in sorted(wanted)]
    return {row: (image, caption) for samples in found for row, image, caption in samples}
