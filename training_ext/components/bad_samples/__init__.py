"""Leave out samples that cannot be used, count them, and end the run if they are too many (`--max-bad-samples`)."""

from training_ext.components.bad_samples.component import BadSamples

__all__ = ["BadSamples"]
