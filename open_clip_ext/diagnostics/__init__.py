"""Error of the estimated log-normalizers, during training and afterwards."""
