"""What happens to a loss beside training: evaluation first, resuming, bad batches, states that do not fit."""

import copy
import json
import math
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numerics import unit
from torch import nn
from torch.utils.checkpoint import checkpoint

from open_clip_ext import InputError, NonFiniteError, create_loss
from open_clip_ext.batch import add_eps
from open_clip_ext.distributed import transportable
from open_clip_ext.errors import lost_another_process
from open_clip_ext.losses import checks
from open_clip_ext.losses.checks import FirstSteps
from open_clip_ext.losses.global_contrastive import GlobalContrastiveLoss
from open_clip_ext.normalizers import Normalizer
from open_clip_ext.objectives import Unified
from open_clip_ext.row_files import check_row_files, rows_in_files
from open_clip_ext.row_state import ShardedRows
from open_clip_ext.side_model import SideModel
from open_clip_ext.temperatures import FixedTemperature

MLP = {"normalizer": "mlp"}
LOSSES = {
    "fastclip-v3": {}, "fastclip-v2": {"rho": 1.0}, "isogclr": {"rho": 1.0}, "cyclip": {}, "tempnet": {},
    "amorlip": {"amor_online_every": 2}, "queue": {"queue_size": 6},
    "neuclip": {"npn_prototypes": 4, "npn_restart_every": 3}, "neuclip, growing": {"npn_prototypes": 20},
    "neuclip, adamw": {"npn_prototypes": 4, "npn_opt": "adamw"},
    "neuclip, joint": {"npn_prototypes": 4, "npn_joint": True}, "neuclip, mlp": MLP,
    "neuclip, mlp, joint": {**MLP, "npn_joint": True},
}  # fmt: skip
ALL = pytest.mark.parametrize("name", LOSSES)
ONE_OF_EACH = pytest.mark.parametrize(
    "name", ["fastclip-v3", "isogclr", "cyclip", "amorlip", "tempnet", "neuclip", "queue"]
)


def make(name: str, **options):
    """A loss of 8 rows for batches of 4."""
    loss = create_loss(name.split(",")[0], **{"num_samples": 8, "epochs": 3} | LOSSES.get(name, {}) | options)
    loss.set_epoch(0)
    return loss


