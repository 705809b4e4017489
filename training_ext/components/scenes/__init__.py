"""Train and evaluate on generated scenes in place of a data set (`--dataset-type shapes`)."""
