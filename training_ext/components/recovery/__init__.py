"""Recover the optimizer's statistics before a pretrained model is fine-tuned (TuneCLIP, Section 4.1)."""
