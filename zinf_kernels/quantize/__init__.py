"""Arrays in blocks of 8 or 4 bits, each block with a scale of its own."""

from zinf_kernels.quantize.api import dequantize, obstacles, quantize
from zinf_kernels.quantize.blocks import Quantized

__all__ = ["Quantized", "dequantize", "obstacles", "quantize"]
