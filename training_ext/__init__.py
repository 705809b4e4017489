"""Everything that touches OpenCLIP's training code. `hooks.SEAMS` is the one table of what is replaced in it."""
