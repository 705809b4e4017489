"""The recovery of statistics in a loop of one's own is that of the command."""

from pathlib import Path

import open_clip
import pytest
import torch
from conftest import DEVICE

from open_clip_ext import create_loss, recover_statistics
from training_ext.core.rows import RowLoader, pair_of

EPOCHS = 1.5  # of 6 steps
FLAGS = f"--lr 1e-3 --osr-epochs {EPOCHS} --epochs 1 --workers 0"


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "weights.pt"
    torch.save(open_clip.create_model("ViT-test").state_dict(), path)
    return path


@pytest.mark.skipif("cuda" in DEVICE, reason="the loop is on a CPU, whose sums round otherwise")
@pytest.mark.parametrize("loss_name", ["tuneclip", "fastclip-v2"])
def test_moments_and_table_are_the_commands(run, datasets, weights, monkeypatch, tmp_path, loss_name):
    """fastclip-v2 also keeps temperatures, which stand still while their moments move."""
    epochs = []
    original = RowLoader.__iter__

    def recorded(self):
        epochs.append([])
        for batch in original(self):
            epochs[-1].append((*(part.clone() for part in pair_of(batch)), self.latest()["index"].clone()))
            yield batch

    monkeypatch.setattr(RowLoader, "__iter__", recorded)
    path = tmp_path / "recovered.state"
    run("x", f"{datasets['shapes']} --loss {loss_name} --pretrained {weights} --osr-save {path} {FLAGS}")
    command = torch.load(path, "cpu", weights_only=True)

    model = open_clip.create_model("ViT-test", pretrained=str(weights))
    model.logit_scale.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.98), eps=1e-6)
    loss = create_loss(loss_name, num_samples=48, epochs=3)

    class Data:
        """Each pass gives the batches of the command's."""

        passes = iter(epochs)

        def __len__(self):
            return 6

        def __iter__(self):
            return iter(next(self.passes))

    assert recover_statistics(model, optimizer, loss, Data(), epochs=EPOCHS) == 2
    names = {parameter: name for name, parameter in model.named_parameters()}
    own = {names[parameter]: state for parameter, state in optimizer.state.items()}
    assert own.keys() == command["moments"].keys()
    for name, state in own.items():
        assert state["step"] == command["moments"][name]["step"] == 9
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[moment], command["moments"][name][moment]), (name, moment)
    state = loss.full_state()
    assert state.keys() == command["loss_state"].keys()
    for name, value in state.items():
        theirs = command["loss_state"][name]
        assert torch.equal(value, theirs) if torch.is_tensor(value) else value == theirs, name
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
