"""An option is declared once: as a typed attribute of its part's class."""

import pytest

from open_clip_ext import InputError, create_loss
from open_clip_ext.factory import all_parts, options_of, parts_of, resolve_options
from open_clip_ext.normalizers import MLP, MovingAverageTable, Prototypes, Queue
from open_clip_ext.options import Derived, Part, default_value, option
from open_clip_ext.presets import PRESETS
from open_clip_ext.temperatures import IndividualTemperature, LearnableTemperature


class Base(Part):
    size: int | None = option(Derived("half of the epochs", lambda epochs: epochs // 2), "how large")
    kind: str = option("round", "which form", choices=("round", "square"))
    sharp: bool = option(False, "sharp edges")


class Sub(Base):
    kind = "square"
    share: "float" = option(0.5, "how much", valid=lambda value: 0 < value < 1, expected="in (0, 1)")


def test_options_are_collected_with_their_bases_and_taken_by_keyword():
    found = {one.name: (one.type, default_value(one.default, epochs=6)) for one in Sub.options}
    assert found == {"size": (int, 3), "kind": (str, "square"), "sharp": (bool, False), "share": (float, 0.5)}
    assert [one.default for one in Base.options if one.name == "kind"] == ["round"]
    part = Sub(size=4, share=1 / 4)
    assert (part.size, part.kind, part.sharp, part.share) == (4, "square", False, 0.25) and Sub().size is None
    with pytest.raises(TypeError, match="Queue has no option 'queue_sise'; did you mean 'queue_size'?"):
        Queue(queue_sise=4)


def test_parts_by_hand_and_losses_have_the_declared_defaults():
    """Those that follow from the epochs are filled in where these are known; what has no effect is None."""
    assert MovingAverageTable(4, gamma_schedule="constant").gamma == 0.2
    assert (LearnableTemperature().rho, IndividualTemperature(num_samples=4).rho) == (8.5, 6.0)
    assert Prototypes().restart_every == 500 and MLP().restart_every == 0
    names, cosine = ("gamma_decay_epochs", "tau_lr_epochs"), {"tau_lr_schedule": "cosine"}
    for name, given, epochs, expected in (
        ("fastclip-v2", cosine, 9, [4, 9]), ("fastclip-v2", cosine, None, [None] * 2), ("isogclr", {}, 9, [None] * 2)
    ):
        settings = resolve_options(name, given, epochs)
        assert [settings[name] for name in names] == expected
    for part in all_parts():
        for one in part.options:
            value = default_value(one.default, epochs=1)
            assert value is None or one.check(value) == value


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(share=1), "share: 1 is out of range; it must be in (0, 1)"),
        (dict(share="a"), "share: 'a' is not of type float"),
        (dict(size=1.5), "size: 1.5 is not of type int"),
        (dict(sharp="yes"), "sharp: 'yes' is not of type bool"),
        (dict(kind="sqare"), "kind: 'sqare' is not one of round, square; did you mean 'square'?"),
    ],
)
def test_a_wrong_value_is_named(options, message):
    with pytest.raises(InputError) as caught:
        Sub(**options)
    assert str(caught.value) == message and [caught.value.argument] == list(options)


def test_a_preset_states_only_what_differs():
    for name, preset in PRESETS.items():
        if not preset.is_open_clip:
            declared = {one.name: one.default for one in options_of(parts_of(name, vars(preset)))}
            assert not [key for key, value in preset.defaults.items() if declared[key] == value], name


@pytest.mark.parametrize(
    "name, settings, message",
    [
        ("neuclipp", {}, "loss: 'neuclipp' is not one of .*; did you mean 'neuclip'?"),
        ("neuclip", dict(normalizer="tabel"), "normalizer: 'tabel' is not one of .*; did you mean 'table'?"),
        ("neuclip", dict(npn_protoypes=4), "npn_protoypes: no loss has this setting; did you mean 'npn_prototypes'?"),
    ],
)
def test_what_was_meant_is_suggested(name, settings, message):
    with pytest.raises(InputError, match="^" + message.replace("?", r"\?$")):
        create_loss(name, **settings)


def test_two_parts_may_not_use_one_name_differently():
    class Other(Part):
        gamma: int = option(3, "something else")

    with pytest.raises(InputError, match="^gamma: .*Other has an option whose name another part uses otherwise"):
        options_of([MovingAverageTable, Other])
