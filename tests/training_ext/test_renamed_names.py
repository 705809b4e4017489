"""OpenCLIP without one of the names that are replaced in it: a convenience is off, or the run is refused in one line.

Each name is renamed in a copy of OpenCLIP's source, consistently, so that OpenCLIP itself still runs.
"""

import ast
import importlib
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import LOSSES

from open_clip_ext.errors import InputError
from training_ext.core import hosts
from training_ext.core.component import Components, registry, warn_early
from training_ext.core.events import of_host
from training_ext.flags.params import parse_args

TRAIN = "open_clip_train"
# A run that wants every component and uses every seam
WANTED = f"{LOSSES['fastclip-v3']} --dataset-type shapes --train-num-samples 16 --remote-sync x --name x"
WANTED += " --fsdp" if hosts.installed().HAS_TASKS else ""


def inner_seams() -> Iterator:
    """Each seam but the core's, without which nothing runs, with its component; of a hook's, with one that has it."""
    outer = {(seam.module, seam.path) for seam in hosts.installed().SEAMS}
    for kind in registry().values():
        yield from ((kind, seam) for seam in kind.seams if (seam.module, seam.path) not in outer)
    for hook, seam in of_host().EVENTS.items():
        owners = (kind for kind in registry().values() if hook in vars(kind) and kind.switch is None)
        yield next(owners), seam


INNER = [pytest.param(*pair, id=f"{pair[0].name}-{pair[1].name}") for pair in inner_seams()]


def renamed(source: str, seam, module: str) -> str:
    """The source of a module of OpenCLIP's without the name: one of another package's gets an alias."""
    if "." in seam.path or not hasattr(importlib.import_module(seam.module), seam.path):  # or of Python's
        if module != seam.module:
            return source
        alias = seam.path.replace(".", "_") + "_renamed"
        return re.sub(rf"(?<![\w.]){re.escape(seam.path)}\b", alias, source) + f"\n{alias} = {seam.path}\n"
    in_training = module.partition(".")[0] == TRAIN
    imported = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and not (in_training and (node.module or "").startswith(TRAIN))
        for line in range(node.lineno, node.end_lineno + 1)
    }
    new = f"{seam.path}_renamed"
    lines = source.splitlines(keepends=True)
    return "".join(
        re.sub(rf"\b{seam.path}\b", f"{seam.path} as {new}" if number in imported else new, line)
        for number, line in enumerate(lines, 1)
    )


def copied(seam, folder: Path) -> dict[str, Path]:
    """Write the renamed modules into the folder; all of OpenCLIP's training code, or one of another package's."""
    package, _, _ = seam.module.partition(".")
    files = {seam.module: Path(importlib.import_module(seam.module).__file__)}
    if package == TRAIN:
        folder_of_package = Path(importlib.import_module(TRAIN).__file__).parent
        files = {f"{TRAIN}.{path.stem}": path for path in sorted(folder_of_package.glob("*.py"))}
    (folder / TRAIN).mkdir()
    copies = {}
    for module, path in files.items():
        copies[module] = folder / TRAIN / path.name
        copies[module].write_text(renamed(path.read_text(), seam, module))
    assert copies[seam.module].read_text() != files[seam.module].read_text()
    return copies


def import_instead(name: str, source: str, monkeypatch) -> None:
    """Import a module with this source in the place of OpenCLIP's."""
    original = importlib.import_module(name)
    module = types.ModuleType(name)
    module.__file__, module.__package__ = original.__file__, original.__package__
    exec(compile(source, original.__file__, "exec"), vars(module))
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys.modules[module.__package__], name.rpartition(".")[2], module)


@pytest.fixture
def without(tmp_path, monkeypatch):
    """without(seam): import OpenCLIP's modules from the copy, until the test ends."""

    def of_training() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] == TRAIN]

    def without(seam) -> None:
        copies = copied(seam, tmp_path)
        if seam.module.partition(".")[0] != TRAIN:
            import_instead(seam.module, copies[seam.module].read_text(), monkeypatch)
            return
        monkeypatch.syspath_prepend(tmp_path)
        for name in of_training():
            del sys.modules[name]

    before = {name: sys.modules[name] for name in of_training()}
    yield without
    for name in of_training():
        del sys.modules[name]
    sys.modules.update(before)


@pytest.mark.parametrize("kind, seam", INNER)
def test_a_name_that_is_gone_costs_a_convenience_or_is_refused(without, caplog, kind, seam):
    """Found before anything is written, and named with its module."""
    args = parse_args(WANTED.split())
    without(seam)
    warn_early.cache_clear()
    if not kind.may_be_off or kind.switch or kind.condition:
        with pytest.raises(InputError, match=re.escape(seam.path)):
            Components([kind], args)
        return
    Components([kind], args)
    (line,) = [record.getMessage() for record in caplog.records]
    assert re.search(rf"{re.escape(seam.path)}\b", line) and seam.why in line


@pytest.mark.parametrize(
    "module, name, kind",
    [
        ("open_clip.factory", "load_state_dict", "safe_reading"),
        ("open_clip.factory", "get_tokenizer", "safe_reading"),
        ("open_clip_train.zero_shot", "accuracy", "numpy_scalars"),
        ("open_clip_train.distributed", "init_distributed_device", "process_timeout"),
    ],
)
def test_without_the_user_of_a_name(refused, run, datasets, monkeypatch, capsys, module, name, kind):
    """A training whose components find that the function that uses their name is another one."""
    if not registry()[kind].seams:
        pytest.skip("not needed with this OpenCLIP")
    source = Path(importlib.import_module(module).__file__).read_text()
    assert re.search(rf"\b{name}\b", source)
    import_instead(module, re.sub(rf"\b{name}\b", f"{name}_renamed", source), monkeypatch)
    warn_early.cache_clear()
    flags = f"{LOSSES['fastclip-v3']} {datasets['csv']} --workers 0 --epochs 1"
    if registry()[kind].may_be_off:
        run("off", flags)
        assert f"Without {kind}: there is no {module}.{name}" in capsys.readouterr().err
    else:
        assert refused(flags).endswith(f"there is no {module}.{name}; give --without {kind}")
        run("without", f"{flags} --without {kind}")


@pytest.mark.slow
@pytest.mark.parametrize("path", ["evaluate", "get_clip_metrics", "wds.shuffle"])
def test_a_command_without_the_name(datasets, tmp_path, path):
    """With the copy first on the path; the names of two conveniences, and one without which the order is not seeded."""
    kind, seam = next((kind, seam) for kind, seam in inner_seams() if seam.path == path)
    copied(seam, tmp_path)
    script = "import sys; from pathlib import Path; from conftest import *; "
    script += "sys.exit(run_main(ext_main, sys.argv[1], Path(sys.argv[2])))"
    flags = f"{LOSSES['fastclip-v3']} {datasets['shards']} --workers 1 --epochs 1 --name x"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", script, flags, str(tmp_path / "logs")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [line for line in ended.stderr.splitlines() if seam.path in line]
    assert lines and ended.returncode == (0 if kind.may_be_off else 2), ended.stderr[-2000:]
    assert (tmp_path / "logs/x/checkpoints/epoch_1.pt").exists() == kind.may_be_off
