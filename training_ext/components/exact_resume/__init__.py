"""Checkpoints within epochs, and a stop at one."""

from training_ext.components.exact_resume.component import ExactResume

__all__ = ["ExactResume"]
