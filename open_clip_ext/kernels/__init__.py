"""Kernels of the losses: they compute similarities block by block and never store the whole matrix."""
