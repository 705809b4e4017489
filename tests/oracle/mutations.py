"""Forty mutations of the packages' code, drawn at random and stored, and how many of them the fast tests find.

    python tests/oracle/mutations.py --list                             # with where each applies in today's code
    python tests/oracle/mutations.py --run --out FILE                   # hours; what FILE has already is not run again
    python tests/oracle/mutations.py --run --out FILE --only 3 --only 7 --against COMMIT
    python tests/oracle/mutations.py --draw                             # anew, from today's code

A mutation changes one place in one function: a comparison, a constant, an operator, a negated condition, a dropped
statement or argument. It is stored with the function's name and its old and new lines, so that it can be applied after
the function has moved to another file. Messages, logging and docstrings are not mutated.
"""

import argparse
import ast
import copy
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STORED = Path(__file__).with_suffix(".json")
PACKAGES = ("open_clip_ext", "training_ext", "examples/data")  # the last was part of the first when they were drawn
SEED, NUMBER = 0, 40
LIMIT = 3600  # seconds for the tests of a mutation, which may make them hang
OTHER = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
TALK = re.compile(r"^(logging|logger|warnings|print|InputError)\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Mutation:
    """One change.

    Args:
        path: file of the function when it was drawn.
        function: its name within the file, such as `Table.update`.
        nth: which of the function's places with the old lines it is, from 0.
    """

    kind: str
    path: str
    function: str
    old: list[str]
    new: list[str]
    nth: int


def functions(tree: Path) -> Iterator[tuple[str, str, Function, str]]:
    """Path, name, node and the file's text of every function and method; those within others belong to these."""

    def below(node: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, Function]]:
        for child in node.body:
            if isinstance(child, Function):
                yield prefix + child.name, child
            elif isinstance(child, ast.ClassDef):
                yield from below(child, f"{prefix}{child.name}.")

    for package in PACKAGES:
        for path in sorted((tree / package).rglob("*.py")):
            text = path.read_text()
            for name, node in below(ast.parse(text), ""):
                yield str(path.relative_to(tree)), name, node, text


# Drawing


def draw(tree: Path) -> list[Mutation]:
    every = [(path, name, node, text, _body(node)) for path, name, node, text in functions(tree)]
    lines = [sum((part.end_lineno or part.lineno) - part.lineno + 1 for part in body) for *_, body in every]
    chosen = random.Random(SEED)
    drawn: list[Mutation] = []
    while len(drawn) < NUMBER:
        path, name, node, text, body = chosen.choices(every, lines)[0]
        places = [place for part in body for place in _places(part)]
        if not places:
            continue
        kind = chosen.choice(sorted({kind for kind, _, _ in places}))
        _, place, by = chosen.choice([place for place in places if place[0] == kind])
        old, new = _lines(text, place, by)
        before = _found(text.splitlines()[node.lineno - 1 : place.lineno - 1], old)
        mutation = Mutation(kind, path, name, _stripped(old), _stripped(new), len(before))
        if ast.dump(ast.parse(mutated(mutation, tree)[1])) != ast.dump(ast.parse(text)) and mutation not in drawn:
            drawn.append(mutation)
    return drawn


def _body(function: Function) -> list[ast.stmt]:
    return function.body[1:] if ast.get_docstring(function) is not None else function.body


def _places(node: ast.AST) -> Iterator[tuple[str, Any, str]]:
    """What can be mutated below a node: kind, the node, and the source that replaces it."""
    if isinstance(node, ast.Raise | ast.JoinedStr) or isinstance(node, ast.Call | ast.Expr) and _talks(node):
        return
    for kind, changed in _changes(node):
        yield kind, node, ast.unparse(changed)
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list", "type_params"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _places(child)


