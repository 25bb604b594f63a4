"""Matmuls, with a bias and an array added before the one rounding."""

from zinf_kernels.tiled_matmul.api import matmul, obstacles

__all__ = ["matmul", "obstacles"]
