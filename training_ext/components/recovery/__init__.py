"""Recover the optimizer's statistics before a pretrained model is fine-tuned (TuneCLIP, Section 4.1)."""

from training_ext.components.recovery.component import Recovery

__all__ = ["Recovery"]
