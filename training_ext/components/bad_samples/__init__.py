"""Samples that cannot be used: left out and counted, within a limit."""

from training_ext.components.bad_samples.component import BadSamples

__all__ = ["BadSamples"]
