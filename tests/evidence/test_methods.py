"""Galleries, differences, the control with queued negatives, and interpolated weights."""

import io
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image


def test_a_gallery_of_icons_that_no_run_has_used(evidence, monkeypatch):
    """Of 5 new images one is a near duplicate of a training row, one of an earlier one, and one has a caption again."""
    import gallery
    from webdataset import TarWriter

    data = Path("data")
    data.mkdir()
    image = {shade: Image.new("RGB", (32, 32), (shade, 100, 200)) for shade in (0, 64, 70, 128, 160, 192)}
    image[192].putpixel((0, 0), (0, 0, 0))
    shards = [[(0, "a")], [(255, "b")], [(1, "c"), (64, "d"), (70, "e"), (128, "d"), (160, "f"), (192, "a")]]
    image[1], image[255] = image[0].copy(), Image.new("RGB", (32, 32))
    image[1].putpixel((3, 3), (30, 110, 200))
    for number, shard in enumerate(shards):
        with TarWriter(str(data / f"train-{number:06}.tar"), encoder=False) as tar:
            for shade, caption in shard:
                buffer = io.BytesIO()
                image[shade].save(buffer, "png")
                tar.write({"__key__": f"set_{shade}", "png": buffer.getvalue(), "txt": caption.encode()})
    cells = "cells: {isolation: {shards: 1, gallery: fresh/gallery}, large: {shards: 2}}"
    Path("cells.yaml").write_text(f"{cells}\nrecipe: x\nbatch: 1\nwarmup: 0\nmethods: {{}}\norder: []\n")
    monkeypatch.setattr(sys, "argv", ["", "--data", "data", "--grid", "cells.yaml", "--samples", "3"])
    gallery.main()
    found = list(gallery.samples(data / "fresh" / "gallery-000000.tar"))
    assert [sample["__key__"] for sample in found] == ["set_64", "set_160", "set_192"]
    assert json.loads((data / "fresh" / "sizes.json").read_text()) == {"gallery-000000.tar": 3}
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-1], "4"])
    with pytest.raises(SystemExit, match="2"):
        gallery.main()


def test_declared_comparisons_by_hand(evidence):
    """Paired by seed, and Welch's where the order differs; Holm's correction counts what did not run."""
    _, _, report = evidence
    ours, theirs = [5.0, 6.0, 7.0, 6.0, 6.0], [4.0, 4.0, 6.0, 5.0, 5.0]
    difference, half, p = report.tested(ours, theirs, True)
    assert difference == pytest.approx(1.2) and half == pytest.approx(2.776 * math.sqrt(0.2 / 5), rel=1e-3) and p < 0.01
    difference, half, p = report.tested(ours, theirs, False)
    assert difference == pytest.approx(1.2) and half == pytest.approx(2.31 * math.sqrt(0.24), rel=5e-3)  # 7.8 degrees
    assert report.holm([0.01, 0.03], 4) == pytest.approx([0.04, 0.09]) and report.holm([0.5]) == [0.5]


def test_the_control_with_queued_negatives(evidence):
    """XBM: OpenCLIP's loss at first, then the softmax over the batch and the latest pairs; kept in the state."""
    import xbm
    from open_clip.loss import ClipLoss

    pairs = torch.nn.functional.normalize(torch.randn(2, 6, 4, generator=torch.manual_seed(0)), dim=2)
    first, second = pairs[:, :3].requires_grad_(), pairs[:, 3:]
    scale, loss = torch.tensor(10.0), xbm.XBM(xbm_size=2)
    torch.testing.assert_close(loss(*first, scale), ClipLoss()(*first, scale))
    again = xbm.XBM(xbm_size=2)
    again.load_full_state(loss.full_state())
    image, text = (10 * mine @ torch.cat([of[3:], of[1:3]]).T for mine, of in zip(second, pairs.flip(0), strict=True))
    expected = (torch.logsumexp(both, dim=1) - both.diagonal() for both in (image, text))
    torch.testing.assert_close(again(*second, scale), sum(expected).mean() / 2)
    later = xbm.XBM(xbm_size=2, xbm_start=1)
    later.set_epoch(0)
    torch.testing.assert_close([later(*batch, scale) for batch in (first, second)][1], ClipLoss()(*second, scale))


def test_a_run_against_the_best_interpolation_of_another(evidence):
    """Between two shares the line counts, and at least as much of the new kind is asked for."""
    import interpolate

    clip = [(0.0, 30.0), (10.0, 28.0), (20.0, 20.0), (24.0, 10.0)]
    assert interpolate.best_old(clip, 15.0) == 24.0
    assert interpolate.best_old(clip, 10.0) == 28.0
    bent = [(0.0, 30.0), (20.0, 20.0), (15.0, 26.0)]  # more of both at the last share than on the line
    assert interpolate.best_old(bent, 12.0) == 26.0
    ends = [(15.0, 25.0), (10.0, 27.0)]
    curves = {"clip": {0: clip, 1: clip}, "recovery + GCL": {seed: [(0.0, 30.0), end] for seed, end in enumerate(ends)}}
    assert interpolate.differences(curves, "recovery + GCL") == [1.0, -1.0]
