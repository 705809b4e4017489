"""The extension itself: trains with a loss of this package in OpenCLIP's unchanged loop, and resumes by epoch.

Everything else that a training can do is a component, see `component`.
"""
