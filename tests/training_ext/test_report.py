"""The report on a checkpoint's normalizers, against computations of its own from the same checkpoint and data."""

import io
import json
import math
import os
import re
import shutil
import tarfile
from argparse import Namespace
from pathlib import Path

import open_clip
import pytest
import torch
import yaml
from conftest import LOSSES, Experiment, run_main
from PIL import Image
from safetensors.torch import load_file
from stop import Killed
from torch.nn.functional import normalize

from open_clip_ext.data import Scenes
from open_clip_ext.diagnostics.embeddings import Pairs
from open_clip_ext.main import main as ext_main
from open_clip_ext.normalizers import MovingAverageTable
from open_clip_ext.normalizers_report import main as report_main
from training_ext.core.state import KEY
from training_ext.data.shards import Shards
from training_ext.tools.report import embeddings, inputs
from training_ext.tools.report.inputs import Data
from training_ext.tools.report.objective import nearest_pairs

ROOT = Path(__file__).parents[2]
EPS = 1e-14
# Batches of 10 leave 8 of the 48 rows that were never visited.
SETTINGS = "--loss fastclip-v3 --gamma-decay-epochs 2 --rho 5"
RUNS = {
    "table": f"shapes {SETTINGS} --epochs 1 --workers 0 --batch-size 10",
    "csv": f"csv {SETTINGS} --epochs 1 --workers 0",
    "shards": f"shards {SETTINGS} --epochs 1 --workers 1",
    "neuclip": f"shapes {LOSSES['neuclip']} --epochs 1 --workers 0",
    "queue": f"shapes {LOSSES['queue']} --epochs 1 --workers 0",
    "isogclr": f"shapes {LOSSES['isogclr']} --shapes-shifted --surrogate hinge --epochs 1 --workers 0",
    "views": "shapes --loss sogclr --tau-init 0.05 --negatives views --lr 1e-12 --epochs 1 --workers 0 --batch-size 48 "
    "--warmup 1 --aug-cfg scale=(1.0,1.0) ratio=(1.0,1.0)",
    "clip": "shapes --epochs 1 --workers 0",
    "resampled": f"resampled {LOSSES['neuclip']} --epochs 1 --workers 0",
}


@pytest.fixture(scope="session")
def trained(tmp_path_factory, datasets):
    """trained(name) -> the experiment of RUNS[name] and its command line; each is trained once."""
    folder, done = tmp_path_factory.mktemp("trained"), {}

    def trained(name: str) -> tuple[Experiment, str]:
        if name not in done:
            kind, rest = RUNS[name].split(" ", 1)
            arguments = f"{datasets[kind]} {rest} --name {name}"
            assert run_main(ext_main, arguments, folder) == 0
            done[name] = Experiment(folder, name), arguments
        return done[name]

    return trained


@pytest.fixture
def report(trained, tmp_path):
    """report(name, more) -> the JSON file and the anchors' values of a report on RUNS[name]."""

    def report(name: str, more: str = "", out: Path | None = None) -> tuple[dict, dict[str, torch.Tensor]]:
        experiment, arguments = trained(name)
        out = out or tmp_path / "out"
        path = experiment.path / "checkpoints/epoch_1.pt"
        assert run_main(report_main, f"{arguments} --checkpoint {path} --out {out} {more}", tmp_path) == 0
        return json.loads((out / "normalizers.json").read_text()), load_file(out / "normalizers.safetensors")

    return report


def pairs_of(kind: str, datasets, shifted: bool = False) -> list[tuple[Image.Image, str]]:
    if kind == "shapes":
        return [scene for scene in Scenes(48, image_size=48, shifted=shifted)]
    if kind == "csv":
        lines = Path(datasets["csv"].split()[1]).read_text().splitlines()[1:]
        return [(Image.open(path), caption) for path, caption in (line.split("\t") for line in lines)]
    pairs = []
    for shard in sorted(Path(datasets["shards"].split()[1]).parent.glob("train-*.tar")):
        with tarfile.open(shard) as tar:
            files = {member.name: tar.extractfile(member).read() for member in tar if member.isfile()}
        for name in sorted(name for name in files if name.endswith(".txt")):
            image = next(data for other, data in files.items() if other.startswith(name[:-3]) and other != name)
            pairs.append((Image.open(io.BytesIO(image)).convert("RGB"), files[name].decode()))
    return pairs


