"""OpenCLIP as it is installed: launch, safe reading of its files and models, and its failures in one line."""
