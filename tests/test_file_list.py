"""docs/files.md has every folder of both packages with the first sentence of its docstring, and its files.

    python tests/test_file_list.py > docs/files.md
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEAD = """# Files

The folders of the two packages. The first sentence of a file says what it is for;
[architecture.md](architecture.md) says how they work together. `python tests/test_file_list.py` writes this page.

| folder | what | files |
|---|---|---|
"""


def first_sentence(path: Path) -> str:
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())
    return text.split(". ")[0].rstrip(".:")


def page() -> str:
    lines = []
    for package in ("open_clip_ext", "training_ext"):
        for folder in sorted({path.parent for path in (ROOT / package).rglob("*.py")}):
            files = " ".join(sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("__")))
            lines.append(f"| `{folder.relative_to(ROOT)}/` | {first_sentence(folder / '__init__.py')} | {files} |\n")
    return HEAD + "".join(lines)


def test_every_file_says_what_it_is_for():
    files = [*(ROOT / "open_clip_ext").rglob("*.py"), *(ROOT / "training_ext").rglob("*.py")]
    assert not [path for path in files if not first_sentence(path)]


def test_the_page_is_that_of_the_files():
    assert (ROOT / "docs/files.md").read_text() == page()


if __name__ == "__main__":
    print(page(), end="")