def _talks(node: ast.AST) -> bool:
    """Whether it is a message, a line of the log, or a docstring."""
    inner = node.value if isinstance(node, ast.Expr) else node
    return isinstance(inner, ast.Constant) or isinstance(inner, ast.Call) and bool(TALK.match(ast.unparse(inner.func)))


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    def with_(**fields: object) -> ast.AST:
        changed = copy.deepcopy(node)
        for name, value in fields.items():
            setattr(changed, name, value)
        return changed

    match node:
        case ast.Compare(ops=[operator, *rest]):
            yield "comparison", with_(ops=[OTHER[type(operator)](), *rest])
        case ast.BoolOp(op=operator):
            yield "operator", with_(op=OTHER[type(operator)]())
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in OTHER:
            if not any(isinstance(part, ast.JoinedStr) or _is_text(part) for part in (left, right)):
                yield "operator", with_(op=OTHER[type(operator)]())
        case ast.Constant(value=bool(value)):
            yield "constant", with_(value=not value)
        case ast.Constant(value=int(value)):
            yield "constant", with_(value=value + 1)
        case ast.Constant(value=float(value)):
            yield "constant", with_(value=2 * value or 1.0)
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield "condition", with_(test=ast.UnaryOp(ast.Not(), test))
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "statement", ast.Pass()
        case ast.Call(args=args, keywords=[*keywords, _]):
            yield "argument", with_(keywords=keywords)
        case ast.Call(args=[_, *_] as args) if len(args) > 1:
            yield "argument", with_(args=args[:-1])


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _lines(text: str, place: Any, by: str) -> tuple[list[str], list[str]]:
    """The lines that a node is on, and these with `by` in its place; of a block its condition alone."""
    if isinstance(place, ast.If | ast.While):
        place, by = place.test, f"not ({ast.unparse(place.test)})"
    old = text.splitlines()[place.lineno - 1 : place.end_lineno]
    before = old[0].encode()[: place.col_offset].decode()
    after = old[-1].encode()[place.end_col_offset :].decode()
    return old, (before + by + after).splitlines()


# Applying


class GoneError(Exception):
    """The code has no longer what a mutation changes."""


def mutated(mutation: Mutation, tree: Path) -> tuple[str, str]:
    """Path and new text of the file that a mutation changes.

    Raises:
        GoneError: no function of the name has the old lines.
    """
    last = mutation.function.rpartition(".")[2]
    named = [place for place in functions(tree) if place[1].rpartition(".")[2] == last]
    if not named:
        raise GoneError(f"there is no function {last}")
    # The nearest first: of the whole name, in the same file, in a file of the same name.
    path, name = mutation.path, mutation.function
    named.sort(key=lambda place: (place[1] != name, place[0] != path, Path(place[0]).stem != Path(path).stem))
    for path, _, node, text in named:
        lines = text.splitlines(keepends=True)
        found = _found(lines[node.lineno - 1 : node.end_lineno], mutation.old)
        if len(found) > mutation.nth:
            start = node.lineno - 1 + found[mutation.nth]
            indent = lines[start].removesuffix(lines[start].lstrip())
            new = [f"{indent}{line}\n" for line in mutation.new]
            return path, "".join(lines[:start] + new + lines[start + len(mutation.old) :])
    raise GoneError(f"no function {last} has the old lines")


def _found(lines: list[str], wanted: list[str]) -> list[int]:
    """Where the wanted lines begin, whatever their indentation."""
    stripped, wanted = _stripped(lines), _stripped(wanted)
    return [i for i in range(len(lines)) if stripped[i : i + len(wanted)] == wanted]


def _stripped(lines: list[str]) -> list[str]:
    return [line.strip() for line in lines]


# Running