def features(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple:
    generator = torch.Generator().manual_seed(seed)
    image, text = (unit(generator, 4, 8).to(dtype).requires_grad_() for _ in range(2))
    return image, text, torch.tensor(20.0, dtype=dtype)


def rows(seed: int = 0) -> torch.Tensor:
    return torch.randperm(8, generator=torch.Generator().manual_seed(seed))[:4]


def step(loss, seed: int = 0) -> float:
    return loss(*features(seed), index=rows(seed)).item()


def same_state(one: dict, other: dict, but: tuple = ()) -> None:
    assert one.keys() == other.keys()
    for key in one.keys() - set(but):
        a, b = one[key], other[key]
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, key


# Order of calls


@ALL
def test_an_evaluation_may_come_first_and_moves_nothing(name):
    """In inference mode; and in training mode without gradients, as where a validation forgets `eval()`, with the same
    value, for other samples too than those of the step before."""
    loss = make(name)
    with torch.inference_mode():
        loss.eval()
        step(loss)
    loss.train()
    for seed in range(4):  # the second visits move individual temperatures
        step(loss, seed)
    before = copy.deepcopy(loss.full_state())
    with torch.no_grad():
        forgot = step(loss, 9)
        scale = nn.Parameter(torch.tensor(3.0)).exp()  # which has a graph
        assert loss(*features(9)[:2], scale, index=rows(9)).isfinite()
        assert forgot == step(loss.eval(), 9) or name == "tempnet" and math.isfinite(forgot)  # has dropout
    same_state(loss.full_state(), before)


@ALL
@pytest.mark.parametrize("accum_freq", [1, 2])
def test_features_may_be_of_inference_mode(name, accum_freq):
    """As a locked tower's, or cached embeddings."""
    loss, plain = make(name, accum_freq=accum_freq), make(name, accum_freq=accum_freq)
    for seed in range(4):
        with torch.inference_mode():
            image, _, scale = features(seed)
        _, text, _ = features(seed)
        index = rows(seed // 2)
        loss(image, text, scale, index=index).backward()
        (expected,) = torch.autograd.grad(plain(*(same := features(seed)), index=index), same[1])
        torch.testing.assert_close(text.grad, expected)
    with torch.no_grad():
        assert loss.eval()(image, text, scale, index=index).isfinite()


@ALL
def test_a_loss_may_be_made_and_loaded_in_inference_mode(name):
    plain = make(name)
    step(plain)
    with torch.inference_mode():
        loss = make(name)
        loss.load_state_dict({key: copy.deepcopy(value) for key, value in plain.state_dict().items()})
    for seed in range(1, 4):
        assert step(loss, seed) == step(plain, seed)


@ONE_OF_EACH
def test_a_recomputation_is_refused(name):
    loss = make(name)
    with pytest.raises(RuntimeError, match="leave the loss out of the checkpointed part"):
        checkpoint(lambda *given: loss(*given, index=rows()), *features(), use_reentrant=False).backward()


@pytest.mark.parametrize("scale", [20, 20.0, np.float32(20), np.int64(20)])
def test_the_scale_may_be_any_real_number(scale):
    expected = make("fastclip-v3")(*features(), index=rows())
    assert torch.equal(make("fastclip-v3")(*features()[:2], scale, index=rows()), expected)


@pytest.mark.parametrize(
    "name, options",
    [
        ("fastclip-v3", {}), ("fastclip-v2", {"gamma_schedule": "constant"}), ("amorlip", {}), ("tempnet", {}),
        ("isogclr", {"tau_lr_schedule": "cosine"}), ("queue", {"queue_size": 4096}),
    ],
)  # fmt: skip
def test_a_loss_that_follows_the_epoch_does_not_train_without_it(name, options):
    loss = create_loss(name, **{"num_samples": 8, "epochs": 3, **options})
    before = loss.full_state()
    with pytest.raises(ValueError, match="call its set_epoch"):
        step(loss)
    assert loss.full_state().keys() == before.keys()
    with torch.no_grad():
        step(loss)  # an evaluation needs no epoch
    loss.set_epoch(0)
    step(loss)
    for other in ("sogclr", "isogclr", "neuclip", "cyclip"):
        step(create_loss(other, num_samples=8))


def fail(loss, seed: int = 0) -> None:
    """A step whose computation raises."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(type(loss), "_value", lambda *args, **kwargs: (_ for _ in ()).throw(MemoryError()))
        step(loss, seed)


@ALL
def test_torchs_default_device_changes_nothing(name):
    """A network drawn on a GPU would differ after a resume, and take from the generator of the user's own dropout."""
    plain, other = make(name), make(name)
    for seed in range(3):
        batch = features(seed), rows(seed)
        with torch.device("meta"):  # in place of a GPU
            value = other(*batch[0], index=batch[1]).item()
        assert value == plain(*batch[0], index=batch[1]).item()


@pytest.mark.parametrize("most", [2, 1024])
@pytest.mark.parametrize("bad", [True, math.nan, math.inf])
def test_the_first_problem_is_that_of_the_first_step(bad, most, monkeypatch):
    """Whether it is read when asked for or before, as the device would keep too much."""
    monkeypatch.setattr(checks, "MOST_NOTED", most)
    problems, good = FirstSteps(), type(bad)()
    for step, are_wrong in ((3, [good] * 3), (4, [good, good, bad]), (5, [bad, good, bad]), (5, [bad, bad])):
        problems.note(("image", "text", "scale"), step, torch.tensor(are_wrong))
    assert len(problems._noted) == 4 % most
    assert problems.problem() == (4, "scale") == problems.problem()


def test_a_value_may_be_overwritten():
    """As by `loss /= 2`; the step's next call has its own."""
    loss, twin = (make("fastclip-v3", accum_freq=2) for _ in range(2))
    for _ in range(2):
        value, expected = (one(*features(), index=rows()) for one in (loss, twin))
        assert torch.equal(value, expected)
        value /= 2
        value.backward()


@ONE_OF_EACH
def test_a_step_that_failed_may_be_tried_again(name):
    """The try begins a step; as a step's second call it would get the normalizers of the step before. An evaluation
    that fails ends none."""
    loss, twin = (make(name, accum_freq=2) for _ in range(2))
    for one in (loss, twin):
        for seed in (0, 0):
            step(one, seed)
    fail(loss, 1)
    assert step(loss, 1) == step(twin, 1)
    fail(loss.eval(), 2)
    loss.train()
    assert step(loss, 1) == step(twin, 1)
    assert loss.steps == twin.steps == 2


@pytest.mark.parametrize("calls", [0, 1])
def test_the_first_step_is_checked_when_it_is_tried_again(calls):
    """Whichever of its calls failed."""
    loss = make("queue", accum_freq=2)
    for _ in range(calls):
        step(loss)
    fail(loss)
    image, text, scale = features()
    with pytest.raises(ValueError, match="image_features must be unit vectors"):
        loss(2 * image.detach(), text, scale, index=rows())


@pytest.mark.parametrize("name", ["neuclip", "queue", "fastclip-v3"])
def test_a_short_group_of_accumulation_is_found_not_mixed_with_the_next_batch(name):
    """With a loss that keeps nothing per sample, too, if rows are passed."""
    loss = make(name, accum_freq=3)
    for _ in range(2):
        loss(*features(0), index=torch.arange(4))
    with pytest.raises(ValueError, match="^step 1: index: the 3 calls of a step .* must have the same rows"):
        loss(*features(1), index=torch.arange(4, 8))
    for _ in range(3):  # the next one begins a step
        loss(*features(1), index=torch.arange(4, 8))
    assert loss.steps == 2
    loss.raise_if_not_finite()


@pytest.mark.parametrize("in_last_call", [False, True])
@pytest.mark.parametrize("name", ["amorlip", "fastclip-v3", "neuclip"])
def test_accumulation_equals_one_call(name, in_last_call):
    """OpenCLIP's scheme: accum_freq calls on the same batch, each with the graph of one part, and of logit_scale or, in
    later versions, of logit_scale in the last one alone. A call in evaluation mode does not count as one of them."""
    once, twice = make(name), make(name, accum_freq=2)
    for seed in range(3):
        image, text, scale = (leaf.requires_grad_() for leaf in features(seed, torch.float64))
        expected = torch.autograd.grad(once(image, text, scale, index=rows(seed)), [image, text, scale])
        with torch.no_grad():
            twice.eval()(*features(seed + 1, torch.float64), index=rows(seed))
        twice.train()
        found = torch.zeros_like(scale)
        for call in range(2):
            parts = [list(side.detach().chunk(2)) for side in (image, text)]
            for part in parts:
                part[call].requires_grad_()
            seen = scale.detach() if in_last_call and call == 0 else scale
            value = twice(*map(torch.cat, parts), seen, index=rows(seed))
            own = torch.autograd.grad(value, [parts[0][call], parts[1][call]], retain_graph=True)
            if seen is scale:
                found += torch.autograd.grad(value, scale)[0]
            for one, other in zip(own, expected, strict=False):
                torch.testing.assert_close(one, other.chunk(2)[call])
        torch.testing.assert_close(found, expected[2])
    same_state(twice.full_state(), once.full_state())


@ALL
def test_the_calls_of_a_step_share_one_computation(name, monkeypatch):
    """Bit for bit what each would compute: its value, its gradients and the state."""
    shared, alone = (make(name, accum_freq=2) for _ in range(2))
    of_class, computed = type(shared).compute, []
    compute = lambda self, **inputs: computed.append(self) or of_class(self, **inputs)  # noqa: E731
    monkeypatch.setattr(type(shared), "compute", compute)
    for seed in (0, 0, 1, 1, 2, 2):
        results = []
        for loss in (shared, alone):
            alone._first_call = None
            leaves = [leaf.requires_grad_() for leaf in features(seed)]
            value = loss(*leaves, index=rows(seed))
            results.append([value.detach(), *torch.autograd.grad(value, leaves, allow_unused=True)])
        for one, other in zip(*results, strict=True):
            assert one is other is None or torch.equal(one, other)
    assert (computed.count(shared), computed.count(alone)) == (3, 6)
    same_state(shared.full_state(), alone.full_state())


@ALL
def test_the_calls_of_a_step_must_be_known_to_have_one_batch(name):
    """By rows or by the loop. Another batch would get the gradient of the first, or move a network and a queue beside
    the earlier batch's."""
    loss = make(name, accum_freq=2)
    if not loss.needs_index:
        with pytest.raises(ValueError, match="^index: accum_freq 2 needs each call's rows, or loss.one_batch"):
            loss(*features())
    loss.one_batch_per_step = True
    index = rows() if loss.needs_index else None
    assert loss(*features(), index=index) == loss(*features(), index=index)
    # A batch that is not finite in a call that computes nothing.
    loss(*features(), index=index)
    image, text, scale = features()
    loss(image, text * math.nan, scale, index=index)
    with pytest.raises(NonFiniteError, match="step 2: text_features is not finite"):
        loss.raise_if_not_finite()


class Biased(Normalizer):
    """The batch's own estimate and a learned constant."""

    name = "biased"
    differentiable = True

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.tensor(0.3))

    def update(self, batch):
        return None

    def forward(self, batch, updated=None):
        return add_eps(batch.log_batch + self.bias + 0 * batch.positives, 1e-14)


def test_a_normalizers_parameters_get_one_gradient_per_step():
    found = []
    for accum_freq in (1, 3):
        loss = GlobalContrastiveLoss(Biased(), FixedTemperature(), Unified, accum_freq=accum_freq)
        for _ in range(accum_freq):
            loss(*features(), index=rows()).backward()
        found.append(loss.normalizer.bias.grad)
    torch.testing.assert_close(*found)


@ONE_OF_EACH
def test_second_derivatives_are_refused(name):
    image, text, scale = features()
    value = make(name)(image, text, scale, index=rows())
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(value, [image, text], create_graph=True)


# Types and places


@pytest.mark.parametrize("name", ["fastclip-v3", "isogclr"])
def test_rows_stay_float32_and_go_where_the_first_batch_is(name):
    for dtypes in ((torch.float32, torch.float64), (torch.float64, torch.float32)):
        loss = make(name)
        for dtype in dtypes:
            assert loss(*features(dtype=dtype), index=rows()).dtype == dtype
        tables = [module.rows for module in loss.modules() if isinstance(module, ShardedRows)]
        assert tables and all(table.dtype == torch.float32 for table in tables)
    # The device "meta" stands for a GPU. Rows on the host stay there.
    for where, expected in (("device", "meta"), ("host", "cpu")):
        loss = make(name, rows_on=where)
        loss._adapt(8, torch.device("meta"), torch.float32)
        assert {part.rows.device.type for part in loss.modules() if isinstance(part, ShardedRows)} == {expected}


def test_the_scale_may_be_a_number():
    image, text, _ = features(dtype=torch.float64)
    scales = (14, 14.0, torch.tensor(14.0), torch.tensor(14.0, dtype=torch.float64))
    assert len({make("fastclip-v3")(image, text, scale, index=rows()).item() for scale in scales}) == 1
    loss = create_loss("neuclip", normalizer="batch", encoder_objective="compositional")
    assert loss(image, text, 1 / 0.07) == loss(image, text, torch.tensor(1 / 0.07, dtype=torch.float64))


@ALL
def test_a_model_that_is_converted_to_16_bits_leaves_its_loss_in_float32(name):
    """Before the first batch and later; the loss trains on as if nothing had happened."""
    losses = [make(name) for _ in range(2)]
    model = nn.ModuleDict({"tower": nn.Linear(2, 2), "loss": losses[0]})
    for seed in range(4):
        if seed in (0, 2):
            assert (model.half() if seed else model.bfloat16())["tower"].weight.itemsize == 2
        first, second = (step(loss, seed) for loss in losses)
        assert first == second
    same_state(*(loss.full_state() for loss in losses))


def test_gradients_that_float16_cannot_hold():
    """Two pairs that agree and then do not: the second step's weights are bounded at exp(12.5), and half of that is
    more than float16 holds. The value is finite, and so is everything else."""
    loss = create_loss("fastclip-v1", num_samples=2, gamma=1e-6, gamma_schedule="constant")
    pairs = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    for sign, is_held in ((1, True), (-1, False)):
        image, text = pairs.half().requires_grad_(), (sign * pairs).half().requires_grad_()
        value = loss(image, text, 100.0, index=torch.arange(2))
        value.backward()
        assert value.isfinite() and image.grad.isfinite().all() == is_held
        if is_held:
            loss.raise_if_not_finite()
    with pytest.raises(NonFiniteError, match="step 2: the float16 gradient of the features"):
        loss.raise_if_not_finite()


def test_what_the_process_group_cannot_send_moves(monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda: "meta:other")  # as "cuda:nccl"
    assert transportable(torch.zeros(2)).device.type == "meta"
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    assert transportable(torch.zeros(2)).device.type == "cpu"


@pytest.mark.parametrize("settings, device", [({}, "cpu"), ({"capturable": True}, "meta")])
def test_a_networks_count_of_steps_goes_where_its_optimizer_keeps_it(settings, device):
    """In host memory, which waits for no device; on the device (here "meta") for a fused or captured step."""
    trained = SideModel({"weight": torch.zeros(2)}, "adam")
    trained.step()
    loaded = SideModel({"weight": torch.ones(2)}, "adam", fused=None, **settings)
    loaded.load(trained.state(), like=torch.empty(0, device="meta"))
    state = loaded.state()
    assert state["adam:weight:step"].device.type == device and state["adam:weight:exp_avg"].is_meta


def test_a_state_that_did_not_fit_in_memory_is_allocated_again(monkeypatch):
    loss = make("queue")
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(type(loss.normalizer), "materialize", lambda *_: (_ for _ in ()).throw(MemoryError()))
        step(loss)
    assert step(loss) == step(make("queue"))


# States


@ALL
@pytest.mark.parametrize("stop", [0, 4])
def test_every_way_to_go_on_is_the_same(name, stop, tmp_path):
    """From a file, as a part of a user's own module, a deep copy and through pickle; within an epoch and between."""

    def run(loss, first, last):
        values = []
        for seed in range(first, last):
            loss.set_epoch(seed // 3)
            values.append(step(loss, seed))
        return values

    loss, loaded, nested = (make(name) for _ in range(3))
    run(loss, 0, stop)
    torch.save(loss.full_state(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    loaded.load_full_state(state)
    nn.ModuleDict({"loss": nested}).load_state_dict(nn.ModuleDict({"loss": loss}).state_dict())
    others = [loaded, nested, copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))]
    expected = run(loss, stop, stop + 5)
    for other in others:
        assert run(other, stop, stop + 5) == expected
        same_state(other.full_state(), loss.full_state())
    same_state(state, torch.load(tmp_path / "state.pt", weights_only=True))  # not trained in place


@ALL
def test_the_epoch_may_be_set_before_a_state_is_loaded(name):
    """As where a loop loads at the start of an epoch; the state is from the end of the one before."""
    loss, before, after = (make(name) for _ in range(3))
    for seed in range(3):
        step(loss, seed)
    before.set_epoch(1)
    for other in (before, after):
        other.load_full_state(loss.full_state())
    after.set_epoch(1)
    assert [step(before, seed) for seed in (3, 4)] == [step(after, seed) for seed in (3, 4)]


@pytest.mark.parametrize(
    "name, options, other, part",
    [
        ("neuclip", {}, {"npn_prototypes": 5}, "npn_prototypes"),
        ("neuclip", {}, {"npn_opt": "adam"}, "npn_opt"),
        ("neuclip", {}, {"npn_joint": True, "npn_restart_every": None}, "npn_joint"),
        ("neuclip", {}, {"normalizer": "batch", "encoder_objective": "compositional"}, "normalizer"),
        ("neuclip, mlp", {}, {"mlp_width": 1.0}, "mlp_width"),
        ("queue", {}, {"queue_size": 7}, "queue_size"),
        ("tempnet", {}, {"tau_net_prototypes": 3}, "tau_net_prototypes"),
        ("isogclr", {"tau_optimizer": "adam"}, {"tau_optimizer": "momentum"}, "tau_optimizer"),
        ("isogclr", {"tau_optimizer": "momentum"}, {"tau_optimizer": "adam"}, "tau_optimizer"),
        ("amorlip", {}, {"mlp_width": 1.0}, "mlp_width"),
        ("fastclip-v3", {}, {"num_samples": 9}, "table"),
        ("sogclr", {}, "isogclr", "temperature"), ("sogclr", {}, "tempnet", "temperature"),
        ("isogclr", {}, "sogclr", "temperature"), ("fastclip-v1", {}, "tuneclip", "surrogate"),
        ("sogclr", {"negatives": "both"}, "sogclr", "negatives"), ("cyclip", {}, "queue", "loss"),
        ("amorlip", {}, "queue", "loss"), ("queue", {}, "amorlip", "loss"),
    ],
    ids=str,
)  # fmt: skip
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(name, options, other, part):
    """Neither of a loss that has had batches nor of a new one, whose first call checks its input."""
    kept = {} if not isinstance(other, dict) or "normalizer" in other else LOSSES.get(name, {}) | options
    mine = {key: value for key, value in (kept | other).items() if value is not None} if isinstance(other, dict) else {}
    preset = other if isinstance(other, str) else name.split(",")[0]
    theirs = create_loss(preset, **{"num_samples": 8, "epochs": 3} | mine)
    theirs.set_epoch(0)
    step(theirs, 1)
    loss, twin, new = (make(name, **options) for _ in range(3))
    for one in (loss, twin):
        step(one)
    for one in (loss, new):
        with pytest.raises(ValueError, match=f"^{part}: "):
            one.load_full_state(theirs.full_state())
    with pytest.raises(ValueError):  # of before the first batch
        loss.load_full_state(new.full_state())
    assert step(loss, 2) == step(twin, 2) and step(loss, 3) == step(twin, 3)
    assert (new.steps, new.dimension) == (0, 0)


@pytest.mark.parametrize("num_samples", [9, 8])
def test_rows_in_files_that_do_not_fit_or_are_missing_change_nothing(tmp_path, num_samples):
    theirs = make("isogclr", num_samples=num_samples)
    step(theirs, 1)
    with rows_in_files(tmp_path / "rows"):
        state = theirs.full_state()
    if num_samples == 8:  # the second table
        (tmp_path / "rows/table_1_part_0_of_1.safetensors").unlink()
    loss, twin, new = (make("isogclr") for _ in range(3))
    for one in (loss, twin):
        step(one)
    for one in (loss, new):
        with rows_in_files(tmp_path / "rows"), pytest.raises((ValueError, InputError), match="shape|part_0_of_1"):
            one.load_full_state(state)
    assert step(loss, 2) == step(twin, 2) and step(loss, 3) == step(twin, 3)
    assert (new.steps, new.dimension) == (0, 0)


def test_a_state_without_networks_replaces_the_trained_ones():
    """Of AmorLIP, after an evaluation alone."""
    evaluated, trained, new = make("amorlip"), make("amorlip"), make("amorlip")
    with torch.no_grad():
        step(evaluated)
    for seed in range(3):
        step(trained, seed)
    for loss in (trained, new):
        loss.load_full_state(evaluated.full_state())
        loss.set_epoch(1)
    assert [step(trained, seed) for seed in range(3)] == [step(new, seed) for seed in range(3)]


def test_another_processes_state_and_another_format_are_refused():
    state = make("neuclip").full_state()
    for change, message in (
        ({"process": 1}, "state: process 1's, which has no tensors; load process 0's"),
        ({"format": 2}, "state: format 2 where this open_clip_ext reads format 1"),
        ({"format": None}, "state: an older format where this open_clip_ext reads format 1"),
    ):
        changed = {key: value for key, value in (state | change).items() if value is not None}
        with pytest.raises(ValueError, match=message):
            make("neuclip").load_full_state(changed)


def test_the_length_of_a_training_counts_after_loading_too():
    loss, other = make("neuclip"), make("neuclip")
    step(loss)
    other.load_full_state(loss.full_state())
    other.set_steps_per_pass(10, 4)
    (group,) = other.normalizer.network.optimizer.param_groups
    assert group["lr"] == pytest.approx((40 / 77_000) ** 0.5) and f"{group['lr']:.2g}" in other.description()


@ONE_OF_EACH
def test_a_state_without_some_of_its_tensors_is_refused(name):
    """torch.distributed.checkpoint loads the entries that a new loss's state has already, without a word."""
    loss, new = make(name), make(name)
    step(loss)
    saved, loaded = (other.state_dict()["_extra_state"] for other in (loss, new))
    if missing := saved.keys() - loaded.keys():
        with pytest.raises(ValueError, match=r"of its \d+ tensors; save it by torch\.save"):
            new.load_state_dict({"_extra_state": {key: saved[key] for key in loaded}})
        assert new.steps == 0
    assert bool(missing) == (name not in ("fastclip-v3", "isogclr", "cyclip"))


def test_row_files_are_checked_from_either_form_of_the_state(tmp_path):
    loss = make("fastclip-v3")
    step(loss)
    with rows_in_files(tmp_path / "rows"):
        state = loss.state_dict()
    index = tmp_path / "rows" / "index.json"
    for form in (state, state["_extra_state"]):
        check_row_files(tmp_path / "rows", form)
    index.write_text(json.dumps({**json.loads(index.read_text()), "save": "0"}))
    for form in (state, state["_extra_state"]):
        with pytest.raises(InputError, match=r"index\.json|of another save"):
            check_row_files(tmp_path / "rows", form)


# Batches that are not finite or not as they should be


@ALL
@pytest.mark.parametrize("where, good_steps", [("image_features", 0), ("logit_scale", 1), ("image_features", 5)])
def test_a_batch_that_is_not_finite_never_enters_the_state(name, where, good_steps):
    """During growth, at the very start, and later; what trains by itself stays where it is, and training goes on."""
    loss = make(name)
    for seed in range(good_steps):
        step(loss, seed)
    before = copy.deepcopy(loss.full_state())
    image, text, scale = features(good_steps)
    bad = image.detach().clone()
    bad[2] = math.nan
    given = (bad, text, scale) if where == "image_features" else (image, text, scale * math.nan)
    loss(*given, index=rows(good_steps))
    after = loss.full_state()
    if where == "logit_scale" and not loss.trains_logit_scale:  # the temperatures are the loss's own
        return loss.raise_if_not_finite()
    if good_steps:
        for key, value in before.items():
            if key.startswith(("state.log_u", "temperature.", "online:", "target:")) and value.is_floating_point():
                assert torch.equal(value, after[key]), key
    for seed in range(2):
        step(loss, seed)
    for key, value in loss.full_state().items():
        if isinstance(value, torch.Tensor) and not key.endswith("log_u"):
            assert value.isfinite().all() or key.startswith("diagnostics"), key
    if "state.weight" in after and "mlp" not in name:
        weight = loss.full_state()["state.weight"][:, : int(loss.full_state()["state.active"])]
        assert (weight.norm(dim=2) > 0.5).all(), "a prototype without a direction"
    with pytest.raises(NonFiniteError, match=f"step {good_steps + 1}: {where}"):
        loss.raise_if_not_finite()
    loss.raise_if_not_finite()  # a caller whose scaler has skipped the step goes on


def test_after_loading_a_state_training_goes_on_from_a_bad_step():
    loss = make("fastclip-v3")
    step(loss)
    good = copy.deepcopy(loss.state_dict())
    image, text, logit_scale = features()
    loss(image * float("nan"), text, logit_scale, index=rows())
    loss.load_state_dict(good)
    step(loss)
    loss.raise_if_not_finite()


@pytest.mark.parametrize("name", ["fastclip-v3", "cyclip", "amorlip"])
def test_one_later_batch_of_other_norms_is_found_at_the_next_look(name):
    """At the first batch at once, after which a caller who catches it may go on."""
    loss = make(name)
    image, text, logit_scale = features()
    with pytest.raises(ValueError, match="image_features must be unit vectors"):
        loss(3 * image, text, logit_scale, index=rows())
    for factor in (1, 1, 1.03, 1):
        loss(image, factor * text, logit_scale, index=rows())
        if factor == 1 and loss.steps < 3:
            loss.raise_if_not_finite()
    with pytest.raises(ValueError, match="^step 3: text_features must be unit vectors"):
        loss.raise_if_not_finite()
    loss.raise_if_not_finite()


def test_a_row_out_of_range_on_the_device_is_found_without_waiting_for_it(monkeypatch):
    """What a CUDA index meets: no check when called, nothing enters the table, an error at the next look."""
    good, loss = make("fastclip-v3"), make("fastclip-v3")
    monkeypatch.setattr(loss, "_check", lambda *args: None)
    given = features()
    gradients = [
        torch.autograd.grad(one(*given, index=torch.tensor([0, 1, 2, last])), given[:2])
        for one, last in ((good, 3), (loss, 8))
    ]
    torch.testing.assert_close(*gradients)  # of a step that the optimizer takes meanwhile
    assert (loss.full_state()["state.log_u"] == -math.inf).all()
    with pytest.raises(ValueError, match=r"index: step 1 has a row outside \[0, 8\)"):
        loss.raise_if_not_finite()


@pytest.mark.parametrize(
    "name, scale, warned",
    [("neuclip", 2.659, True), ("neuclip", 14.3, False), ("sogclr", 2.659, True), ("isogclr", 2.659, False)],
)
def test_a_logarithm_for_the_scale_is_pointed_out_once(name, scale, warned, caplog):
    """Not where the temperatures are the loss's own."""
    loss = make(name)
    caplog.clear()
    for seed in range(2):
        loss(*features(seed)[:2], torch.tensor(scale), index=rows())
    assert ["pass logit_scale.exp()" in record.message for record in caplog.records] == [True] * warned


WHOLE = torch.arange(4)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(index=None), "index: this loss has state per sample and needs"),
        (dict(index=WHOLE + 5), r"index: rows must lie in \[0, 8\); got 8"), (dict(index=WHOLE - 1), "got -1"),
        (dict(index=WHOLE.float()), "index must be int64"),
        (dict(index=WHOLE[:2]), r"index must be int64 of shape \(4,\)"),
        (dict(index=[0, 1, 2, 3]), r"index must be an int64 tensor of shape \(4,\); got list"),
        (dict(key=WHOLE.int()), "key must be int64 .* got torch.int32"),
        (dict(logit_scale=torch.ones(2)), "logit_scale must be one number"),
        (dict(logit_scale=torch.tensor(-14.3)), "logit_scale must be > 0, .* 1e[+]06; got -14.3"),
        (dict(logit_scale=1e10), "logit_scale must be > 0, as 1 / tau, and at most 1e[+]06; got 1e[+]10"),
        (dict(image_features=torch.eye(4, 8).long()), "image_features must be floating point; got torch.int64"),
        (dict(text_features=torch.zeros(3, 8)), "must both be"),
        (dict(image_features=torch.zeros(1, 8), text_features=torch.zeros(1, 8)), "batch of 1 .* no negatives"),
        (dict(image_features=torch.zeros(0, 8), text_features=torch.zeros(0, 8)), "batch of 0 .* no negatives"),
        (dict(image_features=2 * torch.ones(4, 8)), "image_features must be unit vectors"),
        (dict(dist_image_features=torch.ones(4, 5)), "has no use for either"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(change, message):
    image, text, scale = features()
    arguments = dict(image_features=image, text_features=text, logit_scale=scale, index=WHOLE)
    loss = make("fastclip-v3", validate=True)
    loss(**arguments)  # at a later call, too, as `validate` says
    with pytest.raises(ValueError, match=message):
        loss(**{**arguments, **change})


@pytest.mark.parametrize("name", ["neuclip", "queue", "tempnet", "amorlip", "fastclip-v3"])
def test_another_dimension_is_named(name):
    loss = make(name)
    step(loss)
    image, text, scale = features()
    other = nn.functional.normalize(image[:, :6], dim=1), nn.functional.normalize(text[:, :6], dim=1)
    with pytest.raises(ValueError, match="image_features: dimension 6 where the earlier batches had 8"):
        loss(*other, scale, index=rows())


def test_a_reference_and_keys_are_refused_where_they_are_needed_or_have_no_place():
    image, text, scale = features()
    first, second = (unit(torch.Generator().manual_seed(seed), 4, 5).float() for seed in range(2))
    for given, message in (
        ({}, "this loss needs both"), (dict(dist_image_features=first), "this loss needs both"),
        (dict(dist_image_features=first[:2], dist_text_features=second[:2]), r"must both be \(4, d'\)"),
        (dict(dist_image_features=2 * first, dist_text_features=second), "dist_image_features must be unit vectors"),
    ):
        with pytest.raises(ValueError, match=message):
            make("drrho-clip")(image, text, scale, index=rows(), **given)
    without_keys = (("neuclip", MLP), ("sogclr", dict(negatives="both")), ("cyclip", {}), ("amorlip", {}))
    for name, options in without_keys:
        with pytest.raises(ValueError, match="key: .* takes no keys"):
            create_loss(name, num_samples=8, epochs=1, **options)(image, text, scale, index=rows(), key=rows())
    for name, options in (*without_keys, ("siglip-chunked", {}), ("tuneclip", {})):
        with pytest.raises(ValueError, match="positive_key: .* takes no"):
            loss = create_loss(name, num_samples=8, epochs=1, **options)
            loss(image, text, scale, index=rows(), positive_key=rows())
    with pytest.raises(ValueError, match="positive_key: with a key"):
        make("sogclr")(image, text, scale, index=rows(), key=rows(), positive_key=rows())


@ONE_OF_EACH
def test_a_step_that_a_scaler_skips_updates_the_state_once(name):
    """Scaled gradients overflowed, but the batch was finite: the weights stay, the estimates know the batch."""
    loss, other = make(name), make(name)
    encoder = nn.Linear(3, 8)
    before, inputs, text = encoder.weight.detach().clone(), unit(torch.Generator(), 4, 3), features()[1].detach()
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
    image = nn.functional.normalize(encoder(inputs.float()), dim=1)
    other(image.detach().requires_grad_(), text, torch.tensor(20.0), index=rows())
    scaler.scale(1e3 * loss(image, text, torch.tensor(20.0), index=rows())).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**126 and torch.equal(encoder.weight, before)
    assert loss.steps == 1
    same_state(loss.full_state(), other.full_state())


def test_signs_of_a_lost_process(monkeypatch):
    """In the words of gloo, of the store and of NCCL, as PyTorch 2.14 has them; an error of one's own is none."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    for message in (
        "[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4077",
        "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\nLast "
        "error:\nsocketProgress: Connection closed by remote peer node-2<40211>",
        "NCCL communicator was aborted on rank 1.",
        "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=BROADCAST) ran for 7200011",
    ):
        assert lost_another_process(torch.distributed.DistBackendError(message)), message
    assert not lost_another_process(RuntimeError("CUDA error: an illegal memory access was encountered"))
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    loss = make("cyclip")
    for message, advised in (("Connection closed by peer", True), ("an illegal memory access", False)):
        monkeypatch.setattr(type(loss), "_value", lambda *_, text=message: (_ for _ in ()).throw(RuntimeError(text)))
        with pytest.raises(RuntimeError, match=message) as caught:
            step(loss)
        assert ("Another process has ended" in str(caught.value)) == advised
