"""Data and files of a training with all features: rows, readers, the loss in OpenCLIP's loop, checkpoints."""
