"""Which settings of which presets are tried: each preset's defaults, and every choice that a flag offers."""

from typing import Any

from open_clip_ext import create_loss, list_losses
from open_clip_ext.errors import InputError
from open_clip_ext.factory import PARTS, all_options
from open_clip_ext.options import Derived

SMALL: dict[str, dict[str, Any]] = {
    "neuclip": {"npn_prototypes": 150, "npn_updates": 2, "npn_restart_every": 2},  # more than a batch of 8 processes
    "queue": {"queue_size": 150},
    "amorlip": {"amor_online_every": 2},
    "tempnet": {"tau_net_prototypes": 4},
}
# Whose flags are varied; of the others, which are made of the same parts, the defaults alone are tried.
VARIED = ("fastclip-v2", "neuclip", "amorlip", "siglip-chunked")
PRESETS = [preset.name for preset in list_losses() if not preset.is_open_clip]
Choice = tuple[str, Any]


def choices() -> list[Choice]:
    """Every choice that a flag offers: the parts, the options with named values, and those that are on or off."""
    parts = [(part, name) for part, classes in PARTS.items() for name in classes]
    options = [option for option in all_options() if option.name != "rows_on"]  # tried with every loss that has rows
    named = [(option.name, value) for option in options for value in option.choices]
    switches = [(option.name, value) for option in options if option.type is bool for value in (False, True)]
    return [*parts, *named, *switches]


def variations(preset: str) -> list[dict[str, Any]]:
    """Settings to try: the preset's defaults, then each choice that it takes once, as many at a time as go together."""
    small = SMALL.get(preset, {})
    tried = [small]
    for name, value in choices() if preset in VARIED else []:
        # Into an earlier one, or a new one, without settings of the part that it replaces.
        for given in (*(earlier for earlier in tried[1:] if name not in earlier), dict(small), {}):
            if _fits(preset, given | {name: value}):
                given[name] = value
                if not any(given is earlier for earlier in tried):
                    tried.append(given)
                break
    return tried


def _fits(preset: str, settings: dict[str, Any]) -> bool:
    try:
        create_loss(preset, num_samples=300, epochs=4, **settings)
    except (InputError, TypeError):
        return False
    return True


def is_default(name: str, value: Any) -> bool:
    """Whether a choice is some preset's default, and so tried with it."""
    options = {option.name: option for option in all_options()}
    defaults = [preset.defaults.get(name) for preset in list_losses()]
    defaults += [getattr(preset, name, None) for preset in list_losses()]
    defaults += [options[name].default] if name in options else []
    return value in [default for default in defaults if not isinstance(default, Derived)]
