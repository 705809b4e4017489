"""Recovery of optimizer statistics (TuneCLIP, Section 4.1): its epochs and the file of the recovered statistics."""
