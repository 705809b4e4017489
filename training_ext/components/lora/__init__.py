"""Low-rank additions to the linear maps of a tower (LoRA)."""

from training_ext.components.lora.component import Lora

__all__ = ["Lora"]
