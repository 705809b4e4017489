"""What a training with one of the losses needs: rows, the loss, its temperature, and its state in checkpoints."""
