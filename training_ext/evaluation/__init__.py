"""Scores of a model: the DataComp tasks and zero-shot classification of one's own classes."""
