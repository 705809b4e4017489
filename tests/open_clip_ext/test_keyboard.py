"""Ctrl-C while a command is imported ends it in one line, with exit code 130."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import open_clip_ext

INTERRUPT = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(20)\n"


@pytest.mark.parametrize("module", ["torch", "PIL"])
def test_ctrl_c_during_imports(module, tmp_path):
    """Of the package, and of the command; in place of the module is one that sends the signal."""
    (tmp_path / f"{module}.py").write_text(INTERRUPT)
    path = os.pathsep.join([str(tmp_path), str(Path(open_clip_ext.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-m", "open_clip_ext.main", "--list-losses"], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=120,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a background job ignores it
    )
    assert (done.returncode, done.stderr, done.stdout) == (130, "open_clip_ext: interrupted before it began\n", "")
