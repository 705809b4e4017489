"""Train low-rank additions to a tower's linear maps instead of its weights (LoRA, `--lora-rank`)."""

from training_ext.components.lora.component import Lora

__all__ = ["Lora"]
