"""Train the image or the text tower with a learning rate of its own (`--lr-image`, `--lr-text`)."""

from typing import Any

from torch import nn

from open_clip_ext.errors import InputError
from open_clip_ext.options import flag_of, option, positive
from training_ext.core.component import Component

# First words of the parameters' names; the text tower of OpenCLIP's class CLIP has no module of its own.
TOWERS = {
    "lr_image": ("visual.",),
    "lr_text": ("text", "token_embedding", "positional_embedding", "transformer", "ln_final"),
}


class TowerRates(Component):
    """Trains a tower with a learning rate of its own.

    Every group of OpenCLIP's is split into image tower, text tower and the rest: temperature, bias and heads, whose
    rate remains. A tower's rate over --lr is a factor of the schedule, beside that of OpenCLIP 4's layer decay.
    """

    name = "tower_rates"
    lr_image: float | None = option(
        None, "learning rate of the image tower, instead of --lr", valid=positive,
        expected="a number > 0; for none give --lock-image",
    )  # fmt: skip
    lr_text: float | None = option(
        None, "learning rate of the text tower, instead of --lr", valid=positive,
        expected="a number > 0; for none give --lock-text",
    )  # fmt: skip

    def check(self) -> None:
        args = self.args
        for rate in self._given():
            lock = rate.replace("lr_", "lock_")
            unlocked = [name for name in vars(args) if name.startswith(f"{lock}_unlocked_") and getattr(args, name)]
            if getattr(args, lock, False) and not unlocked:
                raise InputError(f"has no effect with {flag_of(lock)}; leave one of the two out", rate)
            if args.lr == 0:
                raise InputError("has no effect with --lr 0, whose schedule it follows; give another", rate)

    def _given(self) -> list[str]:
        return [rate for rate in TOWERS if getattr(self, rate) is not None]

    def wanted(self) -> bool:
        return bool(self._given())

    def param_groups(self, groups: list[dict[str, Any]], names: dict[nn.Parameter, str]) -> list[dict[str, Any]]:
        split = []
        for group in groups:
            rest = group["params"]
            for rate, prefixes in TOWERS.items():
                factor = (getattr(self, rate) or self.args.lr) / self.args.lr
                params = [parameter for parameter in rest if names[parameter].startswith(prefixes)]
                rest = [parameter for parameter in rest if not names[parameter].startswith(prefixes)]
                scale = factor * group.get("lr_scale", 1.0)
                split.append({**group, "params": params, "lr": factor * group["lr"], "lr_scale": scale})
            split.append({**group, "params": rest})
        return [group for group in split if group["params"]]
