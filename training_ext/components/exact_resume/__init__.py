"""Save checkpoints within an epoch, stop at one on a signal, and resume from it to the last bit."""
