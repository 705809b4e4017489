"""Everything that touches OpenCLIP's training code; `--seams` prints the names that a run replaces in it."""
