"""Leave out samples that cannot be used, count them, and end the run if they are too many (`--max-bad-samples`)."""
