"""An option is declared once: as a typed attribute of its part's class."""

import pytest

from open_clip_ext import InputError, create_loss
from open_clip_ext.factory import all_parts, options_of, parts_of, resolve_options
from open_clip_ext.normalizers import MLP, MovingAverageTable, Normalizer, Prototypes, Queue
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


def test_options_are_collected_with_their_bases():
    found = {one.name: (one.type, default_value(one.default, epochs=6)) for one in Sub.options}
    assert found == {"size": (int, 3), "kind": (str, "square"), "sharp": (bool, False), "share": (float, 0.5)}
    assert [one.default for one in Base.options if one.name == "kind"] == ["round"]


def test_the_constructor_takes_them_by_keyword():
    part = Sub(size=4, share=1 / 4)
    assert (part.size, part.kind, part.sharp, part.share) == (4, "square", False, 0.25)
    assert Sub().size is None


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


def test_an_unknown_keyword_is_named():
    with pytest.raises(TypeError, match="Queue has no option 'queue_sise'; did you mean 'queue_size'?"):
        Queue(queue_sise=4)


def test_a_normalizer_without_a_constructor():
    class Shifted(Normalizer):
        shift: float = option(0.5, "what is added")

    assert Shifted().shift == 0.5 and Shifted(shift=0.25).shift == 0.25


def test_parts_by_hand_have_the_declared_defaults():
    assert MovingAverageTable(4, gamma_schedule="constant").gamma == 0.2
    assert (LearnableTemperature().rho, IndividualTemperature(num_samples=4).rho) == (8.5, 6.0)
    assert Prototypes().restart_every == 500 and MLP().restart_every == 0
    with pytest.raises(InputError, match="^gamma_decay_epochs: the cosine of gamma needs its length"):
        MovingAverageTable(num_samples=4)


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if not preset.is_open_clip])
def test_a_preset_states_only_what_differs(name):
    preset = PRESETS[name]
    parts = parts_of(name, vars(preset))
    declared = {one.name: one.default for one in options_of(parts)}
    for key, value in preset.defaults.items():
        assert declared[key] != value, key


@pytest.mark.parametrize("part", all_parts())
def test_declared_defaults_are_valid(part):
    for one in part.options:
        value = default_value(one.default, epochs=1)
        assert value is None or one.check(value) == value


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


def test_epochs_fill_in_what_follows_from_them():
    names = "gamma_decay_epochs", "tau_lr_epochs"
    known, unknown = (
        resolve_options("fastclip-v2", {"tau_lr_schedule": "cosine"}, epochs) for epochs in (9, None)
    )
    assert [known[name] for name in names] == [4, 9] and [unknown[name] for name in names] == [None, None]


def test_what_has_no_effect_is_none():
    settings = resolve_options("isogclr", {}, epochs=9)
    assert settings["gamma_decay_epochs"] is settings["tau_lr_epochs"] is None


def test_two_parts_may_not_use_one_name_differently():
    class Other(Part):
        gamma: int = option(3, "something else")

    with pytest.raises(InputError, match="^gamma: .*Other has an option whose name another part uses otherwise"):
        options_of([MovingAverageTable, Other])


def test_the_command_prints_the_flag(capsys):
    from open_clip_ext.main import exit_code

    def wrong():
        Queue(queue_size=0)

    assert exit_code(wrong) == 2
    assert capsys.readouterr().err == "open_clip_ext: error: --queue-size: 0 is out of range; it must be at least 1\n"
