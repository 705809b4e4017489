"""Everything that touches OpenCLIP's training code; `seams.SEAMS` is the table of the names replaced in it."""
