"""Zero-shot evaluation of checkpoints: the DataComp tasks, and the user's own classes and pairs."""
