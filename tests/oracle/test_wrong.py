"""Wrong input ends with the exit code and one line that names the flag, both as in wrong.json, and leaves no file.

Without a flag there (null), OpenCLIP or its parser refuses the value, and the line may name what is known.
"""

import json
import re
import subprocess
import sys

import pytest
import wrong

pytestmark = pytest.mark.slow
PREFIX = "open_clip_ext: error: "


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wrong")
    subprocess.run([sys.executable, wrong.__file__, str(folder)], check=True)
    return json.loads((folder / "ended.json").read_text())


@pytest.mark.parametrize("number", range(len(wrong.CASES)), ids=lambda number: wrong.CASES[number]["arguments"])
def test_it_ends_as_recorded(ended, number):
    expected, found = wrong.CASES[number], ended[number]
    output = found["output"]
    assert found["code"] == expected["code"] and "Traceback" not in output, output[-3000:]
    if expected["code"] == 0:
        return
    lines = output.strip().splitlines()
    assert sum(line.startswith(PREFIX) for line in lines) == 1 and lines[-1].startswith(PREFIX), output
    names = [rf"{flag}(?![\w-])" for flag in expected["flags"] or [""]]
    assert any(re.search(name, lines[-1]) for name in names), lines[-1]
    assert not found["written"]
