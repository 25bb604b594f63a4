"""Products of matrices with what comes after them, in one pass."""

from zinf_kernels.tiled_matmul.api import matmul, obstacles
from zinf_kernels.tiled_matmul.epilogue import Epilogue

__all__ = ["Epilogue", "matmul", "obstacles"]
