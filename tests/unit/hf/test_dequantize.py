"""Checkpoints in fp8 and mxfp4 become plain weights as they are read."""

import json

import numpy as np
import optax
import pytest

from tests.unit.hf.models import SMALL, llama, make, save, tokens

import torch  # isort: skip
import transformers  # isort: skip
from safetensors.torch import load_file, save_file  # isort: skip
from transformers.integrations.finegrained_fp8 import Fp8Dequantize  # isort: skip
from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # isort: skip

from zinf import hf  # isort: skip
from zinf.hf.weights import to_torch  # isort: skip
from zinf.interchange.tensors import boxes  # isort: skip

BLOCK = 16
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}


def all_parts(weights, name):
    """A weight, put together of the parts in which it is imported."""
    spec = weights.specs[name]
    found = torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
    for box in boxes(spec.shape, weights.block(name)):
        part = to_torch(weights.read(name, box))
        found[tuple(slice(*edges) for edges in box)] = part
    return found


def quantize(folder, config, change):
    """Saves a model of which `change` quantizes the tensors of the one file."""
    save(config, folder, shard="1GB")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def mark(folder, quantization):
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | {"quantization_config": quantization}
    path.write_text(json.dumps(raw))


def to_fp8(tensors):
    for name in [n for n in tensors if n.endswith("proj.weight")]:
        rows, columns = tensors[name].shape
        blocks = tensors[name].reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scales = blocks.abs().amax((1, 3)) / 448
        scaled = blocks / scales[:, None, :, None]
        tensors[name] = scaled.reshape(rows, columns).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales


def test_fp8_is_dequantized_as_transformers_does(tmp_path):
    quantize(tmp_path, llama(), to_fp8)
    mark(tmp_path, FP8)
    files = load_file(tmp_path / "model.safetensors")
    model = hf.load(tmp_path)
    opened, weights = model.open_weights()
    with opened:
        assert weights.specs.keys() == model.specs.keys()
        name = "model.layers.1.mlp.down_proj.weight"
        wanted = Fp8Dequantize(None)._dequantize_one(
            files[name], files[f"{name}_scale_inv"], torch.float32
        )
        assert torch.equal(all_parts(weights, name), wanted)
        rows = weights.read(name, ((5, 23), (0, 48)))  # Begins within a block.
        assert np.array_equal(rows, wanted[5:23].numpy())
    original = dict(make(llama()).named_parameters())[name]
    # float8 has 3 bits after the first: 1/16 of each number.
    assert torch.allclose(wanted, original, rtol=1 / 16, atol=1e-4)
    assert not hasattr(model.config, "quantization_config")


def to_mxfp4(tensors):
    generator = torch.Generator().manual_seed(0)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        count, inputs, outputs = tensors.pop(name).shape
        shape = (count, outputs, inputs // 32)
        codes = torch.randint(0, 256, (*shape, 16), generator=generator)
        tensors[f"{name}_blocks"] = codes.to(torch.uint8)
        scales = torch.randint(118, 125, shape, generator=generator)
        tensors[f"{name}_scales"] = scales.to(torch.uint8)


def gpt_oss():
    sizes = SMALL | {"hidden_size": 64, "intermediate_size": 32, "head_dim": 16}
    return transformers.GptOssConfig(
        **sizes, num_local_experts=4, num_experts_per_tok=2
    )


def test_mxfp4_is_dequantized_as_transformers_does(tmp_path):
    quantize(tmp_path, gpt_oss(), to_mxfp4)
    mark(tmp_path, {"quant_method": "mxfp4"})
    files = load_file(tmp_path / "model.safetensors")
    model = hf.load(tmp_path)
    opened, weights = model.open_weights()
    with opened:
        assert weights.specs.keys() == model.specs.keys()
        for end in ("gate_up_proj", "down_proj"):
            name = f"model.layers.1.mlp.experts.{end}"
            assert weights.specs[name].shape == model.specs[name].shape
            wanted = convert_moe_packed_tensors(
                files[f"{name}_blocks"], files[f"{name}_scales"]
            )
            assert torch.equal(all_parts(weights, name), wanted)


def no_scales(tensors):
    to_fp8(tensors)
    del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]


def other_blocks(tensors):
    to_fp8(tensors)
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    tensors[name] = tensors[name][:1].clone()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            no_scales,
            NotImplementedError,
            "layers.0.mlp.up_proj.weight' is float8.*no sc",
        ),
        (other_blocks, ValueError, r"up_proj.weight_scale_inv has the shape \[1, 2\]"),
    ],
)
def test_weights_without_their_scales_are_named(change, error, words, tmp_path):
    quantize(tmp_path, llama(), change)
    mark(tmp_path, FP8)
    with pytest.raises(error, match=words):
        hf.load(tmp_path).open_weights()


@pytest.mark.slow
def test_a_step_is_that_of_the_plain_weights(tmp_path):
    """Experts of gpt-oss, kept in 4 bits in the files, imported to the NVMe tier."""
    quantize(tmp_path / "quantized", gpt_oss(), to_mxfp4)
    mark(tmp_path / "quantized", {"quant_method": "mxfp4"})
    quantize(tmp_path / "plain", gpt_oss(), plain_mxfp4)
    offload = {"offload_param": {"device": "nvme"}}
    config = {"execution": "streamed", "zero_optimization": {"stage": 3, **offload}}
    config |= {"memory": {"nvme": str(tmp_path / "nvme")}, "persistence_threshold": 0}
    losses = []
    for folder in ("quantized", "plain"):
        engine = hf.initialize(
            hf.load(tmp_path / folder),
            optax.adamw(1e-2),
            config,
            batch={"input_ids": tokens()},
        )
        with engine:
            batch = {"input_ids": tokens()}
            losses.append([engine.step(batch)["loss"] for _ in range(2)])
            hf.export(engine, tmp_path / f"{folder}-tuned")
    assert losses[0] == losses[1]
    tuned = json.loads((tmp_path / "quantized-tuned/config.json").read_text())
    assert "quantization_config" not in tuned


def plain_mxfp4(tensors):
    to_mxfp4(tensors)
    for name in [n for n in tensors if n.endswith("_blocks")]:
        plain = name.removesuffix("_blocks")
        blocks, scales = tensors.pop(name), tensors.pop(f"{plain}_scales")
        tensors[plain] = convert_moe_packed_tensors(blocks, scales)
