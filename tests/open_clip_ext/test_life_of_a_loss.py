"""What happens to a loss beside training: evaluation first, other devices, copies, states that do not fit."""

import copy
import json
import pickle

import pytest
import torch
import torch.distributed as dist
from numerics import unit
from torch import nn

from open_clip_ext import InputError, create_loss
from open_clip_ext.batch import add_eps
from open_clip_ext.distributed import transportable
from open_clip_ext.losses.global_contrastive import GlobalContrastiveLoss
from open_clip_ext.normalizers import Normalizer
from open_clip_ext.objectives import Unified
from open_clip_ext.recovery import recover_statistics
from open_clip_ext.row_files import check_row_files, rows_in_files
from open_clip_ext.row_state import ShardedRows
from open_clip_ext.temperatures import FixedTemperature

LOSSES = {
    "fastclip-v3": {}, "isogclr": {"rho": 1.0}, "cyclip": {}, "amorlip": {}, "tempnet": {},
    "neuclip": {"npn_prototypes": 4}, "queue": {"queue_size": 6},
}  # fmt: skip


def make(name: str, **options):
    """A loss of 8 rows for batches of 4."""
    options = {"num_samples": 8, "epochs": 3} | LOSSES.get(name, {}) | options
    loss = create_loss(name, **{key: value for key, value in options.items() if value != "leave out"})
    loss.set_epoch(0)
    return loss


