"""The table of what the command answers to wrong values of every flag."""

import multiprocessing
import re
from pathlib import Path

import pytest
import wrong_flags

PAGE = Path(__file__).parents[2] / "docs/wrong-flags.md"


@pytest.fixture(scope="module")
def outcomes():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=wrong_flags.send_all, args=(theirs,))
    process.start()
    theirs.close()
    yield ours.recv()
    process.join()


@pytest.mark.campaign
def test_every_wrong_value_is_answered(outcomes):
    bad = [(case, outcome) for case, outcome in outcomes if outcome.kind not in wrong_flags.GOOD]
    assert not bad, bad


@pytest.mark.campaign
def test_the_page_has_the_table(outcomes):
    """But for the answers' words, some of which are other packages'."""

    def without_answers(text: str) -> list[str]:
        rows = [line for line in text.splitlines() if line.startswith("| `--")]
        return [re.match(r"\| `[^`]*` \| .*? \| ", row)[0] for row in rows]

    assert without_answers(PAGE.read_text()) == without_answers(wrong_flags.table(outcomes))
