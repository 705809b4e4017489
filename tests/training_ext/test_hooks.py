"""The seams: each in place once, only where and while it should be."""

import importlib
import re
from collections import Counter
from pathlib import Path

import open_clip
import pytest
import torch
from conftest import LOSSES, ext_main, run_main
from torch.utils._python_dispatch import TorchDispatchMode

from open_clip_ext.losses import NonFiniteError
from training_ext.core import hosts
from training_ext.core.patching import look_up
from training_ext.core.run import check_seams
from training_ext.core.seam import RUN, TRAIN_DATA, VAL_DATA, in_place
from training_ext.core.skipped_step import LEAST_SCALE, pass_over
from training_ext.core.state import check_finite
from training_ext.data.rows import DataRows
from training_ext.data.shards import Shards
from training_ext.flags.params import parse_args
from training_ext.launch import build

DATA = "open_clip_train.data"
SCOPES = (RUN, TRAIN_DATA, VAL_DATA)


def built(flags=""):
    """A run of the whole extension."""
    args = parse_args(flags.split())
    args.rank = 0
    run = build(args)
    run.data.rows = DataRows("webdataset", 1, "", Shards(("a.tar",), (1,)))
    return run


SEAMS = [seam for seam, _ in built("--dataset-type shapes --loss neuclip").seams()]


def names() -> dict:
    """Every replaced name, and the module's own name that leads to it."""
    firsts = {(seam.module, seam.path.split(".")[0]) for seam in SEAMS}
    return {place: look_up(*place) for place in {(seam.module, seam.path) for seam in SEAMS} | firsts}


def test_every_name_is_replaced_once_in_a_scope_and_layer():
    assert all(seam.scopes and set(seam.scopes) <= set(SCOPES) for seam in SEAMS)
    count = Counter((seam.module, seam.path, scope, seam.layer) for seam in SEAMS for scope in seam.scopes)
    assert max(count.values()) == 1
    assert all(seam.why and seam.contract for seam in SEAMS)


def test_every_name_is_a_seam_of_the_host():
    """Of the OpenCLIP that is found first, see `test_versions`."""
    found = Path(open_clip.__file__).parents[1]
    assert Path(hosts.installed().main().__file__).is_relative_to(found)
    check_seams(hosts.installed())


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("loss", ["", "--loss neuclip"])
def test_names_are_replaced_in_their_scope_only(scope, loss):
    run = built(f"--dataset-type shapes {loss}")
    owned = [(seam.module, seam.path) for seam, _ in run.seams() if scope in seam.scopes]
    before = names()
    with in_place(run.seams(), scope):
        changed = {place for place, value in names().items() if "." in place[1] or value != before[place]}
        assert torch.save is before["open_clip_train.main", "torch.save"]  # of others than OpenCLIP's main
    assert set(owned) - changed <= {(DATA, "wds.shuffle"), (DATA, "wds.WebLoader"), (DATA, "ResampledShards2")}
    assert names() == before


def test_processes_wait_longer_for_one_another_than_nccl_does(monkeypatch):
    given = {}

    def init_process_group(device_id=None, **arguments):
        given.update(arguments)
        raise Broken

    monkeypatch.setattr(torch.distributed, "init_process_group", init_process_group)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "2" if name == "WORLD_SIZE" else "0")
    run = built("--loss neuclip")
    with in_place(run.seams(), RUN), pytest.raises(Broken):
        importlib.import_module("open_clip_train.distributed").init_distributed_device(run.args)
    assert given["timeout"].total_seconds() == 2 * 60 * 60 and given["init_method"] == "env://"


@pytest.mark.filterwarnings("error")
def test_zero_shot_accuracy_needs_no_old_numpy():
    """NumPy warns of float(array), and from 2.4 on refuses it."""
    with in_place(built().seams(), RUN):
        count = importlib.import_module("open_clip_train.zero_shot").accuracy
        logits = torch.tensor([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0]])
        assert count(logits, torch.tensor([0, 1]), topk=(1, 2)) == [1.0, 2.0]


class Broken(Exception):
    pass


def breaks(*args, **kwargs):
    raise Broken


@pytest.mark.parametrize(
    "loss, broken",
    [
        ("neuclip", None),
        ("neuclip", "open_clip_train.data.DataLoader"),  # while the train data are built
        ("neuclip", "open_clip_train.train.is_master"),  # within an epoch
    ],
)
def test_every_name_is_restored(datasets, tmp_path, monkeypatch, loss, broken):
    if broken:
        monkeypatch.setattr(broken, breaks)
    before = names()
    command = f"{datasets['shapes']} {LOSSES[loss]} --workers 0 --epochs 1 --name x"
    try:
        code = run_main(ext_main, command, tmp_path)
    except Broken:
        code = None
    assert (code == 0) == (broken is None)  # before the first step a line and code 2, then an exception
    after = names()
    assert all(after[place] == before[place] for place in before)
    assert isinstance(hosts.installed().main().torch, type(importlib))
    assert isinstance(importlib.import_module("open_clip_train.data").wds, type(importlib))


def test_the_table_is_printed_by_component(capsys):
    assert ext_main("--dataset-type shapes --loss neuclip --seams".split()) == 0
    printed = capsys.readouterr().out
    assert all(f"  {seam.name}\n      {seam.why}" in printed for seam in SEAMS)
    assert re.search(r"^retrieval: 1 name", printed, re.M)


def test_what_is_passed_over():
    """A NaN of a step that a gradient scaler skips, if the weights are finite."""
    model, error, amp = torch.nn.Linear(2, 2), NonFiniteError("step 1: the loss is nan"), torch.amp.GradScaler
    pass_over(error, model, amp("cpu"))
    for scaler in (None, amp("cpu", enabled=False), amp("cpu", init_scale=LEAST_SCALE / 2)):
        with pytest.raises(NonFiniteError, match="step 1"):
            pass_over(error, model, scaler)
    model.bias.data[1] = torch.nan
    with pytest.raises(NonFiniteError, match="step 1"):
        pass_over(error, model, amp("cpu"))


class Reads(TorchDispatchMode):
    """Counts the values that the host reads one by one."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_a_save_waits_for_the_device_once_and_not_for_each_parameter():
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(9)))
    with Reads() as reads:
        check_finite(model, "epoch 3")
        assert reads.count == 0  # one copy of all results
        model[4].bias.data[1] = torch.inf
        with pytest.raises(NonFiniteError, match="^epoch 3: 4.bias is not finite"):
            check_finite(model, "epoch 3")