def features(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple:
    generator = torch.Generator().manual_seed(seed)
    image, text = (unit(generator, 4, 8).to(dtype).requires_grad_() for _ in range(2))
    return image, text, torch.tensor(20.0, dtype=dtype)


def step(loss, seed: int = 0) -> float:
    return loss(*features(seed), index=torch.arange(4)).item()


@pytest.mark.parametrize("name", [*LOSSES, "mlp"])
def test_an_evaluation_in_inference_mode_may_come_first(name):
    options = {"normalizer": "mlp", "npn_prototypes": "leave out"} if name == "mlp" else {}
    loss = make("neuclip" if name == "mlp" else name, **options)
    with torch.inference_mode():
        loss.eval()
        step(loss)
    loss.train()
    for seed in range(2):
        step(loss, seed)


@pytest.mark.parametrize(
    "name, options",
    [
        ("fastclip-v3", {}), ("fastclip-v2", {"gamma_schedule": "constant"}), ("amorlip", {}), ("tempnet", {}),
        ("isogclr", {"tau_lr_schedule": "cosine"}), ("queue", {"num_samples": 8, "queue_size": 4096}),
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


@pytest.mark.parametrize(
    "name, options",
    [("sogclr", {}), ("isogclr", {}), ("neuclip", {}), ("cyclip", {}), ("queue", {"num_samples": 1000})],
)
def test_other_losses_need_no_epoch(name, options):
    step(create_loss(name, **{"num_samples": 8, **LOSSES.get(name, {}), **options}))


@pytest.mark.parametrize("name", LOSSES)
def test_second_derivatives_are_refused(name):
    image, text, scale = features()
    value = make(name)(image, text, scale, index=torch.arange(4))
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(value, [image, text], create_graph=True)


@pytest.mark.parametrize("name", ["fastclip-v3", "isogclr"])
def test_rows_stay_float32_whatever_comes_first(name):
    for dtypes in ((torch.float32, torch.float64), (torch.float64, torch.float32)):
        loss = make(name)
        for dtype in dtypes:
            image, text, scale = features(dtype=dtype)
            assert loss(image, text, scale, index=torch.arange(4)).dtype == dtype
        tables = [module.rows for module in loss.modules() if isinstance(module, ShardedRows)]
        assert tables and all(rows.dtype == torch.float32 for rows in tables)


def test_a_number_as_logit_scale_keeps_the_features_precision():
    image, text, _ = features(dtype=torch.float64)
    loss = create_loss("neuclip", normalizer="batch", encoder_objective="compositional")
    assert loss(image, text, 1 / 0.07) == loss(image, text, torch.tensor(1 / 0.07, dtype=torch.float64))


@pytest.mark.parametrize("name", LOSSES)
def test_a_refused_state_changes_nothing(name):
    """Of another loss, and of a loss before its first batch."""
    loss, other, new = make(name), make("fastclip-v1" if name == "queue" else "queue"), make(name)
    step(loss)
    step(other)
    before = copy.deepcopy(loss.full_state())
    for state in (other.full_state(), new.full_state()):
        with pytest.raises(ValueError):
            loss.load_full_state(state)
        after = loss.full_state()
        assert before.keys() == after.keys()
        for key, value in before.items():
            assert torch.equal(after[key], value) if isinstance(value, torch.Tensor) else after[key] == value
    step(loss, 1)


@pytest.mark.parametrize(
    "name, options, other, part",
    [
        ("neuclip", {}, {"npn_prototypes": 5}, "npn_prototypes"),
        ("neuclip", {}, {"npn_opt": "adam"}, "npn_opt"),
        ("neuclip", {}, {"npn_joint": True}, "npn_joint"),
        ("neuclip", {"normalizer": "mlp", "npn_prototypes": "leave out"}, {"mlp_width": 1.0}, "mlp_width"),
        ("queue", {}, {"queue_size": 7}, "queue_size"),
        ("tempnet", {}, {"tau_net_prototypes": 3}, "tau_net_prototypes"),
        ("isogclr", {"tau_optimizer": "adam"}, {"tau_optimizer": "momentum"}, "tau_optimizer"),
        ("isogclr", {"tau_optimizer": "momentum"}, {"tau_optimizer": "adam"}, "tau_optimizer"),
        ("amorlip", {}, {"mlp_width": 1.0}, "mlp_width"),
        ("fastclip-v3", {}, {"num_samples": 9}, "table"),
    ],
)
def test_a_state_of_other_sizes_changes_nothing(name, options, other, part):
    """Neither of a loss that has had batches nor of a new one, whose first call checks its input."""
    theirs = make(name, **(options | other))
    step(theirs, 1)
    loss, twin, new = (make(name, **options) for _ in range(3))
    for one in (loss, twin):
        step(one)
    for one in (loss, new):
        with pytest.raises(ValueError, match=f"^{part}: "):
            one.load_full_state(theirs.full_state())
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


def test_a_state_that_did_not_fit_in_memory_is_allocated_again(monkeypatch):
    loss = make("queue")
    materialize = type(loss.normalizer).materialize
    monkeypatch.setattr(type(loss.normalizer), "materialize", lambda *_: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MemoryError):
        step(loss)
    monkeypatch.setattr(type(loss.normalizer), "materialize", materialize)
    assert step(loss) == step(make("queue"))


def fail(loss, seed: int = 0) -> None:
    """A step whose computation raises."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(type(loss), "compute", lambda *args, **kwargs: (_ for _ in ()).throw(MemoryError()))
        step(loss, seed)


@pytest.mark.parametrize("name", LOSSES)
def test_a_step_that_failed_may_be_tried_again(name):
    """The try begins a step; as a step's second call it would get the normalizers of the step before."""
    loss, twin = (make(name, accum_freq=2) for _ in range(2))
    for one in (loss, twin):
        for seed in (0, 0):
            step(one, seed)
    fail(loss, 1)
    assert [step(loss, 1) for _ in range(2)] == [step(twin, 1) for _ in range(2)]
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
        loss(2 * image.detach(), text, scale, index=torch.arange(4))


def test_an_evaluation_that_fails_does_not_end_a_step():
    loss = make("queue", accum_freq=2)
    step(loss)
    loss.eval()
    fail(loss)
    loss.train()
    step(loss)
    assert loss.steps == 1


@pytest.mark.parametrize("name", ["neuclip", "queue", "fastclip-v3"])
def test_rows_tell_a_group_from_the_next(name):
    """With a loss that keeps nothing per sample, too, if they are passed."""
    loss = make(name, accum_freq=2)
    loss(*features(0), index=torch.arange(4))
    with pytest.raises(ValueError, match="the 2 calls of a step"):
        loss(*features(1), index=torch.arange(4, 8))


@pytest.mark.parametrize("name", LOSSES)
def test_no_grad_with_a_scale_that_has_a_graph(name):
    loss = make(name, accum_freq=2)
    image, text, _ = features()
    scale = nn.Parameter(torch.tensor(3.0)).exp()
    with torch.no_grad():
        assert loss(image, text, scale, index=torch.arange(4)).isfinite()


@pytest.mark.parametrize(
    "of, into, part",
    [
        ({"name": "isogclr"}, {"name": "sogclr"}, "temperature"),
        ({"name": "tempnet"}, {"name": "sogclr"}, "temperature"),
        ({"name": "sogclr"}, {"name": "isogclr"}, "temperature"),
        ({"name": "tuneclip"}, {"name": "fastclip-v1"}, "surrogate"),
        ({"name": "sogclr"}, {"name": "sogclr", "negatives": "both"}, "negatives"),
    ],
)
def test_a_state_of_other_parts_is_refused_and_the_part_named(of, into, part):
    state = make(**of).full_state()
    with pytest.raises(ValueError, match=rf"^{part}: "):
        make(**into).load_full_state(state)


def test_a_table_of_another_size_is_refused_before_anything_is_lost():
    rows = ShardedRows(3, 1, 0.0)
    rows.assign(torch.tensor([1]), torch.tensor([[5.0]]))
    with pytest.raises(ValueError, match=r"shape \(4, 1\)"):
        rows.load(torch.zeros(4, 1))
    assert rows.gather().tolist() == [[0.0], [5.0], [0.0]]


def test_after_loading_a_state_training_goes_on_from_a_bad_step():
    loss = make("fastclip-v3")
    step(loss)
    good = copy.deepcopy(loss.state_dict())
    image, text, logit_scale = features()
    loss(image * float("nan"), text, logit_scale, index=torch.arange(4))
    loss.load_state_dict(good)
    step(loss)
    loss.raise_if_not_finite()


def test_a_caller_who_catches_wrong_norms_may_go_on():
    loss = make("fastclip-v3")
    image, text, logit_scale = features()
    with pytest.raises(ValueError, match="image_features must be unit vectors"):
        loss(3 * image, text, logit_scale, index=torch.arange(4))
    step(loss)


@pytest.mark.parametrize("name", ["neuclip", "queue", "tempnet", "amorlip", "fastclip-v3"])
def test_another_dimension_is_named(name):
    loss = make(name)
    step(loss)
    image, text, logit_scale = features()
    other = nn.functional.normalize(image[:, :6], dim=1), nn.functional.normalize(text[:, :6], dim=1)
    with pytest.raises(ValueError, match="image_features: dimension 6 where the earlier batches had 8"):
        loss(*other, logit_scale, index=torch.arange(4))


def test_rows_go_where_the_first_batch_is():
    """The device "meta" stands for a GPU; it has no values, so a step fails after the move."""
    loss = make("fastclip-v3", accum_freq=1)
    loss._adapt(8, torch.device("meta"), torch.float32)
    assert {buffer.device.type for buffer in loss.buffers()} == {"meta"}


@pytest.mark.parametrize("options", [{"normalizer": "mlp", "npn_prototypes": "leave out"}, {"npn_joint": True}, {}])
def test_a_deep_copy_trains_as_the_original(options):
    loss = make("neuclip", **options)
    step(loss)
    twin = copy.deepcopy(loss)
    for seed in (1, 2):
        assert step(twin, seed) == step(loss, seed)


@pytest.mark.parametrize("options", [{"normalizer": "mlp", "npn_prototypes": "leave out"}, {"npn_joint": True}, {}])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_loss_goes_through_pickle(options, steps):
    loss = make("neuclip", **options)
    for seed in range(steps):
        step(loss, seed)
    twin = pickle.loads(pickle.dumps(loss))
    for seed in (2, 3, 4):
        assert step(twin, seed) == step(loss, seed)


@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.bfloat16])
@pytest.mark.parametrize("name", [*LOSSES, "mlp"])
def test_a_model_that_is_converted_to_16_bits_leaves_its_loss_in_float32(name, convert):
    """Before the first batch and later; the loss trains on as if nothing had happened."""
    options = {"normalizer": "mlp", "npn_prototypes": "leave out"} if name == "mlp" else {}
    losses = [make("neuclip" if name == "mlp" else name, **options) for _ in range(2)]
    model = nn.ModuleDict({"tower": nn.Linear(2, 2), "loss": losses[0]})
    for seed in range(4):
        if seed in (0, 2):
            assert convert(model)["tower"].weight.itemsize == 2
        first, second = (step(loss, seed) for loss in losses)
        assert first == second
    states = [loss.full_state() for loss in losses]
    for key, value in states[1].items():
        assert not isinstance(value, torch.Tensor) or torch.equal(states[0][key], value), key


def test_another_processes_state_is_refused():
    loss, other = make("neuclip"), make("neuclip")
    step(loss)
    with pytest.raises(ValueError, match="state: process 1's, which has no tensors; load process 0's"):
        other.load_full_state({**loss.full_state(), "process": 1})


def test_a_network_for_each_view_cannot_share_a_temperature():
    with pytest.raises(InputError, match="negatives: 'views' with temperature 'network'"):
        make("tempnet", negatives="views")


def test_keys_of_overwritten_embeddings_are_forgotten():
    def keys_after(last: bool) -> list[int]:
        loss = create_loss("queue", queue_size=8)
        for seed in range(3):
            key = None if seed == 2 and not last else torch.arange(4) + 4 * seed
            loss(*features(seed), key=key)
        return loss.normalizer.ring.keys.tolist()

    assert sorted(keys_after(True)) == [4, 5, 6, 7, 8, 9, 10, 11]
    without = keys_after(False)
    assert [key for key in without if key >= 0] == [4, 5, 6, 7] and len(set(without)) == 8


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


@pytest.mark.parametrize("accum_freq", [1, 2, 3])
def test_a_normalizers_parameters_get_one_gradient_per_step(accum_freq):
    loss = GlobalContrastiveLoss(Biased(), FixedTemperature(), Unified, accum_freq=accum_freq)
    loss.set_epoch(0)
    for _ in range(accum_freq):
        loss(*features()).backward()
    once = GlobalContrastiveLoss(Biased(), FixedTemperature(), Unified)
    once(*features()).backward()
    torch.testing.assert_close(loss.normalizer.bias.grad, once.normalizer.bias.grad)


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("isogclr", dict(tau_min=0.5, tau_max=0.1), "tau_max: 0.1 is below tau_min"),
        ("isogclr", dict(tau_start=5.0), "tau_start: 5 is above tau_max"),
        ("isogclr", dict(tau_start=1e-4), "tau_start: 0.0001 is below tau_min"),
        ("fastclip-v3", dict(accum_freq=0), "accum_freq: 0 must be an integer of at least 1"),
        ("fastclip-v3", dict(accum_freq=1.5), "accum_freq: 1.5 must be"),
        ("fastclip-v3", dict(epochs=0), "epochs: 0 must be"),
        ("drrho-clip", dict(epochs=-1), "epochs: -1 must be"),
        ("neuclip", dict(steps_per_epoch=0), "steps_per_epoch: 0 must be"),
        ("neuclip", dict(num_samples=0), "num_samples: 0 must be"),
        ("queue", dict(num_samples=-3), "num_samples: -3 must be"),
        ("fastclip-v3", dict(gamma=True), "gamma: True is not of type float"),
        ("neuclip", dict(npn_prototypes=True), "npn_prototypes: True is not of type int"),
        ("drrho-clip", dict(epochs=None, gamma_decay_epochs=10), "gamma: .* by default; give it, or the number of"),
    ],
)  # fmt: skip
def test_lengths_and_values_out_of_range_are_named(name, options, message):
    with pytest.raises(InputError, match=message):
        create_loss(name, **({"num_samples": 8, "epochs": 3} | options))