def moved(csv: str, folder: Path) -> tuple[Path, list[Path]]:
    """The same data elsewhere: a copy of a csv with copies of its images, and these."""
    header, *lines = Path(csv).read_text().splitlines()
    images, captions = zip(*(line.split("\t") for line in lines), strict=True)
    (folder / "images").mkdir()
    copies = [Path(shutil.copy(image, folder / "images")) for image in images]
    pairs = [f"{image}\t{caption}" for image, caption in zip(copies, captions, strict=True)]
    (folder / "own.csv").write_text("\n".join([header, *pairs]) + "\n")
    return folder / "own.csv", copies


def embed(experiment: Experiment, pairs) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 unit embeddings by OpenCLIP alone."""
    path = str(experiment.path / "checkpoints/epoch_1.pt")
    model, _, transform = open_clip.create_model_and_transforms("ViT-test", pretrained=path)
    tokens = open_clip.get_tokenizer("ViT-test")([caption for _, caption in pairs])
    with torch.no_grad():
        image = model.eval().encode_image(torch.stack([transform(image) for image, _ in pairs]))
        text = model.encode_text(tokens)
    return normalize(image.double(), dim=1), normalize(text.double(), dim=1)


def log_mean(similarities, positives, tau, without=None, surrogate=lambda gap: gap):
    exponents = surrogate(similarities - positives[:, None]) / tau
    count = exponents.shape[1]
    if without is not None:
        exponents = exponents.masked_fill(without, -math.inf)
        count = (~without).sum(dim=1)
    log_eps = torch.tensor(math.log(EPS), dtype=torch.float64)
    return torch.logaddexp(exponents.logsumexp(dim=1) - torch.as_tensor(count).log(), log_eps)


def true_normalizers(image, text, tau, surrogate=lambda gap: gap):
    """NeuCLIP, Eq. 9 for all pairs, (2, n)."""
    positives, own = (image * text).sum(dim=1), torch.eye(len(image), dtype=torch.bool)
    taus = torch.as_tensor(tau, dtype=torch.float64).expand(2, len(image))[:, :, None]
    sides = enumerate((image @ text.T, text @ image.T))
    return torch.stack([log_mean(s, positives, taus[i], own, surrogate) for i, s in sides])


def tau_of(experiment: Experiment) -> float:
    return math.exp(-experiment.checkpoint(1)["state_dict"]["logit_scale"].double().item())


def state_of(experiment: Experiment) -> dict:
    return experiment.checkpoint(1)[KEY]["state"]


def agrees(error: dict, difference: torch.Tensor) -> None:
    assert error["mse"] == pytest.approx(difference.square().mean().item(), rel=1e-3, abs=1e-7)
    assert error["bias"] == pytest.approx(difference.mean().item(), rel=1e-3, abs=1e-4)
    assert error["spread"] == pytest.approx(difference.std(correction=0).item(), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("name, kind", [("table", "shapes"), ("shards", "shards")])
def test_a_table_is_compared_row_by_row(report, trained, datasets, name, kind):
    shown, values = report(name, "--batch-sizes 8,48")
    experiment, _ = trained(name)
    image, text = embed(experiment, pairs_of(kind, datasets))
    true = true_normalizers(image, text, tau_of(experiment))
    assert values["anchors"].tolist() == list(range(48))
    torch.testing.assert_close(values["exact"], true, rtol=0, atol=1e-4)
    log_u = state_of(experiment)["state.log_u"].double().T
    table, batch, full = shown["estimators"]
    assert (table["name"], batch["name"], full["name"]) == ("table", "batch of 8", "batch of 48")
    known = log_u.isfinite()
    assert known.all() == (name != "table")
    for i, side in enumerate(("image", "text")):
        agrees(table[side], (log_u - true)[i, known[i]])
        assert table[side]["without_estimate"] == (~known[i]).sum()
        assert full[side]["mse"] < 1e-8
    agrees(table["both"], (log_u - true)[known])
    agrees(batch["both"], (values["batch of 8"] - true).flatten())
    assert shown["tau"] == pytest.approx(tau_of(experiment), rel=1e-5)
    assert (shown["rows"], shown["rows_left_out"], shown["anchors"]) == (48, 0, 48)
    assert shown["normalizer"] == "table" and shown["mixing"] == 0 and shown["eps"] == EPS


def test_the_flags_come_from_the_recipe_beside_the_checkpoint(report, trained, tmp_path, capsys):
    """The queue leaves out what it holds of a batch of the training's, so that the batch is the recipe's, too."""
    expected, values = report("queue", "--batch-sizes 8,48")
    experiment, _ = trained("queue")
    capsys.readouterr()
    path = experiment.path / "checkpoints/epoch_1.pt"
    assert report_main(f"--checkpoint {path} --out {tmp_path}/own --batch-sizes 8,48".split()) == 0
    own = json.loads((tmp_path / "own/normalizers.json").read_text())
    assert own == expected and "queue normalizer, before --mixing 0.6, is off by a factor of " in own["verdict"]
    assert own["verdict"] in capsys.readouterr().out
    assert torch.equal(load_file(tmp_path / "own/normalizers.safetensors")["queue"], values["queue"])


def test_an_estimate_may_contain_the_batchs_own(report, monkeypatch):
    """Only one that is the batch's own, of the training's size, is none; that size is compared by default."""

    def forward(self, batch, updated=None):
        return batch.log_batch + torch.tensor([[0.0], [0.5]])

    monkeypatch.setattr(MovingAverageTable, "forward", forward)
    shown, values = report("table")
    assert [one["name"] for one in shown["estimators"]] == ["table", "batch of 10"]
    image, text = values["table"]
    assert image.isnan().all() and shown["estimators"][0]["image"]["without_estimate"] == 48
    torch.testing.assert_close(text, values["batch of 10"][1] + 0.5, rtol=0, atol=1e-5)


def test_a_recipe_beside_a_checkpoint_runs_nothing(trained, tmp_path, capsys):
    """webdataset hands urls to a shell; of data that came with a checkpoint nobody has typed them."""
    experiment, _ = trained("shards")
    folder = tmp_path / "planted"
    folder.mkdir()
    shutil.copy(experiment.path / "checkpoints/epoch_1.pt", folder / "epoch_1.pt")
    recipe = yaml.safe_load((experiment.path / "recipe.yaml").read_text())
    recipe["flags"]["train_data"] = f"{{pipe:touch {tmp_path}/touched;cat 0.tar,1.tar}}"
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "sizes.json").write_text('{"0.tar": 8, "1.tar": 8}')
    given = ["--checkpoint", str(folder / "epoch_1.pt"), "--shard-sizes", str(tmp_path / "sizes.json")]
    assert report_main(given) == 2
    assert "recipe.yaml' is not local; give it as a flag" in capsys.readouterr().err
    assert not (tmp_path / "touched").exists()


def test_prototypes_predict_from_the_embeddings(report, trained, datasets):
    shown, values = report("neuclip", "--batch-sizes 16")
    experiment, _ = trained("neuclip")
    image, text = embed(experiment, pairs_of("shapes", datasets))
    tau, positives, state = tau_of(experiment), (image * text).sum(dim=1), state_of(experiment)
    weight = normalize(state["state.weight"][:, : int(state["state.active"])].double(), dim=2)
    sides = zip((image, text), weight, strict=True)
    alpha = torch.stack([log_mean(anchors @ w.T, positives, tau) for anchors, w in sides])
    torch.testing.assert_close(values["prototypes"], alpha, rtol=0, atol=1e-4)
    agrees(shown["estimators"][0]["both"], (alpha - true_normalizers(image, text, tau)).flatten())


def test_a_queue_leaves_out_the_anchors_own_pairs(report, trained, datasets):
    shown, values = report("queue", "--batch-sizes 16")
    experiment, _ = trained("queue")
    image, text = embed(experiment, pairs_of("shapes", datasets))
    tau, positives = tau_of(experiment), (image * text).sum(dim=1)
    texts, images = state_of(experiment)["state.ring"].double()
    nearest = (images @ image.T + texts @ text.T).argmax(dim=1)
    # Anchors come in groups of a batch, 8, as in training; none sees what is queued of its group.
    without = (torch.arange(48) // 8)[:, None] == (nearest // 8)[None, :]
    assert without.any() and not without.all(dim=1).any()
    sides = ((image @ texts.T), (text @ images.T))
    alpha = torch.stack([log_mean(side, positives, tau, without) for side in sides])
    torch.testing.assert_close(values["queue"], alpha, rtol=0, atol=1e-4)
    assert shown["mixing"] == 0.6


def test_individual_temperatures_and_a_hinge_are_the_checkpoints(report, trained, datasets):
    shown, values = report("isogclr")
    experiment, _ = trained("isogclr")
    image, text = embed(experiment, pairs_of("shapes", datasets, shifted=True))
    tau = state_of(experiment)["temperature.tau"].T
    true = true_normalizers(image, text, tau, lambda gap: (gap + 0.1).clamp(min=0) ** 2)
    torch.testing.assert_close(values["exact"], true, rtol=0, atol=1e-3)
    assert shown["tau"]["text"]["mean"] == pytest.approx(tau[1].mean().item(), rel=1e-5)
    assert (shown["surrogate"], shown["margin"], shown["temperature"]) == ("hinge", 0.1, "individual")


def test_one_estimate_for_both_views_is_of_their_mean(report, trained, datasets):
    """One step over all pairs, unaugmented and with weights that stand still, estimates without an error."""
    shown, values = report("views", "--batch-sizes 48 --taus 0.05")
    experiment, _ = trained("views")
    image, text = embed(experiment, pairs_of("shapes", datasets))
    own = torch.eye(48, dtype=torch.bool).repeat(1, 2)
    positives = (image * text).sum(dim=1)

    def true(tau):
        views = [log_mean(one @ torch.cat([image, text]).T, positives, tau, own) for one in (image, text)]
        return torch.stack(views).logsumexp(dim=0) - math.log(2)

    torch.testing.assert_close(values["exact"], true(0.05).expand(2, -1), rtol=0, atol=1e-4)
    assert [one["name"] for one in shown["estimators"]] == ["table", "batch of 48"]
    assert all(one["both"]["mse"] < 1e-8 for one in shown["estimators"]) and shown["negatives"] == "views"
    rho = (0.0495 * true(0.0495) - 0.0505 * true(0.0505)).mean().item() / 0.001
    assert shown["rho_of_tau"] == [{"tau": 0.05, "rho": pytest.approx(rho, rel=1e-3)}]


def test_a_checkpoint_without_estimator_has_the_minibatch_ones(report, trained, datasets, capsys):
    shown, values = report("clip", "--anchors 20 --batch-sizes 4,24")
    experiment, _ = trained("clip")
    image, text = embed(experiment, pairs_of("shapes", datasets))
    true = true_normalizers(image, text, tau_of(experiment))
    anchors = values["anchors"]
    assert len(anchors.unique()) == 20 and anchors.tolist() == sorted(anchors.tolist())
    torch.testing.assert_close(values["exact"], true[:, anchors], rtol=0, atol=1e-4)
    assert [estimator["name"] for estimator in shown["estimators"]] == ["batch of 4", "batch of 24"]
    assert shown["normalizer"] is None
    assert "batch of 24" in capsys.readouterr().out


def test_the_rho_of_a_temperature_is_the_divergence_from_equal_weights(report, trained, datasets, capsys):
    shown, _ = report("clip", "--batch-sizes 4 --taus 0.2,0.05")
    experiment, _ = trained("clip")
    image, text = embed(experiment, pairs_of("shapes", datasets))
    own = torch.eye(len(image), dtype=torch.bool)
    for one, tau in zip(shown["rho_of_tau"], (0.05, 0.2), strict=True):
        shares = [(s / tau).masked_fill(own, -math.inf).softmax(dim=1) for s in (image @ text.T, text @ image.T)]
        divergence = torch.stack([(p * (p * (len(p) - 1)).log().nan_to_num(neginf=0)).sum(dim=1) for p in shares])
        # The difference quotient's error is 1e-4 / 6 of tau^2 times the third derivative.
        assert (one["tau"], one["rho"]) == (tau, pytest.approx(divergence.mean().item(), rel=1e-3, abs=1e-4))
    assert re.search(r"rests at\n +tau +with --rho\n +0\.05 +[\d.-]+\n +0\.2 ", capsys.readouterr().out)


def test_a_report_is_whole_and_the_picture_is_one(report, tmp_path):
    report("table", "--anchors 10")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"normalizers.json", "normalizers.png", "normalizers.safetensors", "embeddings"}
    with Image.open(tmp_path / "out/normalizers.png") as picture:
        assert min(picture.size) > 500


def test_an_interrupted_embedding_goes_on_after_its_whole_blocks(report, tmp_path, monkeypatch):
    monkeypatch.setattr(embeddings, "BLOCK_ROWS", 10)
    original, embedded = embeddings.embed_batch, []

    def counting(model, batch, args):
        embedded.extend(batch[0])
        if stop in batch[0]:
            raise Killed
        return original(model, batch, args)

    monkeypatch.setattr(embeddings, "embed_batch", counting)
    stop = 30
    with pytest.raises(Killed):
        report("table")
    assert not (tmp_path / "out/normalizers.json").exists()
    stop, embedded[:] = None, []
    first = report("table")
    assert embedded == list(range(30, 48))
    embedded.clear()
    next(tmp_path.glob("out/embeddings/*/block-000001.safetensors")).unlink()
    again = report("table")
    assert embedded == list(range(10, 20))
    assert again[0] == first[0] and all(
        torch.equal(again[1][name].nan_to_num(), first[1][name].nan_to_num()) for name in first[1]
    )


def test_lines_that_cannot_be_used_are_left_out_as_in_the_training(tmp_path, datasets, monkeypatch):
    """The training replaces them; pandas reads an empty cell as nan, which OpenCLIP tokenizes as "nan"."""
    table, images = moved(datasets["csv"].split()[1], tmp_path)
    lines = [line.split("\t") for line in table.read_text().splitlines()]
    lines[6][1] = lines[41][1] = lines[45][0] = ""
    table.write_text("\n".join(map("\t".join, lines)))
    images[10].write_bytes(b"not an image")
    arguments = f"--train-data {table} --max-bad-samples 0.1 --epochs 1 --workers 0 {SETTINGS} --name x"
    assert run_main(ext_main, f"{arguments} --several-captions", tmp_path) == 0
    path = tmp_path / "x/checkpoints/epoch_1.pt"
    monkeypatch.setattr(inputs, "BATCH_SIZES", (16, 48))
    report = f"{arguments} --several-captions --checkpoint {path} --out {tmp_path}/out"
    assert run_main(report_main, report, tmp_path) == 0
    shown = json.loads((tmp_path / "out/normalizers.json").read_text())
    assert (shown["rows"], shown["rows_left_out"]) == (48, 4)
    assert "row 5" in shown["first_problem"] and "its caption is empty" in shown["first_problem"]
    values, kept = load_file(tmp_path / "out/normalizers.safetensors"), sorted({*range(48)} - {5, 10, 40, 44})
    assert values["anchors"].tolist() == kept
    log_u = state_of(Experiment(tmp_path, "x"))["state.log_u"].double().T[:, kept]
    torch.testing.assert_close(values["table"], log_u.where(log_u.isfinite(), torch.nan), equal_nan=True)
    assert [one["name"] for one in shown["estimators"]] == ["table", "batch of 8", "batch of 16"]


def test_samples_of_a_shard_that_cannot_be_read_are_left_out(trained, tmp_path, datasets):
    experiment, arguments = trained("resampled")
    folder = Path(datasets["shards"].split()[1]).parent
    shutil.copytree(folder, tmp_path / "shards")
    name = "train-000002.tar"
    with tarfile.open(folder / name) as old, tarfile.open(tmp_path / "shards" / name, "w") as new:
        for member in old:
            content = old.extractfile(member).read()
            if member.name.startswith(Path(old.getnames()[4]).stem) and not member.name.endswith(".txt"):
                content = b"not an image"
            member.size = len(content)
            new.addfile(member, io.BytesIO(content))
    arguments = arguments.replace(str(folder), str(tmp_path / "shards"))
    path = experiment.path / "checkpoints/epoch_1.pt"
    assert run_main(report_main, f"{arguments} --checkpoint {path} --out {tmp_path}/out", tmp_path) == 0
    values = load_file(tmp_path / "out/normalizers.safetensors")
    assert values["anchors"].tolist() == [row for row in range(48) if row != 2 * 8 + 2]
    assert name in json.loads((tmp_path / "out/normalizers.json").read_text())["first_problem"]
    # What cannot be read is not tried again: a repaired shard is another file.
    (block,) = tmp_path.glob("out/embeddings/*/block-000000.safetensors")
    before = block.stat().st_mtime_ns
    assert run_main(report_main, f"{arguments} --checkpoint {path} --out {tmp_path}/out", tmp_path) == 0
    assert block.stat().st_mtime_ns == before


@pytest.mark.slow
def test_two_processes_write_the_report_of_one(report, trained, pair, tmp_path, monkeypatch):
    monkeypatch.setattr(embeddings, "BLOCK_ROWS", 10)
    experiment, arguments = trained("table")
    alone, values = report("table", "--batch-sizes 8,20")
    path = experiment.path / "checkpoints/epoch_1.pt"
    command = f"{arguments} --dist-backend gloo --checkpoint {path} --out {tmp_path}/two"
    command += " --batch-sizes 8,20"
    blocks = {"training_ext.tools.report.embeddings.BLOCK_ROWS": 10}
    ended = pair(command, tmp_path, module="open_clip_ext.normalizers_report", **blocks)
    assert [process.code for process in ended] == [0, 0], ended
    together = json.loads((tmp_path / "two/normalizers.json").read_text())
    others = load_file(tmp_path / "two/normalizers.safetensors")
    assert all(torch.allclose(values[name], others[name], atol=1e-4, equal_nan=True) for name in values)
    for one, two in zip(alone["estimators"], together["estimators"], strict=True):
        assert all(one[side]["mse"] == pytest.approx(two[side]["mse"], abs=1e-4) for side in ("image", "text", "both"))


@pytest.fixture
def refused(trained, tmp_path, ends):
    """refused(name, more, path, change) -> the only line of stderr; nothing may be written."""

    def refused(name: str, more: str = "", path: object = None, change: tuple[str, str] = ("", "")) -> str:
        experiment, arguments = trained(name)
        path = path or experiment.path / "checkpoints/epoch_1.pt"

        def snapshot():
            return {file: file.is_dir() or file.read_bytes() for top in (tmp_path, experiment.path)
                    for file in top.rglob("*")}

        before = snapshot()
        error = ends(f"{arguments.replace(*change)} --checkpoint {path} {more}", report_main)
        assert len(ends.stderr.splitlines()) == 1 and snapshot() == before
        return error

    return refused


@pytest.mark.parametrize(
    "more, message",
    [
        ("--batch-sizes 1", "--batch-sizes: 1 is out of range; it must be from 2 to the 48 rows"),
        ("--taus 0.02;0.05", "--taus: '0.02;0.05' must be numbers from 0.001 to 10"),
        ("--device nonsense", "--device: 'nonsense' is not on this machine"),
        ("--model ViT-nonsense", "--model: 'ViT-nonsense' with the weights of "),
        ("--wrokers 2", "unknown: --wrokers 2; did you mean '--workers'?"),
        ("--model RN50", "--model: "),
        ("--same-caption", "are not sums over all pairs"),
        ("--loss amorlip", "are not sums over all pairs"),
    ],
)
def test_wrong_flags_are_refused(refused, more, message):
    assert message in refused("clip" if "amorlip" in more else "table", more)


def test_wrong_checkpoints_are_refused(refused, trained, tmp_path):
    torn = tmp_path / "torn.pt"
    for content in ({"epoch": 1, "state_dict": {}}, {"state_dict": [1]}, {1: torch.zeros(1)}):
        torch.save(content, torn)
        assert "has no CLIP model" in refused("table", path=torn)
    of_clip = trained("clip")[0].path / "checkpoints/epoch_1.pt"
    assert "OpenCLIP's own loss, not with --loss fastclip-v3; repeat" in refused("table", path=of_clip)
    torch.save({"state_dict": torch.load(of_clip, weights_only=True)["state_dict"], "metrics": {"epoch": 1}}, torn)
    weights_only = refused("table", path=torn)
    assert f"--checkpoint: '{torn}' has weights only, without the state of --loss fastclip-v3; " in weights_only
    assert weights_only.endswith("give a file of checkpoints/")
    assert "was trained with --loss fastclip-v3" in refused("table", change=(SETTINGS, "--loss sogclr"))
    other = refused("table", change=("--train-num-samples 48", "--train-num-samples 47"))
    assert "--train-num-samples: 47, but " in other and other.endswith("has 48; give 48")
    assert "--train-data" in refused("csv", change=("--train-data", "--val-data"))
    other = refused("neuclip", "--shapes-shifted")  # its loss has no rows, and a training would resume
    assert other.startswith("--checkpoint: ") and "was trained on other data (as many rows, 48, with other " in other


def test_a_checkpoint_from_before_an_option_was_trained_with_its_default(trained, refused, tmp_path):
    experiment, arguments = trained("table")
    checkpoint = torch.load(experiment.path / "checkpoints/epoch_1.pt", weights_only=True)
    del checkpoint[KEY]["parts"]["reference_gap"]
    older = tmp_path / "older.pt"
    torch.save(checkpoint, older)
    assert run_main(report_main, f"{arguments} --checkpoint {older} --out {tmp_path}/out", tmp_path) == 0
    checkpoint[KEY]["parts"]["reference_gap"] = True
    torch.save(checkpoint, older)
    assert "--reference-gap: False, but" in refused("table", path=older)


def test_embeddings_of_other_weights_or_files_are_not_used(report, trained, datasets, tmp_path):
    """Names of files, and so the digest by which a training resumes, may be the same."""
    report("table")
    _, neuclip = report("neuclip", out=tmp_path / "alone")
    _, beside = report("neuclip")
    assert torch.equal(neuclip["exact"], beside["exact"])
    report("table", "--force-quick-gelu")
    assert len(list(tmp_path.glob("out/embeddings/*"))) == 3
    experiment, arguments = trained("csv")
    given = datasets["csv"].split()[1]
    path, table = experiment.path / "checkpoints/epoch_1.pt", moved(given, tmp_path)[0]
    own = f"{arguments.replace(given, str(table))} --checkpoint {path} --out {tmp_path}/csv"
    for time in (10**18, 10**18, 2 * 10**18):
        os.utime(table, ns=(time, time))
        assert run_main(report_main, own, tmp_path) == 0
    assert len(list(tmp_path.glob("csv/embeddings/*"))) == 2


def test_files_by_url_are_told_apart(tmp_path):
    (tmp_path / "0.tar").write_bytes(b"tar")
    status = (tmp_path / "0.tar").stat()
    url = f"file:{tmp_path}/0.tar"
    for shards in (Shards((url, "https://a.example/1.tar"), (1, 1)), None):
        assert Data(None, shards).files(Namespace(train_data=url)) == [[3, status.st_mtime_ns]]


def test_pairs_of_a_queue_are_found_though_they_have_moved_a_little(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    image, text = (normalize(torch.randn(200, 16, generator=generator), dim=1) for _ in range(2))
    index = torch.randperm(200, generator=generator)[:60]
    noise = torch.randn(2, 60, 16, generator=generator)
    aged = [normalize(side[index] + 0.02 * off, dim=1) for side, off in zip((image, text), noise, strict=True)]
    widths = []
    chunks = Pairs.chunks
    monkeypatch.setattr(Pairs, "chunks", lambda own, width: widths.append(width) or chunks(own, width))
    assert torch.equal(nearest_pairs(Pairs(image, text), *aged, chunk_mib=1000 / 2**18), index)
    assert set(widths) == {1000 // len(index)}  # a block has a column for each of them
