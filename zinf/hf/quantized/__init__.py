"""Quantized weights of published checkpoints as plain ones, part by part.

| `quant_method` | read are |
|---|---|
| `fp8` | float8 numbers in blocks, as DeepSeek-V3 has them |
| `mxfp4` | experts of gpt-oss |
| `gptq` | 2, 4 or 8 bits in groups of inputs, also sorted ones (`desc_act`) |
| `awq` | 4 bits in groups of inputs, of the version `gemm` |
| `compressed-tensors` | ints of 2, 4 and 8 bits, float8, nvfp4 and mxfp4 |
| `modelopt` | NVFP4, and float8 with one scale |
| `bitsandbytes` | nf4, fp4, with absmax in 8 bits too; LLM.int8 |

A method is a module here with a `find`, and a row in `METHODS`. If weights stay in few
bits, it also says which ones do by config.json alone (`Keeping`).
"""

from zinf.hf.quantized.methods import METHODS as METHODS
from zinf.hf.quantized.methods import plain as plain
from zinf.hf.quantized.methods import refusal as refusal
