"""OpenCLIP as it is installed: its versions, launch, names to replace, files and models."""
