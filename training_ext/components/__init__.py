"""Components of a training, one in each module or folder; a training without one's flags also runs without its file."""
