"""Save checkpoints within an epoch, stop at one on a signal, and resume from it to the last bit."""

from training_ext.components.exact_resume.component import ExactResume

__all__ = ["ExactResume"]
