"""Recovery of optimizer statistics (TuneCLIP, Section 4.1): its epochs and the file of the recovered statistics."""

from training_ext.components.recovery.component import Recovery

__all__ = ["Recovery"]
