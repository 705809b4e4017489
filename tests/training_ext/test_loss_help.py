"""`--loss NAME --help`: the flags of that loss alone, with the values that it would use."""

import re

import pytest

from open_clip_ext.factory import all_options, list_losses, options_of, parts_of, resolve_options
from open_clip_ext.main import main
from open_clip_ext.options import flag_of

FLAG = r"(?<![\w-])--[a-z][a-z0-9-]*"


@pytest.fixture
def shown(capsys, monkeypatch):
    """shown(arguments) -> what the command prints."""
    monkeypatch.setenv("COLUMNS", "120")

    def shown(arguments: str) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main(arguments.split())
        assert left.value.code in (0, None)
        return capsys.readouterr().out

    return shown


@pytest.mark.parametrize("name", [preset.name for preset in list_losses()])
def test_a_loss_and_its_values(shown, name):
    text = shown(f"--loss {name} --help")
    settings = resolve_options(name, {}, None)
    own = options_of(parts_of(name, settings))
    for option in all_options():
        assert (option.flag in re.findall(FLAG, text)) == (option in own or option.name in settings), option.flag
    for key, value in settings.items():
        row = re.search(rf"^ *{flag_of(key)} +(\S+) ", text, re.MULTILINE)
        if row and value is not None and not isinstance(value, bool):
            assert row[1] == str(value), key
    assert len(text.splitlines()) <= 40
    assert "--train-data" not in text and "--help all" in text


def test_what_follows_from_the_epochs(shown):
    words = shown("--help --loss fastclip-v3")
    assert "--gamma-decay-epochs  " in words and "(default: half of the epochs)" in words
    assert "--gamma-decay-epochs 15 " in shown("--loss fastclip-v3 --epochs 30 -h")
    assert "--rho-annealed-from 10 " in shown("--loss amorlip-released --help --epochs 30")


def test_beside_other_flags(shown):
    text = shown("--loss neuclip --normalizer mlp --npn-joint --help")
    assert "--npn-opt adamw " in text and "--npn-prototypes" not in text
    assert re.search(r"no effect with .*--npn-updates", text)


def test_all_flags_show_no_default_that_a_loss_changes(shown):
    text = " ".join(shown("--help all").split())
    for name in ("gamma", "rho", "amor-denominator", "tau-min"):
        row = re.search(rf" --{name} [A-Z{{].*? --[a-z]", text)[0]
        assert "(default: per loss" in row and row.count("(default: ") == 1
    assert re.search(r"--queue-size INT .*?\(default: 4096\)", text)
    assert re.search(r"--npn-lr FLOAT .*?\(default: 1.0 for prototypes with adagrad, sqrt.* else 1e-3\)", text)
    assert "--train-data" in text


def test_the_first_lines_and_the_groups(shown):
    text = shown("--help all")
    assert "--loss NAME" in text.splitlines()[0]
    assert len(text.partition("OpenCLIP's flags:")[0].splitlines()) < 250
    headings = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    assert headings[:2] == ["which training", "data"] and headings[-1] == "OpenCLIP's flags"
    for option in all_options():
        assert len(re.findall(rf"^  {option.flag}\b(?!-)", text, re.MULTILINE)) == 1


def test_two_screens_lead_to_every_flag(shown, monkeypatch):
    """Each flag is shown once, by --help or under one of the topics that it names."""
    first = shown("--help")
    screens = [first, *(shown(f"--help {topic}") for topic in re.findall(r"--help (\w+)", first) if topic != "all")]

    def flags(text: str) -> list[str]:
        return re.findall(r"^  (?:-h, )?(--[\w-]+)", text.partition("more help:")[0], re.MULTILINE)

    assert sorted(sum(map(flags, screens), [])) == sorted(flags(shown("--help all")))
    monkeypatch.setenv("COLUMNS", "80")
    assert len(shown("--help").splitlines()) <= 90


def test_an_unknown_topic_of_the_help(refused):
    assert "--help: no topic is called 'lara'; did you mean 'lora'?" in refused("--help lara")


def test_a_recipe_is_a_line(shown):
    lines = shown("--list-recipes").splitlines()
    assert sum(line.startswith("neuclip-cc12m  ") for line in lines) == 1 and "--recipe NAME --dry-run" in lines[-1]
    assert max(map(len, lines)) <= 120
