"""The core alone, `--bare`: what it trains, resumes, replaces and refuses; and components by entry point."""

import ast
import errno
import importlib
import subprocess
import sys
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import open_clip
import pytest
import torch
from conftest import SHIPPED, Experiment, ext_main, run_main, write_pairs
from torch.nn.functional import cross_entropy

import training_ext.components
import training_ext.core
from open_clip_ext.errors import InputError, MachineError
from open_clip_ext.options import option
from training_ext.core import component, hosts, run, seam
from training_ext.core.checks import check_optimizer
from training_ext.core.component import Component
from training_ext.core.seam import Seam
from training_ext.core.state import KEY

ROOT = Path(__file__).parents[2]
ROWS = 24
# Each epoch is one step of all samples, so that their order and what a process gets of them do not matter; of whole
# images, since nothing seeds crops. Adam would divide gradients by themselves, rounding by rounding.
ONE_STEP = "--epochs 4 --warmup 1 --workers 0 --save-frequency 1 --aug-cfg scale=(1.0,1.0)"
BY_GRADIENTS = f"{ONE_STEP} --opt timm/sgd --momentum 0.9 --lr 0.1 --wd 0"
WHOLE = f"{BY_GRADIENTS} --batch-size {ROWS}"
WITH_HEAD = "--with words_head --words-head 0.5"


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> dict[str, str]:
    """One batch of pairs, as a csv and as six shards."""
    return write_pairs(tmp_path_factory.mktemp("data"), ROWS // 6)


@pytest.fixture(scope="session")
def words_head(tmp_path_factory) -> Path:
    """A folder on the path with the example's package installed, as pip does it."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "words_head.py").write_text((ROOT / "examples" / "words_head.py").read_text())
    (folder / "words_head-1.dist-info").mkdir()
    (folder / "words_head-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: words-head\nVersion: 1\n")
    (folder / "words_head-1.dist-info" / "entry_points.txt").write_text(
        f"[{component.GROUP}]\nwords_head = words_head:WordsHead\n"
    )
    return folder


@pytest.fixture
def has_words_head(words_head, monkeypatch):
    monkeypatch.syspath_prepend(str(words_head))
    component.registry.cache_clear()
    yield
    component.registry.cache_clear()


@pytest.fixture
def register(monkeypatch):
    """register(*classes): the registry has these components."""
    return lambda *classes: monkeypatch.setattr(component, "registry", lambda: {kind.name: kind for kind in classes})


def state_of(checkpoint: dict) -> dict:
    return checkpoint.get(KEY, checkpoint["optimizer"].get(KEY))["state"]


def assert_alike(one: Experiment, other: Experiment, epoch: int = 4) -> None:
    """Equal but for roundings: weights after `epoch` epochs, and the loss's state."""
    start, ours, theirs = (e.checkpoint(n) for e, n in ((one, 1), (one, epoch), (other, epoch)))
    own, expected, first = (
        {name.removeprefix("module."): value for name, value in file["state_dict"].items()}
        for file in (ours, theirs, start)
    )
    moved = max((own[name] - value).abs().max() for name, value in first.items())
    assert moved > 1e-3
    for name, value in expected.items():
        # Float32 encoders' similarities err by some 1e-6, and a gradient's weights, exponentials, by that over tau.
        assert (own[name] - value).abs().max() < 1e-4 * moved, name
    state, other_state = state_of(ours), state_of(theirs)
    assert state.keys() == other_state.keys() and state["steps"] == epoch
    for name in ("state.log_u", "temperature.log_s"):
        if name in state:
            torch.testing.assert_close(state[name], other_state[name], rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="session")
def full(data, tmp_path_factory):
    """full(loss) -> the run of the whole path on the csv, once for each loss."""
    folder, done = tmp_path_factory.mktemp("full"), {}

    def full(loss: str) -> Experiment:
        if loss not in done:
            assert not run_main(ext_main, f"--loss {loss} {data['csv']} {WHOLE} --name {loss}", folder)
            done[loss] = Experiment(folder, loss)
        return done[loss]

    return full


@pytest.mark.parametrize(
    "loss, kind, form",
    [
        ("fastclip-v3", "csv", f"--batch-size {ROWS}"),
        ("fastclip-v3", "shards", f"--batch-size {ROWS // 2} --accum-freq 2"),
        ("isogclr", "csv", f"--batch-size {ROWS // 2} --accum-freq 2"),
        ("isogclr", "shards", f"--batch-size {ROWS}"),
    ],
)
def test_it_trains_as_the_whole_path(run, full, data, loss, kind, form):
    assert_alike(run("bare", f"--bare --loss {loss} {data[kind]} {BY_GRADIENTS} {form}"), full(loss))


@pytest.mark.slow
@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("kind", ["csv", "shards"])
@pytest.mark.parametrize("number", [2, 3])
def test_several_processes_train_as_one(pair, three, full, data, tmp_path, number, kind, accum):
    form = f"--batch-size {ROWS // number // accum} --accum-freq {accum} --name several"
    processes = {2: pair, 3: three}[number]
    ended = processes(f"--bare --loss fastclip-v3 {data[kind]} {BY_GRADIENTS} {form}", tmp_path)
    assert [process.code for process in ended] == [0] * number, ended
    assert_alike(Experiment(tmp_path, "several"), full("fastclip-v3"))


@pytest.mark.slow
def test_other_numbers_of_processes_resume(pair, three, run, full, data, tmp_path):
    """Two epochs of two processes, one of one, and one of three."""
    # Nothing that follows --epochs
    common = f"--bare --loss fastclip-v3 --gamma 0.5 --gamma-decay-epochs 2 --lr-scheduler const {data['csv']}"
    common = f"{common} {BY_GRADIENTS}"
    for name, epochs, resumed in (("a", 2, ""), ("c", 4, "--resume {}/logs/b/checkpoints/epoch_3.pt")):
        if name == "c":
            last = tmp_path / "logs" / "a" / "checkpoints" / "epoch_2.pt"
            run("b", f"{common} --batch-size {ROWS} --epochs 3 --resume {last}")
        processes = pair if name == "a" else three
        flags = f"{common} --batch-size {ROWS // processes.number} --epochs {epochs} --name {name}"
        ended = processes(f"{flags} {resumed.format(tmp_path)}", tmp_path / "logs")
        assert [process.code for process in ended] == [0] * processes.number
    whole = run("whole", f"{common} --batch-size {ROWS}")
    resumed = Experiment(tmp_path / "logs", "c")
    (resumed.path / "checkpoints" / "epoch_1.pt").write_bytes((whole.path / "checkpoints" / "epoch_1.pt").read_bytes())
    assert_alike(resumed, whole)


@pytest.mark.parametrize("flags", ["--loss fastclip-v3", "--loss isogclr --accum-freq 2", f"--loss clip {WITH_HEAD}"])
def test_a_resumed_training_equals_an_uninterrupted_one(run, data, has_words_head, flags):
    flags = f"{flags if 'with' in flags else f'--bare {flags}'} {data['csv']} {WHOLE}"
    if "accum" in flags:
        flags = flags.replace(f"--batch-size {ROWS}", f"--batch-size {ROWS // 2}")
    whole = run("whole", flags)
    resumed = run("resumed", f"{flags} --resume {whole.path}/checkpoints/epoch_2.pt")
    first, second = (e.checkpoint(4)["state_dict"] for e in (whole, resumed))
    start = whole.checkpoint(2)["state_dict"]
    moved = max((first[name] - value).abs().max() for name, value in start.items())
    assert all((first[name] - value).abs().max() < 1e-5 * moved for name, value in second.items())


def test_a_fault_of_the_machine(ends, data, monkeypatch):
    """A full disk after the first step, with the code of one."""

    def full_disk(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    line = ends(f"--bare --loss neuclip {data['csv']} {WHOLE} --name x", code=MachineError.code)
    assert line.endswith("epoch_1.pt' cannot be written: the disk or the quota is full; make room")


def test_a_resumed_optimizer_has_the_settings_that_are_given(run, data):
    flags = f"--bare --loss fastclip-v3 {data['csv']} {ONE_STEP} --batch-size {ROWS}"
    run("first", f"{flags} --epochs 1")
    path = run("first2", f"{flags} --epochs 1 --wd 0.2").path / "checkpoints" / "epoch_1.pt"
    groups = run("more", f"{flags} --epochs 2 --wd 0.5 --beta1 0.5 --eps 1e-4 --resume {path}").checkpoint(2)
    *own, tau = groups["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in own] == [0.0, 0.5]
    assert {(group["betas"], group["eps"]) for group in own} == {((0.5, 0.98), 1e-4)}
    assert tau["steps"] == 2


class Spy(Component):
    """Looks at every name of OpenCLIP, torch and webdataset in the first step."""

    name = "spy"
    changed: set[str] = set()
    before: dict[str, dict] = {}

    def losses(self, batch, output):
        for name, names in Spy.before.items():
            now = vars(sys.modules[name])
            for key in names.keys() | now.keys():
                if now.get(key) is not names.get(key) and not isinstance(now.get(key), type(sys)):
                    value = now.get(key)
                    if type(value).__name__ == "Overlay":
                        Spy.changed |= {f"{name}.{path}" for path in overlaid(key, value)}
                    elif not key.startswith("_"):
                        Spy.changed.add(f"{name}.{key}")
        return {"spy": output["logit_scale"].sum() * 0}


def overlaid(path: str, overlay) -> set[str]:
    own = {key: value for key, value in vars(overlay).items() if key != "_original"}
    return {
        name for key, value in own.items()
        for name in (overlaid(f"{path}.{key}", value) if type(value).__name__ == "Overlay" else {f"{path}.{key}"})
    }


def test_nothing_is_replaced_but_the_seams(run, data, register):
    """The names in place at the first step are the host's; those of the train data are only while it is built."""
    register(Spy)
    watched = ("open_clip", "open_clip_train", "torch", "webdataset", "timm.optim", "pandas")
    run("warm", f"--bare --loss neuclip {data['shards']} {WHOLE} --epochs 1")  # what is only imported, or cached
    modules = [name for name in list(sys.modules) if name.startswith(watched) and sys.modules[name] is not None]
    Spy.before, Spy.changed = {name: dict(vars(sys.modules[name])) for name in modules}, set()
    run("spied", f"--with spy --loss neuclip {data['shards']} {WHOLE} --epochs 1")
    seams = hosts.installed().SEAMS
    assert Spy.changed == {seam.name for seam in seams if "run" in seam.scopes}
    assert len(seams) <= 14


def test_core_is_at_the_bottom():
    """It imports the library and OpenCLIP, but neither a component nor anything else of this side."""
    folder = Path(training_ext.core.__file__).parent
    own = training_ext.core.__name__
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                inside = name.startswith("training_ext") and name != "training_ext.components"
                assert not inside or name.startswith(own), (path, name)


LOADED = """
import sys
from pathlib import Path
from open_clip_ext.main import main
assert main(sys.argv[1:]) == 0
print({name: len(Path(module.__file__).read_text().splitlines()) for name, module in sys.modules.items()
       if name.startswith("training_ext")})
"""


def loaded_by(flags: str, folder: Path) -> dict[str, int]:
    """Lines of this package's modules that a run in a process of its own has loaded, by name."""
    command = [sys.executable, "-c", LOADED, *f"{SHIPPED} {ONE_STEP} {flags} --logs {folder}".split()]
    return ast.literal_eval(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_run_loads_what_it_uses(data, tmp_path):
    lines = loaded_by(f"--bare --loss neuclip {data['csv']}", tmp_path)
    assert sum(lines.values()) <= (1885 if hosts.installed().HAS_TASKS else 1820), lines
    names = loaded_by(f"--loss neuclip {data['csv']}", tmp_path)
    asked_for = ("core.added_losses", "core.checks", "data.counting", "data.sample_keys")
    asked_for += ("flags.help", "flags.recipes", "flags.val_data", "openclip.failure_lines")
    assert not names.keys() & {f"training_ext.{name}" for name in asked_for}
    assert "training_ext.data.csv_rows" in names


# Components


def test_a_components_loss_is_that_of_a_plain_computation(has_words_head, monkeypatch):
    torch.manual_seed(0)
    kind = component.registry()["words_head"]
    head = kind(Namespace(words_head=0.5))
    model = open_clip.create_model("ViT-test", output_dict=True)
    head.wrap_model(model)
    from training_ext.core.added_losses import PREFIX, add_losses

    add_losses(model.double(), [head])
    image = torch.rand(3, 3, *(2 * [model.visual.image_size[0]]), dtype=torch.float64)
    text = open_clip.get_tokenizer("ViT-test")(["a cat", "a red red dog", "b"])
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    value = model.train()(image, text)[f"{PREFIX}words"]
    logits = model.words_head(model.visual(image))
    losses = []
    for row, tokens in zip(logits, text, strict=True):
        words = sorted({*tokens.tolist()} - {0})
        losses.append(sum(cross_entropy(row, torch.tensor(word)) for word in words) / len(words))
    assert value.shape == (1,) and abs(value.item() - 0.5 * sum(losses).item() / 3) < 1e-12
    assert not [name for name in model.eval()(image, text) if name.startswith(PREFIX)]


@pytest.mark.parametrize("loss", ["clip", "fastclip-v3"])
def test_a_components_loss_accumulates_to_that_of_a_whole_batch(run, data, has_words_head, loss):
    common = f"{WITH_HEAD} --loss {loss} {data['csv']} {BY_GRADIENTS}"
    whole = run("whole", f"{common} --batch-size {ROWS}")
    halves = run("halves", f"{common} --batch-size {ROWS // 2} --accum-freq 2")
    assert "Words_loss" in whole.log
    ours, theirs, start = (e.checkpoint(n)["state_dict"] for e, n in ((halves, 4), (whole, 4), (whole, 1)))
    moved = {name: (theirs[name] - value).abs().max() for name, value in start.items()}
    assert moved["words_head.weight"] > 1e-3
    if loss != "clip":  # whose temperature OpenCLIP's accumulation moves by accum_freq times its gradient
        assert all((ours[name] - value).abs().max() < 1e-4 * max(moved.values()) for name, value in theirs.items())


@pytest.mark.slow
@pytest.mark.parametrize("accum", [1, 2])
def test_a_components_loss_on_two_processes(pair, run, data, words_head, has_words_head, tmp_path, accum):
    common = f"{WITH_HEAD} --loss fastclip-v3 {data['csv']} {BY_GRADIENTS}"
    pair.close()  # processes whose path lacks the package
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{words_head}:{':'.join(sys.path)}")
        form = f"--batch-size {ROWS // 2 // accum} --accum-freq {accum}"
        assert [process.code for process in pair(f"{common} {form} --name two", tmp_path)] == [0, 0]
    pair.close()
    assert_alike(Experiment(tmp_path, "two"), run("one", f"{common} --batch-size {ROWS}"))


def test_exported_weights_load_in_plain_open_clip(run, data, has_words_head):
    experiment = run("head", f"{WITH_HEAD} --loss neuclip {data['csv']} {WHOLE} --epochs 1")
    weights = experiment.path / "weights" / "epoch_1.pt"
    model = open_clip.create_model("ViT-test", pretrained=str(weights))
    trained = experiment.checkpoint(1)["state_dict"]
    assert "words_head.weight" in trained
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())


class Scaled(Component):
    name, switch = "scaled", "scale_text"
    scale_text: float | None = option(None, "factor of the text tower's learning rate")
    beside_text: float | None = option(None, "has no effect alone")

    def param_groups(self, groups, names):
        text = {parameter for parameter, name in names.items() if name.startswith("transformer")}
        split = []
        for group in groups:
            for chosen, more in ((False, {}), (True, {"lr_scale": self.scale_text})):
                params = [p for p in group["params"] if (p in text) == chosen]
                split += [{**group, "params": params, **more}] if params else []
        return split


def test_groups_of_a_component_have_their_rate(run, data, register):
    register(Scaled)
    common = f"--with scaled --scale-text 0.25 --loss fastclip-v3 --lr-tau 3e-4 {data['csv']} --workers 0"
    first = run("first", f"{common} --epochs 1 --warmup 0 --lr-scheduler const --lr 1e-3")
    *groups, tau = first.checkpoint(1)["optimizer"]["param_groups"]
    assert [group["lr"] for group in groups] == [1e-3, 0.25e-3] * 2 and tau["lr"] == 3e-4


class Outer(Component):
    name = "outer"
    calls: list[str] = []
    seams = (
        Seam(
            hosts.installed().main().__name__, "evaluate", why="", contract="", used_by="open_clip_train.main:main",
            replacement=lambda original, own: lambda *a, **k: (own.calls.append(own.name), original(*a, **k))[1],
            layer=1,
        ),
    )


class Inner(Outer):
    name = "inner"
    seams = (replace(Outer.seams[0], layer=0),)


@pytest.mark.parametrize("chosen", [["outer"], ["inner"], ["inner", "outer"], ["outer", "inner"]])
def test_replacements_of_one_name_chain_by_layer(chosen, monkeypatch):
    Outer.calls.clear()
    main = importlib.import_module("open_clip_train.main")
    monkeypatch.setattr(main, "evaluate", lambda: Outer.calls.append("OpenCLIP"))
    owners = [{"outer": Outer, "inner": Inner}[name](Namespace()) for name in chosen]
    original = main.evaluate
    with seam.in_place([(own, owner) for owner in owners for own in owner.seams], seam.RUN):
        main.evaluate()
    assert main.evaluate is original
    assert Outer.calls == [name for name in ("outer", "inner") if name in chosen] + ["OpenCLIP"]


# What is refused, in one line


def broken(kind: type[Component], **attributes) -> type[Component]:
    gone = Seam("open_clip_train.main", "no_such_name", why="w", contract="", replacement=None, used_by="os:stat")
    return type(kind.__name__, (kind,), {"seams": (gone,), **attributes})


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--bare --loss nonsense", "'nonsense' is not one of"),
        ("--bare --loss clip --rho 3", "--rho: the loss 'clip' is OpenCLIP's own and does not use it"),
        ("--bare --rho 3", "--rho: needs --loss"),
        ("--with spy,nothing", "--with: 'nothing' is not one of scaled, spy"),
        ("--with scaled --beside-text 1 --loss clip", "--beside-text: has no effect without --scale-text"),
        ("--with scaled --loss clip", "--with: scaled has no effect without its flags: --scale-text"),
        ("--bare --loss fastclip-v3 --resume {folder}", "of FSDP's sharded state; give a file"),
        ("--bare --loss fastclip-v3 --resume {folder}/none.pt", "--resume: there is no"),
        ("--bare --loss fastclip-v3 --resume {folder}/text.pt", "cannot be resumed: "),
        ("--bare --loss fastclip-v3 --resume {folder}/plain.pt", "trained with OpenCLIP's own loss, not with --loss "),
        ("--bare --loss clip --resume {folder}/ours.pt", "--temperature learnable, not with OpenCLIP's own loss"),
        ("--with spy --loss fastclip-v3 --resume {folder}/with.pt", "with the component head; train with it"),
        ("--bare --loss fastclip-v3 --resume {folder}/within.pt", "was saved within an epoch"),
    ],
)
def test_refusals(refused, register, tmp_path, flags, message):
    register(Scaled, Spy)
    entry = {"format": 5, "loss": "fastclip-v3", "num_rows": ROWS, "components": {}, "state": {"steps": 1}}
    parts = {"normalizer": "table", "temperature": "learnable"}
    entry["parts"] = parts
    (tmp_path / "text.pt").write_text("text")
    for name, content in {
        "plain": {}, "ours": {KEY: entry}, "with": {KEY: {**entry, "components": {"head": {}}}},
        "within": {"optimizer": {KEY: {**entry, **parts, "format": 3, "position": {"batches": 3}}}},
    }.items():
        steps = {"global_step": 1} if hosts.installed().HAS_TASKS else {}
        torch.save({"epoch": 1, "state_dict": {}, "optimizer": {}, **steps, **content}, tmp_path / f"{name}.pt")
    given = flags.format(folder=tmp_path)
    assert message in refused(f"{given} --dataset-type synthetic --train-num-samples {ROWS}")


@pytest.mark.parametrize("by_name", [False, True])
def test_an_optimizer_whose_first_group_is_empty(by_name):
    """As where nothing but the temperature, which has a group of its own, is without weight decay."""
    groups = [{"params": []}, {"params": ["visual.proj"]}]
    loaded = {"global_step": 1, "optimizer": {"param_groups": groups}}
    with nullcontext() if by_name else pytest.raises(InputError, match="was written with --fsdp"):
        check_optimizer("path", loaded, has_tasks=True, by_name=by_name)


def test_shards_without_sizes(ends, data, tmp_path):
    (tmp_path / "0.tar").write_bytes(b"")
    assert "has no number of samples in a sizes.json" in ends(
        f"--bare --loss fastclip-v3 --train-data {tmp_path}/0.tar --train-num-samples 8 --name none"
    )


def test_a_component_whose_contract_is_broken(register, refused, capsys, run, data):
    register(broken(Spy), broken(Scaled))
    line = refused(f"--with scaled --scale-text 2 --loss clip {data['csv']}")
    reason = "there is no open_clip_train.main.no_such_name"
    assert line == f"scaled cannot run with this OpenCLIP: {reason}; leave out --scale-text"
    run("on", f"--with spy --loss clip {data['csv']} {WHOLE} --epochs 1")  # which is off
    assert f"Without spy: {reason}" in capsys.readouterr().err
    register(broken(Spy, may_be_off=False))
    assert refused(f"--with spy --loss clip {data['csv']}").endswith("; give --without spy")
    run("off", f"--with spy --without spy --loss clip {data['csv']} {WHOLE} --epochs 1")


def test_a_seam_of_core_that_is_broken(refused, data, monkeypatch):
    host = hosts.installed()
    gone = Seam("open_clip_train.main", "no_such_name", why="w", contract="", replacement=None, used_by="os:stat")
    monkeypatch.setattr(host, "SEAMS", (*host.SEAMS, gone))
    line = refused(f"--bare --loss clip {data['csv']}")
    assert "where there is no open_clip_train.main.no_such_name; it runs with" in line


def test_contracts():
    """A renamed user, a name that it no longer uses, and a parameter that is gone are seen."""
    given = dict(why="", contract="", replacement=None)
    assert Seam("training_ext.core.run", "listing", **given, used_by="training_ext.core.run:start").broken() is None
    divided = "training_ext.core.added_losses:with_added"  # by way of take_added
    assert Seam("training_ext.core.added_losses", "PREFIX", **given, used_by=divided).broken() is None
    for path, used_by, parameters, what in (
        ("listing", "training_ext.core.run:begin", (), "there is no training_ext.core.run.begin"),
        ("listing", "training_ext.core.run:listing", (), "training_ext.core.run.listing does not use listing"),
        ("listing", "training_ext.core.run:start", ("walk",), "training_ext.core.run.listing takes no walk"),
    ):
        assert Seam("training_ext.core.run", path, **given, used_by=used_by, parameters=parameters).broken() == what


def test_the_listing_names_owners(register, capsys):
    register(Outer)
    run.start(["--with", "outer", "--seams", "--loss", "neuclip"])
    lines = capsys.readouterr().out.splitlines()
    assert f"core: {len(hosts.installed().SEAMS)} names" in lines and "outer: 1 names" in lines


def test_a_broken_package_is_left_out_with_a_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "broken-1.dist-info").mkdir()
    (tmp_path / "broken-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (tmp_path / "broken-1.dist-info" / "entry_points.txt").write_text(f"[{component.GROUP}]\nx = no_such_module:X\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    component.registry.cache_clear()
    assert "x" not in component.registry()
    component.registry.cache_clear()
    assert "The component 'x' (no_such_module:X) is left out: ModuleNotFoundError" in caplog.text


# On the whole path

@pytest.mark.parametrize("loss", ["clip", "fastclip-v3"])
def test_the_whole_path_trains_as_the_core(run, data, loss):
    common = f"--token-head 0.5 --loss {loss} {data['csv']} {WHOLE}"
    whole, core = run("whole", common), run("core", f"--with token_head {common}")
    ours, theirs, start = (e.checkpoint(n)["state_dict"] for e, n in ((whole, 4), (core, 4), (core, 1)))
    moved = max((theirs[name] - value).abs().max() for name, value in start.items())
    assert all((ours[name] - value).abs().max() < 1e-4 * moved for name, value in theirs.items())
    (weights, expected) = (open_clip.factory.load_state_dict(f"{e.path}/weights/epoch_4.pt") for e in (whole, core))
    assert weights.keys() == expected.keys() == ours.keys() - {"token_head.weight", "token_head.bias"}


@pytest.mark.parametrize("loss", ["clip", "fastclip-v3"])
def test_the_whole_path_resumes_with_a_component(run, refused, datasets, loss):
    common = f"--token-head 0.5 --loss {loss} {datasets['csv']} --workers 0 --epochs 2 --save-frequency 1"
    whole = run("whole", common)
    resumed = run("resumed", f"{common} --resume {whole.path}/checkpoints/epoch_1.pt")
    if loss != "clip":  # whose order of the data is OpenCLIP's
        first, second = (e.checkpoint(2) for e in (whole, resumed))
        assert all(torch.equal(second["state_dict"][name], value) for name, value in first["state_dict"].items())
    line = refused(f"--loss {loss} {datasets['csv']} --epochs 2 --resume {whole.path}/checkpoints/epoch_1.pt")
    assert line.endswith("was trained with the component token_head; train with it")


def test_best_weights_are_exported(run, datasets):
    flags = f"{datasets['shapes']} --val-num-samples 16 --workers 0 --epochs 1 --keep-best shapes-zeroshot-top1"
    best = run("best", f"{flags} --loss fastclip-v3 --token-head 0.5").path / "best.pt"
    model = open_clip.create_model("ViT-test", pretrained=str(best))
    assert not [name for name in model.state_dict() if name.startswith("token_head")]


# Built-in components


def test_components_are_found_by_their_folder():
    folder = Path(training_ext.components.__file__).parent
    names = {path.stem for path in folder.iterdir()} - {"__init__", "__pycache__"}
    assert {kind.name for kind in component.registry().values() if kind.__module__.startswith("training_ext")} == names


def test_every_component_keeps_its_contracts():
    seams = [seam for kind in component.registry().values() for seam in kind.seams]
    assert seams and [seam.broken() for seam in seams] == [None] * len(seams)
