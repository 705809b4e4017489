"""What an installed wheel holds, away from the checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from open_clip_ext import list_losses
from open_clip_ext.factory import PARTS, all_options, defaults_of, parts_of, resolve_options

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_wheel_is_whole_and_works_outside_the_checkout(tmp_path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    # From a copy, so that no build folder of an earlier version adds files.
    copy = tmp_path / "source"
    packages = ("open_clip_ext", "training_ext")
    files = [path for package in packages for path in sorted((ROOT / package).rglob("*")) if path.suffix != ".pyc"]
    files = [path for path in files if path.is_file()]
    for path in [*files, *(ROOT / name for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"))]:
        target = copy / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    subprocess.run([*pip, "wheel", str(copy), "--no-deps", "--no-build-isolation", "-w", str(tmp_path)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    missing = {str(path.relative_to(ROOT)) for path in files} - names
    assert not missing and len(files) > 20
    assert {f"open_clip_ext/model_configs/ViT-{data}-tiny.json" for data in ("shapes", "icons")} <= names
    assert {f"{package}/py.typed" for package in packages} <= names
    assert any(name.endswith("/LICENSE") for name in names)
    assert not any(name.endswith(("icons.py", "digits.py", "evalset.py")) for name in names)

    installed = tmp_path / "installed"
    subprocess.run([*pip, "install", str(wheel), "--no-deps", "--target", str(installed)], check=True)
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-c", "import open_clip_ext; print(open_clip_ext.__file__)"]
    where = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert where.stdout.startswith(str(installed))
    command = [sys.executable, "-m", "open_clip_ext.main", "--help"]
    shown = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "--train-data" in shown.stdout and "--loss NAME" in shown.stdout
    command[-1:] = ["--recipe", "neuclip-cc12m", "--dry-run"]
    shown = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "Recipe neuclip-cc12m" in shown.stdout


@pytest.mark.slow
def test_an_editable_install_is_found_beside_the_clone(tmp_path):
    """A clone has the package's name, and where Python looks first it is a package without code."""
    clone = tmp_path / "open_clip_ext"
    for name in ("open_clip_ext/__init__.py", "training_ext/__init__.py", "setup.py", "pyproject.toml", "README.md"):
        target = clone / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text('__version__ = "0"' if name == "open_clip_ext/__init__.py" else (ROOT / name).read_text())
    built = "from setuptools import build_meta; print(build_meta.build_editable('..'))"
    done = subprocess.run([sys.executable, "-c", built], cwd=clone, capture_output=True, text=True, check=True)
    installed = tmp_path / "site"
    zipfile.ZipFile(tmp_path / done.stdout.split()[-1]).extractall(installed)
    script = f"import site; site.addsitedir({str(installed)!r}); import open_clip_ext; print(open_clip_ext.__version__)"
    # Without the site-packages of the environment, where this package is installed, too.
    shown = subprocess.run([sys.executable, "-S", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert shown.stdout == "0\n", shown.stderr


def test_the_library_needs_torch_alone():
    """All of its modules but the generated data and the commands, and a training step."""
    script = """
import importlib, pkgutil, sys
sys.modules |= dict.fromkeys(("open_clip", "training_ext", "safetensors", "webdataset", "pandas", "PIL", "yaml"))
import torch, open_clip_ext
for module in pkgutil.walk_packages(open_clip_ext.__path__, "open_clip_ext."):
    if module.name.split(".")[1] not in ("data", "main", "evaluate", "make_shards", "normalizers_report"):
        importlib.import_module(module.name)
loss = open_clip_ext.create_loss("fastclip-v3", num_samples=8, epochs=2)
loss.set_epoch(0)
features = torch.nn.functional.normalize(torch.randn(2, 4, 8), dim=2).requires_grad_()
loss(*features, torch.tensor(10.0), index=torch.arange(4)).backward()
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_pages_name_every_loss_and_no_flag_that_is_not_there():
    import re

    for preset in list_losses():
        assert f"`{preset.name}`" in (ROOT / "README.md").read_text()
    text = (ROOT / "docs/losses.md").read_text()
    parts = ("--" + part.replace("_", "-") for part in PARTS)
    ours = {"--loss", *parts, *(option.flag for option in all_options())}
    prefixes = ("--npn", "--gamma", "--lr-tau", "--rho", "--loss", "--normalizer", "--encoder", "--tau", "--queue")
    prefixes += ("--temperature", "--surrogate", "--mixing", "--margin", "--amor", "--mlp", "--negatives", "--rows")
    mentioned = {flag for flag in re.findall(r"--[a-z][a-z-]+", text) if flag.startswith(prefixes)}
    assert mentioned and mentioned <= ours


def test_the_page_of_the_losses_has_their_defaults():
    """Flags with a value are defaults: of all losses in the table of flags, of one in the table after it."""
    import re

    def flags(cell: str) -> dict[str, str]:
        return {name.replace("-", "_"): value for name, value in re.findall(r"--([a-z-]+) ([^\s`]+)", cell)}

    text = (ROOT / "docs/losses.md").read_text()
    usual = flags(" ".join(re.findall(r"^\| (`--.*?) \|", text, re.MULTILINE)))
    own = {name: flags(cell) for name, cell in re.findall(r"^\| `([a-z][\w-]*)` \| (.*) \|$", text, re.MULTILINE)}
    checked = set()
    for preset in list_losses():
        defaults = defaults_of(preset.name, parts_of(preset.name, resolve_options(preset.name, {})))
        shown = usual | own.pop(preset.name, {})
        for name in shown.keys() & defaults.keys():
            default = defaults[name]
            if isinstance(default, float | int | str):
                assert type(default)(shown[name]) == default, (preset.name, name)
                checked.add(name)
    assert not own and len(checked) > 20, (own, checked)


@pytest.mark.slow
def test_the_reference_has_a_page_for_each_module(tmp_path):
    if not Path(sys.prefix, "installed").exists():
        pytest.skip("for an environment that make has made")
    # -o: without another install, should setup.py be newer than this environment.
    command = ["make", "-o", f"{sys.prefix}/installed", "docs", f"VENV={sys.prefix}", f"REFERENCE={tmp_path}/api"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "Warn" not in done.stderr, done.stderr
    modules = [path for path in (ROOT / "open_clip_ext").rglob("*.py") if path.name != "__main__.py"]
    pages = [path for path in (tmp_path / "api").rglob("*.html") if path.name != "index.html"]
    assert len(pages) == len(modules)
