"""A folder for zero-shot classification in CLIP_benchmark's format."""

import io
import tarfile
from pathlib import Path

from PIL import Image


def write_zero_shot(folder: Path) -> None:
    """Write a red and two blue squares, with a member that must not be unpickled."""
    (folder / "test").mkdir(parents=True)
    (folder / "test" / "nshards.txt").write_text("1\n")
    (folder / "classnames.txt").write_text("red\nblue\n")
    (folder / "zeroshot_classification_templates.txt").write_text("{c} square\na {c} square\n")
    with tarfile.open(folder / "test" / "0.tar", "w") as tar:
        for name, cls in (("one", b"0"), ("two", b"1"), ("three", b"1")):
            picture = io.BytesIO()
            Image.new("RGB", (8, 8), "red" if cls == b"0" else "blue").save(picture, "png")
            for kind, content in (("png", picture.getvalue()), ("cls", cls), ("pickle", b"not unpickled")):
                member = tarfile.TarInfo(f"{name}.{kind}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
