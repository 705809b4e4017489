"""Zero-shot evaluation of checkpoints: the DataComp tasks, and classification of the user's own classes."""
