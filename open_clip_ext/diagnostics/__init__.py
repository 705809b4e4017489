"""How far the estimated log-normalizers are from the true ones, while training and afterwards."""
