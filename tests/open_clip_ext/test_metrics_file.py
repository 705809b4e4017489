"""metrics.jsonl: whole lines, and one line for each step whatever became of the run."""

import json
import math

from open_clip_ext.metrics_file import FILE, MetricsFile, read_metrics


def write(folder, *places: tuple[str, int, int], **numbers) -> None:
    file = MetricsFile(folder)
    for stage, epoch, step in places:
        file.add({"stage": stage, "epoch": epoch, "step": step, **numbers})
    file.close()


def places(folder, stage=None) -> list[tuple]:
    return [(line["stage"], line["epoch"], line["step"]) for line in read_metrics(folder, stage)]


def test_a_run_without_a_file_has_no_lines(tmp_path):
    assert read_metrics(tmp_path) == []


def test_json_has_no_nan(tmp_path):
    write(tmp_path, ("train", 0, 1), loss=math.nan, tau=0.05, far=math.inf)
    (line,) = (tmp_path / FILE).read_text().splitlines()
    assert json.loads(line, parse_constant=lambda name: 1 / 0) == {
        "stage": "train", "epoch": 0, "step": 1, "loss": None, "tau": 0.05, "far": None,
    }


def test_a_torn_line_is_passed_over_and_does_not_take_the_next_with_it(tmp_path):
    write(tmp_path, ("train", 0, 1))
    with open(tmp_path / FILE, "a") as file:
        file.write('{"stage": "train", "epo')
    assert places(tmp_path) == [("train", 0, 1)]
    write(tmp_path, ("train", 0, 2))
    assert places(tmp_path) == [("train", 0, 1), ("train", 0, 2)]


def test_the_later_of_repeated_steps_count(tmp_path):
    """Killed in epoch 1 and resumed at its start, with another number of steps; a recovery is repeated by itself."""
    write(tmp_path, ("eval", 0, 0), ("recovery", 0, 1), ("recovery", 0, 2), ("train", 0, 5), ("eval", 1, 0), run=1)
    write(tmp_path, ("train", 1, 1), ("train", 1, 2), ("train", 1, 3), ("eval", 2, 0), run=1)
    write(tmp_path, ("recovery", 0, 2), ("train", 1, 2), ("eval", 2, 0), run=2)
    lines = read_metrics(tmp_path)
    assert [(line["stage"], line["epoch"], line["step"], line["run"]) for line in lines] == [
        ("eval", 0, 0, 1), ("recovery", 0, 1, 1), ("train", 0, 5, 1), ("eval", 1, 0, 1), ("train", 1, 1, 1),
        ("recovery", 0, 2, 2), ("train", 1, 2, 2), ("eval", 2, 0, 2),
    ]
    assert places(tmp_path, "eval") == [("eval", 0, 0), ("eval", 1, 0), ("eval", 2, 0)]
    write(tmp_path, ("train", 0, 4), run=3)
    assert places(tmp_path, "eval") == [("eval", 0, 0)]
    write(tmp_path, ("eval", 1, 0), ("train", 1, 1), run=3)
    assert places(tmp_path, "eval") == [("eval", 0, 0), ("eval", 1, 0)]
