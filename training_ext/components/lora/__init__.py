"""Train low-rank additions to a tower's linear maps instead of its weights (LoRA, `--lora-rank`)."""
