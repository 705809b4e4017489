"""docs/files.md names every file of both packages with the first sentence of its docstring.

    python tests/test_file_list.py > docs/files.md
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEAD = """# Files

Each file of the two packages, with the first sentence of its docstring.
[architecture.md](architecture.md) says how they work together. `python tests/test_file_list.py` writes this page.
"""


def first_sentence(path: Path) -> str:
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())
    return text.split(". ")[0].rstrip(".:")


def page() -> str:
    lines = [HEAD]
    for package in ("open_clip_ext", "training_ext"):
        folders = sorted({path.parent for path in (ROOT / package).rglob("*.py")})
        for folder in folders:
            lines += [f"## {folder.relative_to(ROOT)}/", "", "| file | what |", "|---|---|"]
            lines += [f"| `{path.name}` | {first_sentence(path)} |" for path in sorted(folder.glob("*.py"))]
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def test_the_page_is_that_of_the_files():
    assert (ROOT / "docs/files.md").read_text() == page()


if __name__ == "__main__":
    print(page(), end="")
