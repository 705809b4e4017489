"""The code in README and docs/."""

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]


def code(heading: str | None, page: str = "README.md") -> list[str]:
    """The indented blocks below a heading, or above the first one, in order, without their indentation.

    Blank lines stay inside a block.
    """
    text = (ROOT / page).read_text()
    section = text if heading is None else text.split(f"## {heading}\n")[1]
    blocks = re.findall(r"(?:^    .*\n(?:\n+(?=    ))?)+", section.split("\n## ")[0], re.MULTILINE)
    return [textwrap.dedent(block) for block in blocks]
