"""Measurements: mlxgen and mlx-lm alternately in one run, on the same weights. `make bench` runs them all."""
