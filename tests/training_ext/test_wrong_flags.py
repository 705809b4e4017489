"""The table of what the command answers to wrong values of every flag."""

import multiprocessing
import re
from pathlib import Path

import pytest
import wrong_flags

import open_clip_ext.main

PAGE = Path(__file__).parents[2] / "docs/wrong-flags.md"


def answers(every: int) -> list:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=wrong_flags.send_all, args=(theirs, every))
    process.start()
    theirs.close()
    outcomes = ours.recv()
    process.join()
    return outcomes


@pytest.fixture(scope="module")
def outcomes():
    return answers(every=1)


def all_answered(outcomes: list) -> bool:
    bad = [(case, outcome) for case, outcome in outcomes if outcome.kind not in wrong_flags.GOOD]
    assert not bad, bad
    return len(outcomes) > 50


@pytest.mark.slow
def test_a_sample_of_wrong_values_is_answered():
    assert all_answered(answers(every=17))


@pytest.mark.campaign
def test_every_wrong_value_is_answered(outcomes):
    assert all_answered(outcomes)


@pytest.mark.campaign
def test_the_page_has_the_table(outcomes):
    """But for the answers' words, some of which are other packages'."""

    def without_answers(text: str) -> list[str]:
        rows = [line for line in text.splitlines() if line.startswith("| `--")]
        return [re.match(r"\| `[^`]*` \| .*? \| ", row)[0] for row in rows]

    assert without_answers(PAGE.read_text()) == without_answers(wrong_flags.table(outcomes))


def test_a_command_that_does_not_end_is_found(monkeypatch, tmp_path):
    def spin(arguments):
        while True:
            pass

    monkeypatch.setattr(open_clip_ext.main, "main", spin)
    monkeypatch.setattr(wrong_flags, "LIMIT", 1)
    outcome = wrong_flags.run_case(wrong_flags.Case("--rho", "1", "--rho 1"), tmp_path)
    assert outcome.kind == wrong_flags.HANG
