"""What a training can do besides: each capability in a file or folder of its own."""
