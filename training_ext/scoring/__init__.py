"""Score a model on data sets of images: classification and retrieval, in a training or by a command."""
