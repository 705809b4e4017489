"""Everything that touches OpenCLIP's training code; `hooks.SEAMS` is the table of the names replaced in it."""
