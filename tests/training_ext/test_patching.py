"""Names of modules replaced for the duration of a block."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from training_ext.core.patching import look_up, replaced


@pytest.fixture
def module(monkeypatch):
    """A module that sees `tools`, which others see as well."""
    module = ModuleType("user_of_tools")
    module.tools = SimpleNamespace(save="save", load="load", deep=SimpleNamespace(a="a", b="b"))
    module.own = "own"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def put(**values: str):
    return replaced({("user_of_tools", path.replace("__", ".")): value for path, value in values.items()})


def seen(module) -> list[str]:
    return [module.own, module.tools.save, module.tools.load, module.tools.deep.a, module.tools.deep.b]


def test_only_the_module_sees_the_change_and_only_within_the_block(module):
    tools = module.tools
    with put(own="1", tools__save="2", tools__deep__a="3", tools__deep__b="4"):
        assert seen(module) == ["1", "2", "load", "3", "4"]
        assert (tools.save, tools.deep.a) == ("save", "a")
    assert seen(module) == ["own", "save", "load", "a", "b"] and module.tools is tools


def test_blocks_within_blocks(module):
    with put(own="1", tools__save="2", tools__deep__a="3"):
        with put(own="4", tools__save="5", tools__load="6", tools__deep__b="7"):
            assert seen(module) == ["4", "5", "6", "3", "7"]
        assert seen(module) == ["1", "2", "load", "3", "b"]
    assert seen(module) == ["own", "save", "load", "a", "b"]


def test_a_failure_restores_too(module):
    tools = module.tools
    with pytest.raises(KeyError), put(own="1", tools__save="2"):
        raise KeyError
    with pytest.raises(AttributeError), put(own="1", nothing__save="2"):
        pass
    assert seen(module) == ["own", "save", "load", "a", "b"] and module.tools is tools


def test_a_built_in_name_is_the_module_s_own_within_the_block(module):
    assert look_up("user_of_tools", "enumerate") is enumerate
    with put(enumerate="1"):
        assert look_up("user_of_tools", "enumerate") == module.enumerate == "1"
    assert look_up("user_of_tools", "enumerate") is enumerate and not hasattr(module, "enumerate")
