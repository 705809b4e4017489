"""Temperature schemes: fixed, learned, or one temperature per image and per text."""

from open_clip_ext.temperatures.base import (
    RHO,
    FixedLogitScale,
    FixedTemperature,
    LearnableTemperature,
    LearnedLogitScale,
    Temperature,
    UnscaledTemperature,
)
from open_clip_ext.temperatures.individual import IndividualTemperature
from open_clip_ext.temperatures.tempnet import NetworkTemperature

TEMPERATURES = {
    scheme.name: scheme
    for scheme in (
        FixedTemperature, LearnableTemperature, UnscaledTemperature, IndividualTemperature, NetworkTemperature
    )
}

__all__ = [
    "RHO", "TEMPERATURES", "FixedLogitScale", "FixedTemperature", "IndividualTemperature", "LearnableTemperature",
    "LearnedLogitScale", "NetworkTemperature", "Temperature", "UnscaledTemperature",
]  # fmt: skip
