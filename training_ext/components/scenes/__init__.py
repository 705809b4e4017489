"""Train and evaluate on generated scenes in place of a data set (`--dataset-type shapes`)."""

from training_ext.components.scenes.component import GeneratedScenes

__all__ = ["GeneratedScenes"]
