"""Records quantized weights as other libraries write and read them, for tests.

    python scripts/reports/record_quantized.py AUTO_GPTQ_SOURCE AUTOAWQ_SOURCE [OUT]

Needs torch, transformers, compressed-tensors (0.20.1 was recorded) and bitsandbytes
(0.50.2), and the sources of auto-gptq (0.7.1) and AutoAWQ (0.2.9), of which one file
each is executed: `auto_gptq/nn_modules/qlinear/qlinear_cuda.py` and
`awq/utils/packing_utils.py`. OUT is `tests/unit/hf/quantized.npz` unless given.

For each case: the tensors that a file has of the weight `layer.weight`, the section
quantization_config as JSON, and the plain weight as the library reads it.
"""

import importlib.util
import json
import sys
from pathlib import Path

import bitsandbytes as bnb
import numpy as np
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

OUTPUTS, INPUTS, GROUP = 32, 64, 32
DEFAULT_OUT = Path(__file__).parents[2] / "tests/unit/hf/quantized.npz"
NAME = "layer.weight"


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def draw(seed: int, outputs: int = OUTPUTS, inputs: int = INPUTS) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))


def grid(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and codes of 0 of each group [outputs, groups], asymmetric."""
    groups = weight.reshape(OUTPUTS, -1, GROUP)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = (high - low) / (2**bits - 1)
    return scales, torch.round(-low / scales)


def gptq(source: Path):
    linear_class = load(
        source / "auto_gptq/nn_modules/qlinear/qlinear_cuda.py"
    ).QuantLinear
    for bits, is_sorted in ((4, False), (4, True), (8, False), (2, False)):
        weight = draw(bits)
        scales, zeros = grid(weight, bits)
        index = torch.arange(INPUTS) // GROUP
        if is_sorted:
            order = torch.randperm(INPUTS, generator=torch.Generator().manual_seed(5))
            index = index[order]
        plain = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
        plain.weight.data = weight
        made = linear_class(
            bits, GROUP, INPUTS, OUTPUTS, False, weight_dtype=torch.float32
        )
        # Codes of 0 at 0 are 255 and so on in the file, and wrap.
        made.pack(plain, scales.clone(), zeros.clone(), index.to(torch.int32))
        read = made(torch.eye(INPUTS)).T
        tensors = {
            f"layer.{n}": getattr(made, n)
            for n in ("qweight", "qzeros", "scales", "g_idx")
        }
        section = {"quant_method": "gptq", "bits": bits, "group_size": GROUP}
        yield f"gptq {bits}{' sorted' if is_sorted else ''}", section, tensors, read


def awq(source: Path):
    packing = load(source / "awq/utils/packing_utils.py")
    generator = torch.Generator().manual_seed(7)
    words = {
        name: torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)
        for name, shape in (
            ("layer.qweight", (INPUTS, OUTPUTS // 8)),
            ("layer.qzeros", (INPUTS // GROUP, OUTPUTS // 8)),
        )
    }
    scales = draw(8, INPUTS // GROUP, OUTPUTS).abs()
    read = packing.dequantize_gemm(*words.values(), scales, 4, GROUP).T
    section = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
    yield "awq", section, words | {"layer.scales": scales}, read


def compressed():
    cases = {
        "pack 4": ("pack-quantized", 4, "int", "group", True),
        "pack 4 zeros": ("pack-quantized", 4, "int", "group", False),
        "pack 8 channel": ("pack-quantized", 8, "int", "channel", True),
        "int 8": ("int-quantized", 8, "int", "channel", True),
        "float 8": ("float-quantized", 8, "float", "channel", True),
        "float 8 tensor": ("float-quantized", 8, "float", "tensor", True),
    }
    for name, (form, bits, kind, strategy, symmetric) in cases.items():
        weight = draw(11)
        size = GROUP if strategy == "group" else None
        args = QuantizationArgs(
            num_bits=bits,
            type=kind,
            strategy=strategy,
            group_size=size,
            symmetric=symmetric,
        )
        scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
        groups = weight.reshape(OUTPUTS, -1, size or INPUTS)
        largest = 448 if kind == "float" else 2 ** (bits - 1) - 1
        scales = groups.abs().amax(-1) / largest
        state = {"weight": weight}
        if strategy == "tensor":
            scales = scales.max().reshape(1)
        if not symmetric:
            scales, zeros = grid(weight, bits)
            state["weight_zero_point"] = (zeros - 2 ** (bits - 1)).to(torch.int8)
        state["weight_scale"] = scales
        compressor = BaseCompressor.load_from_registry(form)
        small = compressor.compress(state, scheme)
        read = compressor.decompress(dict(small), scheme)["weight"]
        tensors = {f"layer.{n}": x for n, x in small.items()}
        section = {
            "quant_method": "compressed-tensors",
            "format": form,
            "config_groups": {"group_0": scheme.model_dump(mode="json")},
        }
        yield name, section, tensors, read
    yield from fp4()


def fp4():
    """Scales of groups in float8 and one of all, or exponents of 2."""
    for name, size, strategy in (("nvfp4", 16, "tensor_group"), ("mxfp4", 32, "group")):
        form, weight = f"{name}-pack-quantized", draw(11)
        args = QuantizationArgs(
            num_bits=4, type="float", strategy=strategy, group_size=size, symmetric=True
        )
        scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
        scales = weight.reshape(OUTPUTS, -1, size).abs().amax(-1) / 6
        state = {"weight": weight, "weight_scale": 2 ** scales.log2().ceil()}
        if name == "nvfp4":
            whole = (448 / scales.max()).reshape(1)
            rounded = (scales * whole).to(torch.float8_e4m3fn).float()
            state |= {"weight_scale": rounded, "weight_global_scale": whole}
        compressor = BaseCompressor.load_from_registry(form)
        small = compressor.compress(state, scheme)
        read = compressor.decompress(dict(small), scheme)["weight"]
        section = {"quant_method": "compressed-tensors", "format": form}
        yield name, section, {f"layer.{n}": x for n, x in small.items()}, read


def bitsandbytes():
    section = {"quant_method": "bitsandbytes"}
    for kind, nested in (("nf4", False), ("nf4", True), ("fp4", True)):
        # An odd number of blocks, and of rows in a block.
        weight = draw(13, 37, INPUTS)
        codes, state = bnb.functional.quantize_4bit(
            weight, quant_type=kind, compress_statistics=nested, blocksize=64
        )
        read = bnb.functional.dequantize_4bit(codes, state)
        parts = {f"{NAME}.{n}": x for n, x in state.as_dict(packed=True).items()}
        name = f"{kind}{' nested' if nested else ''}"
        yield name, section, {NAME: codes, **parts}, read
    weight = draw(17)
    codes, scales, _ = bnb.functional.int8_vectorwise_quant(weight.half())
    read = bnb.functional.int8_vectorwise_dequant(codes, scales)
    yield "int8", section, {NAME: codes, "layer.SCB": scales}, read


def main() -> None:
    out = Path(sys.argv[3]) if len(sys.argv) > 3 else DEFAULT_OUT
    arrays, cases = {}, {}
    found = [*gptq(Path(sys.argv[1])), *awq(Path(sys.argv[2]))]
    for name, section, tensors, read in [*found, *compressed(), *bitsandbytes()]:
        cases[name] = {"section": section, "float8": []}
        for part, value in tensors.items():
            value = value.detach().cpu().contiguous()
            if value.dtype == torch.float8_e4m3fn:
                cases[name]["float8"].append(part)
                value = value.view(torch.uint8)
            if value.dtype == torch.bfloat16:
                value = value.float()
            arrays[f"{name}/{part}"] = value.numpy()
        arrays[f"{name}="] = read.detach().float().numpy()
    arrays["cases"] = np.array(json.dumps(cases))
    np.savez_compressed(out, **arrays)
    print(f"{out}: {', '.join(cases)}")


if __name__ == "__main__":
    main()