def run(numbers: list[int], commit: str, out: Path, workers: int) -> None:
    commit = _git(ROOT, "rev-parse", commit)
    results: dict[str, Any] = {"commit": commit, "verdicts": {}}
    if out.exists():
        results = json.loads(out.read_text())
    if results["commit"] != commit:
        raise SystemExit(f"{out} has the results of {results['commit']}; name another file, or that commit")
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        _git(ROOT, "clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(tree))
        _git(tree, "checkout", "--quiet", "--detach", commit)
        for number in numbers:
            if str(number) not in results["verdicts"]:
                start = time.monotonic()
                verdict = judge(stored()[number], tree, workers)
                results["verdicts"][str(number)] = {**verdict, "seconds": round(time.monotonic() - start)}
                out.write_text(json.dumps(results, indent=1) + "\n")
                print(number, verdict, flush=True)
    counts = [verdict["verdict"] for verdict in results["verdicts"].values()]
    print({word: counts.count(word) for word in sorted(set(counts))})


def judge(mutation: Mutation, tree: Path, workers: int) -> dict[str, str]:
    """Whether a test goes red by the mutation that is green without it."""
    try:
        path, changed = mutated(mutation, tree)
    except GoneError as error:
        return {"verdict": "does not apply", "why": str(error)}
    file = tree / path
    red_anyway: list[str] = []
    original = file.read_text()
    near, rest = _tests(tree, path)
    for tests in (near, rest):
        while tests:
            file.write_text(changed)
            red = first_red(tree, tests, red_anyway, workers)
            file.write_text(original)
            if red is None:
                break
            if not red.startswith("tests/") or first_red(tree, [red], [], 0) is None:
                return {"verdict": "killed", "by": red}
            red_anyway.append(red)
    return {"verdict": "survived"}


def _tests(tree: Path, path: str) -> tuple[list[str], list[str]]:
    """Files of tests whose names share a word with the mutated file's path, those with most first; and the others."""

    def words(name: str) -> set[str]:
        named = re.sub(r"^(open_clip_ext|training_ext|tests)/|\.py$", "", name)
        return {word.rstrip("s") for word in re.split(r"[/_]", named)} - {"test", "init", ""}

    files = [str(file.relative_to(tree)) for file in sorted((tree / "tests").rglob("test_*.py"))]
    files = [file for file in files if not file.startswith("tests/oracle/")]
    shared = {file: len(words(path) & words(Path(file).name)) for file in files}
    near = sorted((file for file in files if shared[file]), key=lambda file: -shared[file])
    return near, [file for file in files if not shared[file]]


def first_red(tree: Path, tests: list[str], leave_out: list[str], workers: int) -> str | None:
    """The first test that fails, or why they did not end; None if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *tests]
    command += [f"--deselect={test}" for test in leave_out]
    command += ["-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"] if workers else []
    # A changed file may have the size and the second of the one before, by which Python would take its old bytecode.
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as output:
        tested = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = tested.wait(LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(tested.pid, signal.SIGKILL)
            tested.wait()
            return f"{LIMIT} seconds"
        output.seek(0)
        red = re.search(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", output.read(), re.MULTILINE)
    if code in (0, 5):  # 5: no test is left
        return None
    return red[1] if red else f"exit code {code} of pytest"


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def stored() -> list[Mutation]:
    return [Mutation(**mutation) for mutation in json.loads(STORED.read_text())["mutations"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    task = parser.add_mutually_exclusive_group(required=True)
    for flag in ("--draw", "--list", "--run"):
        task.add_argument(flag, action="store_true")
    parser.add_argument("--only", type=int, action="append", metavar="N", help="run the mutation of this number")
    parser.add_argument("--against", default="HEAD", metavar="COMMIT", help="mutate this commit")
    parser.add_argument("--out", type=Path, metavar="FILE", help="for the verdicts")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="processes of pytest")
    options = parser.parse_args()
    if options.draw:
        content = {"commit": _git(ROOT, "rev-parse", "HEAD"), "mutations": [asdict(one) for one in draw(ROOT)]}
        STORED.write_text(json.dumps(content, indent=1) + "\n")
    elif options.run:
        if options.out is None:
            parser.error("--run needs --out")
        run(options.only or list(range(len(stored()))), options.against, options.out, options.workers)
    else:
        for number, mutation in enumerate(stored()):
            try:
                where = mutated(mutation, ROOT)[0]
            except GoneError as error:
                where = str(error)
            print(f"{number}. {mutation.kind} in {mutation.function}: {where}")
            print("\n".join([f"  - {line}" for line in mutation.old] + [f"  + {line}" for line in mutation.new]))


if __name__ == "__main__":
    main()
