"""The command from folders to results, against features and formulas of its own."""

import csv
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from sklearn.metrics import balanced_accuracy_score, f1_score, jaccard_score

from open_clip_ext.errors import InputError
from open_clip_ext.evaluate import main as evaluate
from training_ext.scoring.tasks import DATACOMP_TASKS
from training_ext.tools.evaluation import command
from training_ext.tools.evaluation.models import find_checkpoint, interpolated, load_model
from training_ext.tools.evaluation.results import Results, Row, table


def run(arguments: str) -> None:
    assert not evaluate([*arguments.split(), "--device", "cpu", "--workers", "0", "--batch-size", "16"])


def lines_of(path: Path) -> dict[str, dict]:
    return {line["key"]: line for line in map(json.loads, path.read_text().splitlines())}


@pytest.fixture(scope="module")
def results(evalset, checkpoints, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("out") / "new" / "results.jsonl"
    run(f"--checkpoint {checkpoints[0]} --data {evalset} --out {path}")
    return path


@pytest.fixture(scope="module")
def peer(checkpoints):
    """Embeddings by OpenCLIP alone, in the order of the files."""

    class Peer:
        def __init__(self):
            self.model, _, self.transform = open_clip.create_model_and_transforms(
                "ViT-test", pretrained=str(checkpoints[0])
            )
            self.model.eval()

        @torch.no_grad()
        def images(self, files: list[bytes]) -> np.ndarray:
            pictures = torch.stack([self.transform(Image.open(io.BytesIO(file))) for file in files])
            return self.model.encode_image(pictures, normalize=True).double().numpy()

        @torch.no_grad()
        def texts(self, texts: list[str]) -> np.ndarray:
            return self.model.encode_text(open_clip.tokenize(texts, 32), normalize=True).double().numpy()

        def classes(self, folder: Path) -> np.ndarray:
            templates = (folder / "zeroshot_classification_templates.txt").read_text().splitlines()
            means = [
                self.texts([template.format(c=name) for template in templates]).mean(axis=0)
                for name in (folder / "classnames.txt").read_text().splitlines()
            ]
            return np.stack([mean / np.linalg.norm(mean) for mean in means])

    return Peer()


def members(folder: Path, extension: str) -> list[bytes]:
    found = []
    for shard in range(int((folder / "test" / "nshards.txt").read_text())):
        with tarfile.open(folder / "test" / f"{shard}.tar") as tar:
            found += [tar.extractfile(one).read() for one in tar if one.name.endswith("." + extension)]
    return found


def arrays(folder: Path) -> np.ndarray:
    return np.stack([np.load(io.BytesIO(content)) for content in members(folder, "npy")])


def test_classification(evalset, results, peer):
    folder = evalset / "wds_evalset-colour_test"
    labels = np.array([int(text) for text in members(folder, "cls")])
    scores = peer.images(members(folder, "png")) @ peer.classes(folder).T
    answers = scores.argmax(axis=1)
    found = lines_of(results)
    accuracy = np.mean(answers == labels)
    colour = found["evalset/colour"]["metrics"]
    assert colour["acc1"] == pytest.approx(accuracy)
    assert colour["main_metric"] == colour["mean_per_class_recall"] == pytest.approx(
        balanced_accuracy_score(labels, answers)
    )
    top5 = (np.argsort(-scores, axis=1)[:, :5] == labels[:, None]).any(axis=1)
    assert colour["acc5"] == pytest.approx(top5.mean()) and 0.3 < top5.mean() < 1
    f1 = f1_score(labels, answers, average="macro", labels=np.unique(labels))
    assert found["evalset/colour-f1"]["metrics"]["main_metric"] == pytest.approx(f1)
    background, relation = arrays(folder).T
    for key, right, group, worst in (
        ("worst-background", answers == labels, background, "acc_wg"),
        ("worst-relation", answers == labels, relation, "acc_worst_relation"),
        ("top5", top5, background, "acc_top5_wg"),
    ):
        by_group = {one: right[group == one].mean() for one in np.unique(group)}
        metrics = found[f"evalset/colour-{key}"]["metrics"]
        assert metrics["main_metric"] == metrics[worst] == pytest.approx(min(by_group.values()))
    metrics = found["evalset/colour-worst-background"]["metrics"]
    assert metrics["acc_avg"] == pytest.approx(accuracy)
    assert metrics["count_background:2"] == (background == 2).sum()
    assert metrics["acc_background:2"] == pytest.approx(np.mean((answers == labels)[background == 2]))


def test_several_labels(evalset, results, peer):
    folder = evalset / "wds_evalset-colours_test"
    targets = arrays(folder)
    scores = peer.images(members(folder, "png")) @ peer.classes(folder).T
    precisions = []
    for own, true in zip(scores.T, targets.T, strict=True):
        ranked = true[np.argsort(-own)]
        precisions.append(np.mean([ranked[: place + 1].mean() for place in np.flatnonzero(ranked)]))
    assert targets.sum() > 42
    assert lines_of(results)["evalset/colours"]["metrics"]["main_metric"] == pytest.approx(np.mean(precisions))


def test_retrieval(evalset, results, peer):
    folder = evalset / "wds_evalset-retrieval_test"
    captions = [text.decode().splitlines() for text in members(folder, "txt")]
    similarity = peer.images(members(folder, "png")) @ peer.texts([one for own in captions for one in own]).T
    of = np.repeat(np.arange(42), 2)
    metrics = lines_of(results)["evalset/retrieval"]["metrics"]
    for k in (1, 5, 10):
        image = np.mean([of[j] in np.argsort(-similarity[:, j])[:k] for j in range(84)])
        text = np.mean([i in of[np.argsort(-similarity[i])[:k]] for i in range(42)])
        assert metrics[f"image_retrieval_recall@{k}"] == pytest.approx(image)
        assert metrics[f"text_retrieval_recall@{k}"] == pytest.approx(text)
        if k == 1:
            assert metrics["main_metric"] == metrics["mean_recall@1"] == pytest.approx((image + text) / 2)


def test_associations(evalset, results, peer):
    folder = evalset / "evalset-association"
    values, sizes = [], []
    with open(folder / "winogavil_dataset.csv", newline="") as file:
        for row in csv.DictReader(file):
            candidates = json.loads(row["candidates"])
            truth = np.isin(candidates, json.loads(row["associations"]))
            prompt = ("An " if row["cue"][0] in "aeiou" else "A ") + row["cue"]
            pictures = peer.images([(folder / "images" / f"{name}.jpg").read_bytes() for name in candidates])
            picked = np.argsort(pictures @ peer.texts([prompt])[0])[-truth.sum():]
            values.append(jaccard_score(truth, np.isin(np.arange(len(truth)), picked)))
            sizes.append(len(candidates))
    values, sizes = np.array(values), np.array(sizes)
    metrics = lines_of(results)["evalset/association"]["metrics"]
    assert metrics["main_metric"] == pytest.approx(values[sizes >= 10].mean())
    assert metrics["avg_jaccard_score"] == pytest.approx(values.mean())
    assert metrics["jaccard_score_5"] == pytest.approx(values[sizes == 5].mean())


def test_what_is_there_is_not_done_again(evalset, checkpoints, results, tmp_path, monkeypatch, capsys, refused):
    path = tmp_path / "results.jsonl"
    whole = results.read_text()
    path.write_text(whole)
    arguments = f"--checkpoint {checkpoints[0]} --data {evalset} --out {path}"
    with monkeypatch.context() as patch:
        patch.setattr(command, "load_model", None)
        run(arguments)
    assert path.read_text() == whole and "evalset: average of 9 " in capsys.readouterr().out
    *others, last = whole.splitlines(keepends=True)
    path.write_text("".join(others))
    scored = []
    monkeypatch.setattr(command, "score", lambda *given: scored.append(given[1].key) or score(*given))
    from training_ext.scoring.scores import score

    run(arguments)
    assert path.read_text() == whole and scored == [json.loads(last)["key"]]
    error = refused(arguments.replace("epoch_1.pt", "epoch_2.pt"))
    assert error.startswith("--out: ") and "another checkpoint" in error
    assert refused(arguments + " --precision bf16").endswith("or delete it")
    path.write_text("{}\n")
    assert "not a file of results" in refused(arguments)


def change_task(tasks: Path, key: str, **changes) -> None:
    path = tasks / "tasks.json"
    content = json.loads(path.read_text())
    (task,) = [task for task in content["tasks"] if task["key"] == key]
    task.update(changes)
    path.write_text(json.dumps(content))


def test_other_data_or_another_task_have_another_score(tasks, checkpoints, tmp_path, capsys):
    arguments = f"--checkpoint {checkpoints[0]} --data {tasks} --out {tmp_path}/results.jsonl"
    run(f"{arguments} --tasks Colour Background")
    before = lines_of(tmp_path / "results.jsonl")
    change_task(tasks, "evalset/colour", main_metric="acc5")
    (tasks / "wds_evalset-background_test" / "zeroshot_classification_templates.txt").write_text("{c}\n")
    capsys.readouterr()
    run(f"{arguments} --tasks Colour Background")
    after = lines_of(tmp_path / "results.jsonl")
    assert "[2 of 9 tasks] evalset: average of 9" in capsys.readouterr().out
    old, new = (lines["evalset/colour"]["metrics"] for lines in (before, after))
    assert new["main_metric"] == old["acc5"] != old["main_metric"]
    old, new = (lines["evalset/background"] for lines in (before, after))
    assert new["data"] != old["data"] and new["samples"] == old["samples"] == 42
    classes = len((tasks / "wds_evalset-colour_test/classnames.txt").read_text().splitlines())
    change_task(tasks, "evalset/colour-top5", top_k=classes, main_metric=f"acc_top{classes}_wg")
    run(f"{arguments} --tasks evalset/colour-top5")
    found = lines_of(tmp_path / "results.jsonl")["evalset/colour-top5"]["metrics"]
    assert found["main_metric"] == 1 and classes > 5


def test_of_equal_classes_the_first_is_taken(tasks, checkpoints, tmp_path):
    folder = tasks / "wds_evalset-colour_test"
    names = (folder / "classnames.txt").read_text().splitlines()
    (folder / "classnames.txt").write_text("red\n" * len(names))
    run(f"--checkpoint {checkpoints[0]} --data {tasks} --tasks evalset/colour --out {tmp_path}/results.jsonl")
    labels = np.array([int(text) for text in members(folder, "cls")])
    found = lines_of(tmp_path / "results.jsonl")["evalset/colour"]["metrics"]
    assert found["acc1"] == pytest.approx(np.mean(labels == 0))
    assert found["acc5"] == pytest.approx(np.mean(labels < 5))


def test_corrected_labels_are_scored_again(tasks, checkpoints, tmp_path, monkeypatch):
    """Also if they were corrected while the old ones were scored."""
    arguments = f"--checkpoint {checkpoints[0]} --data {tasks} --tasks Background --out {tmp_path}/results.jsonl"
    folder = tasks / "wds_evalset-background_test"
    classes = len((folder / "classnames.txt").read_text().splitlines())
    score = command.score

    def correct():
        for path in (folder / "test").glob("*.tar"):
            size = path.stat().st_size
            with tarfile.open(path) as tar:
                places = [member.offset_data for member in tar if member.name.endswith(".cls")]
            with open(path, "r+b") as file:
                for place in places:
                    file.seek(place)
                    label = int(file.read(1))
                    file.seek(place)
                    file.write(b"%d" % ((label + 1) % classes))
            assert path.stat().st_size == size

    def score_old(*given):
        scored = score(*given)
        correct()
        return scored

    with monkeypatch.context() as patch:
        patch.setattr(command, "score", score_old)
        run(arguments)
    before = lines_of(tmp_path / "results.jsonl")["evalset/background"]
    run(arguments)
    after = lines_of(tmp_path / "results.jsonl")["evalset/background"]
    assert after["metrics"]["acc1"] != before["metrics"]["acc1"] and after["samples"] == before["samples"]


def test_several_checkpoints_are_compared(tasks, checkpoints, tmp_path, capsys):
    """A task without its folder is named, and an average over fewer tasks is not called the average."""
    for path in (tasks / "evalset-association").rglob("*.*"):
        path.unlink()
    (tasks / "evalset-association").rename(tasks / "elsewhere")
    (tasks / "wds_evalset-background_test" / "test" / "nshards.txt").write_text("1")
    out = tmp_path / "out"
    run(f"--checkpoint {checkpoints[0]} {checkpoints[1]} --data {tasks} --out {out}")
    shown = capsys.readouterr().out
    assert "missing: Association (wds_evalset-association_test)" in shown
    assert "[8 of 9 tasks] evalset: average of 9" in shown and "run/epoch_1" in shown
    assert " 20*" in shown and "not comparable" in shown
    first, second = (lines_of(out / f"run-epoch_{epoch}.jsonl") for epoch in (1, 2))
    assert list(first) == list(second) and len(first) == 8
    assert first["evalset/retrieval"]["checkpoint"] != second["evalset/retrieval"]["checkpoint"]


def test_weights_between_two_checkpoints(evalset, checkpoints, tmp_path, capsys):
    """At 0 and 1 the scores of the two; between them those of the mean of the weights, which the file then has."""
    mean = tmp_path / "mean.pt"
    start, end = (torch.load(path, weights_only=True)["state_dict"] for path in checkpoints)
    torch.save({name: (start[name] + 3 * end[name]) / 4 for name in start}, mean)
    common = f"--data {evalset} --tasks evalset/retrieval evalset/background"
    run(f"--checkpoint {checkpoints[0]} {checkpoints[1]} {mean} {common} --model ViT-test --out {tmp_path}/each")
    best = tmp_path / "best.pt"
    arguments = f"--checkpoint {checkpoints[1]} --interpolate {checkpoints[0]} {common} --out {tmp_path}/out"
    capsys.readouterr()
    run(f"{arguments} --alphas 0,0.75,1 --save-best {best}")
    shown = capsys.readouterr().out
    assert f"{best}: run/epoch_2@" in shown and "run/epoch_2@0.75" in shown

    def scores(path):
        return {key: line["metrics"]["main_metric"] for key, line in lines_of(path).items()}

    alphas = {0: "run-epoch_1", 0.75: "mean", 1: "run-epoch_2"}
    found = {alpha: scores(tmp_path / "out" / f"run-epoch_2@{alpha}.jsonl") for alpha in alphas}
    for alpha, name in alphas.items():
        assert found[alpha] == scores(tmp_path / "each" / f"{name}.jsonl")
    assert found[0] != found[0.75] != found[1]
    saved = torch.load(best, weights_only=True)
    alpha = max(found, key=lambda one: sum(found[one].values()))
    assert saved["alpha"] == alpha
    for name, value in saved["state_dict"].items():
        first, last = start[f"module.{name}"], end[f"module.{name}"]
        torch.testing.assert_close(value, (1 - alpha) * first + alpha * last)
    assert "run/epoch_2@0.75: Retrieval" in shown
    run(f"{arguments} --alphas 0.75")
    assert "run/epoch_2@0.75: Retrieval" not in capsys.readouterr().out  # is there already
    for alpha, start in ((0.75, mean), ("0.7500001", checkpoints[0])):  # of the same name
        other = f"--checkpoint {checkpoints[1]} --interpolate {start} --alphas {alpha} {common} --out {tmp_path}/out"
        assert evaluate([*other.split(), "--device", "cpu"]) == 2
        assert "has the results of another checkpoint" in capsys.readouterr().err


def test_what_is_wrong_with_an_interpolation(evalset, checkpoints, tmp_path, refused):
    start, end = checkpoints
    good = f"--checkpoint {end} --data {evalset} --out {tmp_path}/new"
    both = f"{good} --interpolate {start}"
    assert "--interpolate: 's3://bucket/x.pt' is not a file" in refused(f"{good} --interpolate s3://bucket/x.pt")
    for wrong in ("0,1.5", "-0.1", "nan", "half", "", "0,,1"):
        assert f"--alphas: {wrong!r} must be numbers in [0, 1]" in refused(f"{both} --alphas={wrong}")
    assert "@0.5, run/epoch_2@0.5 must differ" in refused(f"{both} --alphas 0.5,0.50")
    assert "--save-best: x.pt has no effect without --interpolate" in refused(f"{good} --save-best x.pt")
    assert "--checkpoint: 2 files with --interpolate" in refused(f"{both} --checkpoint {end} {start}")
    assert "is one file for 5 checkpoints; give a folder" in refused(f"{both} --out {tmp_path}/new.jsonl")
    assert "must be a file whose name ends in .pt" in refused(f"{both} --save-best {tmp_path}/best.safetensors")
    assert "is one of the two that are interpolated" in refused(f"{both} --save-best {start}")
    assert "--save-best: " in refused(f"{both} --save-best {start}/best.pt")
    (tmp_path / "params.txt").write_text("model: ViT-B-32\n")
    other = tmp_path / "other.pt"
    other.symlink_to(start)
    assert "is of 'ViT-B-32' and --checkpoint of 'ViT-test'" in refused(f"{good} --interpolate {other}")
    (tmp_path / "params.txt").unlink()
    weights = torch.load(start, weights_only=True)["state_dict"]
    torch.save({**weights, "module.visual.proj": torch.zeros(3, 3)}, tmp_path / "reshaped.pt")
    line = refused(f"{good} --interpolate {tmp_path}/reshaped.pt")
    assert "--interpolate: 'ViT-test' with the weights of" in line and "size mismatch for visual.proj" in line
    torch.save({"state_dict": {"a": Path("x")}}, tmp_path / "pickled.pt")
    assert "--interpolate: " in (line := refused(f"{good} --interpolate {tmp_path}/pickled.pt")) and "pickled" in line


def test_interpolation_with_a_bias_on_one_side(checkpoints, tmp_path):
    """SigLIP's; OpenCLIP takes 0 for the other's, and no score depends on it."""
    weights = torch.load(checkpoints[0], weights_only=True)["state_dict"]
    torch.save({**weights, "module.logit_bias": torch.tensor(-10.0)}, biased := tmp_path / "biased.pt")
    for number, (start, end) in enumerate([(biased, checkpoints[1]), (checkpoints[1], biased)]):
        (between,) = interpolated(find_checkpoint(str(end), "ViT-test"), str(start), [0.25])
        assert load_model(between)[0].logit_bias.item() == (-7.5, -2.5)[number]


def test_the_file_is_what_datacomp_reads(tmp_path, checkpoints, monkeypatch):
    """aggregate_scores.py takes the lines whose metrics have a main_metric, 38 of them, and averages them by name."""
    pandas = pytest.importorskip("pandas")
    from training_ext.tools.evaluation.results import Results, Row

    results = Results(str(tmp_path / "results.jsonl"), {"checkpoint": "ab", "model": "ViT-test", "precision": "fp32"})
    for number, task in enumerate(DATACOMP_TASKS):
        found = {task.main_metric: number / 38, "acc5": None, "main_metric": number / 38}
        results.add(Row(task.key, task.name, found, task.size, "cd"))
    results.add(Row("zeroshot-data/mine", "mine", {"acc1": 0.5, "main_metric": None}, 3, "ef"))
    frame = pandas.read_json(tmp_path / "results.jsonl", lines=True)
    frame = pandas.concat([frame.drop(["metrics"], axis=1), frame["metrics"].apply(pandas.Series)], axis=1)
    frame = frame.dropna(subset=["main_metric"])
    assert dict(zip(frame.dataset, frame.main_metric, strict=True)) == {
        task.name: pytest.approx(number / 38) for number, task in enumerate(DATACOMP_TASKS)
    }


@pytest.mark.slow
def test_two_processes_find_the_same(pair, evalset, checkpoints, results, tmp_path):
    out = tmp_path / "results.jsonl"
    keys = [f"evalset/{name}" for name in ("colour-worst-background", "colours", "retrieval", "association")]
    arguments = f"--checkpoint {checkpoints[0]} --data {evalset} --out {out} --device cpu --workers 1 --batch-size 8"
    arguments += f" --tasks {' '.join(keys)}"
    for process in pair(arguments, tmp_path / "logs", module="evaluating"):
        assert process.code == 0, process
    one, two = lines_of(results), lines_of(out)
    assert list(two) == keys
    for key in keys:
        assert two[key]["samples"] == one[key]["samples"]
        assert two[key]["metrics"] == pytest.approx(one[key]["metrics"]), key


def test_what_is_wrong_with_the_command_line(evalset, checkpoints, tmp_path, refused):
    good = f"--checkpoint {checkpoints[0]} --data {evalset} --out {tmp_path}/new.jsonl"
    assert "--data: there is no folder" in refused(good.replace(str(evalset), str(tmp_path / "no")))
    assert "such as wds_vtab-caltech101_test" in refused(good.replace(str(evalset), str(tmp_path)))
    assert "--out: " in refused(good.replace("--data", f"{checkpoints[1]} --data"))
    assert "names run/epoch_1, run/epoch_1 must differ" in refused(
        good.replace("--data", f"{checkpoints[0]} --data").replace(".jsonl", "")
    )
    file = tmp_path / "run-epoch_1.pt"  # whose results would be in the same file
    file.symlink_to(checkpoints[0])
    line = refused(f"{good.replace('--data', f'{file} --data').replace('.jsonl', '')} --model ViT-test")
    assert "names run/epoch_1, run-epoch_1 must differ" in line
    assert "--device: 'nonsense' is not on this machine" in refused(good + " --device nonsense")
    inside = f"{checkpoints[0]}/new.jsonl"
    assert f"--out: '{checkpoints[0]}' cannot be written to" in refused(good.replace(f"{tmp_path}/new.jsonl", inside))
    assert "--tasks: 'cifar' is not one of Background" in refused(good + " --tasks cifar")
    assert "unrecognized arguments: --zero" in refused(good + " --zero 1")


def test_evaluations_at_the_same_time_add_to_one_file(tmp_path):
    """Each has read the file before the other wrote to it; the later result of a task counts."""
    one, other = (Results(str(tmp_path / "a.jsonl"), {"checkpoint": "c"}) for _ in range(2))
    for results, key, score in ((one, "x", 0.1), (other, "y", 0.2), (one, "z", 0.3), (other, "x", 0.4)):
        results.add(Row(key, key, {"main_metric": score}, 5, "digest"))
    expected = {"x": 0.4, "y": 0.2, "z": 0.3}
    assert Results(one.path, one.about).scores() == other.scores() == expected
    stranger = Results(str(tmp_path / "b.jsonl"), {"checkpoint": "d"})
    stranger.path = one.path
    with pytest.raises(InputError, match="the results of another checkpoint"):
        stranger.add(Row("x", "x", {"main_metric": 0.5}, 5, "digest"))
    assert Results(one.path, one.about).scores() == expected


def test_averages_of_checkpoints_are_over_the_tasks_of_all(tmp_path):
    results = [Results(str(tmp_path / f"{name}.jsonl"), {}) for name in ("a", "b")]
    tasks = DATACOMP_TASKS[:3]
    for own, scores in zip(results, ((0.1, 0.2, 0.6), (0.4, 0.3)), strict=True):
        for task, score in zip(tasks, scores, strict=False):
            own.add(Row(task.key, task.name, {"main_metric": score}, task.size, "digest"))
    lines = table("small", tasks, ["a", "b"], results, []).splitlines()
    assert lines[-1].split() == "[2 of 3 tasks] small: average of 3 mean 15.00 35.00".split()
    (line,) = [line for line in lines if line.startswith(tasks[2].name)]
    assert line.split()[-2:] == ["60.00", "-"]