def test_the_length_of_a_training_counts_after_loading_too():
    loss = make("neuclip")
    step(loss)
    other = make("neuclip")
    other.load_full_state(loss.full_state())
    other.set_steps_per_pass(10, 4)
    (group,) = other.normalizer.network.optimizer.param_groups
    assert group["lr"] == pytest.approx((40 / 77_000) ** 0.5) and f"{group['lr']:.2g}" in other.description()


def test_a_recovery_that_is_refused_leaves_the_weights():
    model = nn.Linear(2, 2)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def move(batch):
        for group in optimizer.param_groups:
            group["lr"] = 0.1
        model(batch).sum().backward()
        optimizer.step()

    with pytest.raises(InputError, match="it sets a learning rate"):
        recover_statistics(model, optimizer, None, [torch.ones(3, 2)], epochs=1, step=move)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_row_files_are_checked_from_either_form_of_the_state(tmp_path):
    loss = make("fastclip-v3")
    step(loss)
    with rows_in_files(tmp_path / "rows"):
        state = loss.state_dict()
    check_row_files(tmp_path / "rows", state)
    check_row_files(tmp_path / "rows", state["_extra_state"])
    index = tmp_path / "rows" / "index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "save": "0"}))
    with pytest.raises(InputError, match=r"index\.json|of another save"):
        check_row_files(tmp_path / "rows", state)


def test_an_index_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    from open_clip_ext import row_files

    whole_file = row_files.whole_file

    def full_disk(path, **options):
        if str(path).endswith("index.json"):
            raise OSError(28, "No space left on device")
        return whole_file(path, **options)

    monkeypatch.setattr(row_files, "whole_file", full_disk)
    loss = make("fastclip-v3")
    message = r"index\.json' cannot be written: No space left"
    with pytest.raises(InputError, match=message), rows_in_files(tmp_path / "x"):
        loss.state_dict()
    assert not (tmp_path / "x").exists()


def test_what_the_process_group_cannot_send_moves(monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda: "meta:other")  # as "cuda:nccl"
    assert transportable(torch.zeros(2)).device.type == "meta"
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    assert transportable(torch.zeros(2)).device.type == "cpu"
