"""Weights in 8 and 4 bits: made of plain ones, and read from files of such models."""

import json
import tracemalloc
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path
from shutil import copy

import ml_dtypes
import numpy as np
import optax
import pytest

from tests.unit.hf.models import (
    NVFP4,
    SMALL,
    VOCAB,
    change_files,
    llama,
    make,
    mixtral,
    off,
    on_tier,
    save,
    to_nvfp4,
    tokens,
)

import jax  # isort: skip
import torch  # isort: skip
import transformers  # isort: skip
from safetensors.torch import save_file  # isort: skip
from transformers.integrations.finegrained_fp8 import Fp8Dequantize  # isort: skip
from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # isort: skip

from zinf import hf  # isort: skip
from zinf.checkpoint import Saved  # isort: skip
from zinf.checkpoint.grid import whole_box  # isort: skip
from zinf.adapt import MergedTensors  # isort: skip
from zinf.adapt.blocks import Encoding  # isort: skip
from zinf.adapt.forms import OF_BITS  # isort: skip
from zinf.hf.quantized import plain, refusal  # isort: skip
from zinf.hf.quantized.codes import Codes  # isort: skip
from zinf.hf.quantized.packed import packed_words, unpacked  # isort: skip
from zinf.hf.weights import check_dtypes, to_torch  # isort: skip
from zinf.core.interchange.safetensors_files import SafetensorsFiles  # isort: skip
from zinf.core.interchange.tensors import AbstractTensors, boxes  # isort: skip
from zinf.core.memory.chunk import chunk_shape  # isort: skip
from zinf.core.machine.devices import on_devices  # isort: skip
from zinf.core.plan import Link  # isort: skip
from zinf.core.program import ArraySpec, Role, Tier  # isort: skip

PROMPTS = [np.random.default_rng(0).integers(3, VOCAB, length) for length in (3, 9, 16)]
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GROUP = 16


def quantizing(tier, folder, **groups):
    groups["group_size"] = GROUP
    quantization = {"quantized_initialization": groups}
    return on_tier(tier, folder) | {"weight_quantization": quantization}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bits", "symmetric", "tiers"),
    [(8, False, ["nvme"]), (4, True, ["device", "host", "nvme"])],
)
def test_logits_are_those_of_weights_that_are_rounded_by_hand(
    bits, symmetric, tiers, tmp_path
):
    """Generated tokens are equal on all tiers, and fewer bytes move."""
    save(llama(), tmp_path / "model")
    model = hf.load(tmp_path / "model")
    files, weights = model.open_weights()
    with files:
        params = {name: np.array(weights.whole(name)) for name in model.specs}
    encoding = Encoding(OF_BITS[bits, symmetric], GROUP, 0)
    rounded = {
        name: np.asarray(encoding.decode(encoding.encode(x), x.shape))
        if any(part in name for part in LINEAR)
        else x
        for name, x in params.items()
    }
    batch = {"input_ids": tokens()}
    wanted = np.asarray(jax.jit(model.logits)(rounded, batch))
    numel = sum(
        x.size for name, x in params.items() if any(part in name for part in LINEAR)
    )
    # Codes, and one or two float32 numbers a group.
    nbytes = 4 * (model.num_parameters - numel)
    nbytes += numel * bits // 8 + numel // GROUP * (4 if symmetric else 8)
    texts = []
    for tier in tiers:
        config = quantizing(tier, tmp_path, num_bits=bits, symmetric=symmetric)
        with hf.open_model(model, config, rows=4, length=16) as engine:
            texts.append(engine.generate(PROMPTS, max_new_tokens=8, rows=4))
            made = list(engine._programs.made._made.values())[-1]
            plan = engine.plan
            if tier == "nvme":
                found = engine.apply(engine.adapted.applied(model.logits), batch)
        homes = {a: home for a, home in plan.homes.items() if a.role == Role.PARAM}
        assert set(homes.values()) == {Tier[tier.upper()]}
        # Each of two layers is a segment of the same executable, as with plain weights.
        bodies = [s.body for s in made.decode.segmented.program.segments]
        assert bodies == [0, 1, 1, 2]
    assert made.decode.plan.link_bytes(Link.NVME_READ) == nbytes
    assert plan.home_bytes[Tier.NVME] == nbytes
    assert all(text == texts[0] for text in texts)
    assert len({tuple(text) for text in texts[0]}) == len(PROMPTS)
    # Decoded in the segment: the same numbers, up to rounding of fused sums.
    assert off(found, wanted) < 2e-6


def test_only_what_a_key_names_is_rounded(tmp_path):
    save(llama(), tmp_path / "model")
    model = hf.load(tmp_path / "model")
    config = on_tier("host", tmp_path)
    config["weight_quantization"] = {
        "post_init_quant": {"mlp": {"num_bits": 4}, "q_proj": {"num_bits": 8}}
    }
    run = hf.running(model, config, rows=4, length=16)
    bits = {name: target.encoding.bits for name, target in run.adapted.targets.items()}
    assert set(bits.values()) == {4, 8} and len(bits) == 2 * (3 + 1)
    assert all(bits[name] == 8 for name in bits if "q_proj" in name)
    config["weight_quantization"] = {"post_init_quant": {"nothing": {"num_bits": 4}}}
    with pytest.raises(ValueError, match="no linear layer has 'nothing' in its name"):
        hf.running(model, config, rows=4, length=16)


BLOCK = 16
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
MXFP4 = {"quant_method": "mxfp4"}


def stored(config, folder, change, quantization):
    """Saves a model of which `change` quantizes the tensors, and gives these."""
    save(config, folder, shard="1GB")
    return change_files(folder, change, quantization)


def all_parts(weights, name):
    """A weight, put together of the parts in which it is imported."""
    spec = weights.specs[name]
    found = torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
    for box in boxes(spec.shape, weights.block(name)):
        part = to_torch(weights.read(name, box))
        found[tuple(slice(*edges) for edges in box)] = part
    return found


def to_fp8(tensors):
    for name in [n for n in tensors if n.endswith("proj.weight")]:
        rows, columns = tensors[name].shape
        blocks = tensors[name].reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scales = blocks.abs().amax((1, 3)) / 448
        scaled = blocks / scales[:, None, :, None]
        tensors[name] = scaled.reshape(rows, columns).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales


def test_fp8_is_dequantized_as_transformers_does(tmp_path):
    tensors = stored(llama(), tmp_path, to_fp8, FP8)
    model = hf.load(tmp_path)
    opened, weights = model.open_weights()
    with opened:
        assert weights.specs.keys() == model.specs.keys()
        name = "model.layers.1.mlp.down_proj.weight"
        wanted = Fp8Dequantize(None)._dequantize_one(
            tensors[name], tensors[f"{name}_scale_inv"], torch.float32
        )
        assert torch.equal(all_parts(weights, name), wanted)
        rows = weights.read(name, ((5, 23), (0, 48)))  # Begins within a block.
        assert np.array_equal(rows, wanted[5:23].numpy())
    original = dict(make(llama()).named_parameters())[name]
    # float8 has 3 bits after the first: 1/16 of each number.
    assert torch.allclose(wanted, original, rtol=1 / 16, atol=1e-4)
    assert not hasattr(model.config, "quantization_config")


def to_mxfp4(tensors, *, is_plain=False):
    generator = torch.Generator().manual_seed(0)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        count, inputs, outputs = tensors.pop(name).shape
        shape = (count, outputs, inputs // 32)
        codes = torch.randint(0, 256, (*shape, 16), generator=generator)
        scales = torch.randint(118, 125, shape, generator=generator)
        codes, scales = codes.to(torch.uint8), scales.to(torch.uint8)
        if is_plain:
            tensors[name] = convert_moe_packed_tensors(codes, scales)
        else:
            tensors |= {f"{name}_blocks": codes, f"{name}_scales": scales}


def gpt_oss():
    sizes = SMALL | {"hidden_size": 64, "intermediate_size": 32, "head_dim": 16}
    return transformers.GptOssConfig(
        **sizes, num_local_experts=4, num_experts_per_tok=2
    )


@pytest.mark.slow
def test_mxfp4_is_dequantized_as_transformers_does(tmp_path):
    """Experts of gpt-oss; a step from the NVMe tier is that of the plain weights."""
    stored(gpt_oss(), tmp_path / "quantized", to_mxfp4, MXFP4)
    plain = stored(
        gpt_oss(), tmp_path / "plain", partial(to_mxfp4, is_plain=True), None
    )
    model = hf.load(tmp_path / "quantized")
    opened, weights = model.open_weights()
    with opened:
        assert weights.specs.keys() == model.specs.keys()
        for end in ("gate_up_proj", "down_proj"):
            name = f"model.layers.1.mlp.experts.{end}"
            assert weights.specs[name].shape == model.specs[name].shape
            assert torch.equal(all_parts(weights, name), plain[name])
    batch, losses = {"input_ids": tokens()}, []
    for folder in ("quantized", "plain"):
        model, config = hf.load(tmp_path / folder), on_tier("nvme", tmp_path)
        tx = optax.adamw(1e-2)
        with hf.initialize(model, tx, config, batch=batch) as engine:
            losses.append([engine.step(batch)["loss"] for _ in range(2)])
            if folder == "quantized":
                hf.export(engine, tmp_path / "tuned")
    assert losses[0] == losses[1]
    tuned = json.loads((tmp_path / "tuned/config.json").read_text())
    assert "quantization_config" not in tuned


def test_weights_without_their_scales_are_named(tmp_path):
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"

    def no_scales(tensors):
        to_fp8(tensors)
        del tensors[name]

    def other_blocks(tensors):
        to_fp8(tensors)
        tensors[name] = tensors[name][:1].clone()

    stored(llama(), tmp_path, no_scales, FP8)
    words = "layers.0.mlp.up_proj.weight' is float8.*no sc"
    with pytest.raises(NotImplementedError, match=words):
        hf.load(tmp_path).open_weights()
    stored(llama(), tmp_path, other_blocks, FP8)
    words = r"up_proj.weight_scale_inv has the shape \[1, 2\]"
    with pytest.raises(ValueError, match=words):
        hf.load(tmp_path).open_weights()


RECORDED = np.load(Path(__file__).parent / "quantized.npz")
CASES = json.loads(str(RECORDED["cases"]))


def recorded(name):
    """The tensors of a file."""
    tensors = {}
    for key in RECORDED.files:
        if key.startswith(f"{name}/"):
            part, value = key.removeprefix(f"{name}/"), torch.from_numpy(RECORDED[key])
            is_float8 = part in CASES[name]["float8"]
            tensors[part] = value.view(torch.float8_e4m3fn) if is_float8 else value
    return tensors


@pytest.mark.parametrize("name", CASES)
def test_other_libraries_read_their_weights_as_zinf_does(name, tmp_path):
    """Recorded by scripts/reports/record_quantized.py: whole weights and odd parts."""
    tensors = recorded(name) | {"other": torch.arange(3.0)}
    save_file(tensors, tmp_path / "model.safetensors")
    section, wanted = CASES[name]["section"], RECORDED[f"{name}="]
    assert refusal(section) is None
    with SafetensorsFiles(tmp_path / "model.safetensors") as files:
        weights = plain(files, section)
        assert {n: x.shape for n, x in weights.specs.items()} == {
            "layer.weight": wanted.shape,
            "other": (3,),
        }
        check_dtypes(weights.specs)
        # float32 products of the same numbers, which some read in 16 bits.
        rounding = {"int8": 1e-3, "nvfp4": 2**-7}.get(name, 3e-7)
        exact = {"rtol": rounding, "atol": 1e-7}
        found = all_parts(weights, "layer.weight")
        np.testing.assert_allclose(found, wanted, **exact)
        rows = weights.read("layer.weight", ((3, 30), (0, wanted.shape[1])))
        np.testing.assert_array_equal(rows, found[3:30])
        rows = weights.read("layer.weight", ((7, 8), (5, 20)))
        np.testing.assert_array_equal(rows, found[7:8, 5:20])


def second_version(tensors):
    """The second form of GPTQ has codes of 0 as they are, and the first less 1."""
    codes = unpacked(tensors["layer.qzeros"].numpy(), 4)
    tensors["layer.qzeros"] = torch.from_numpy(packed_words((codes + 1) & 15, 4))


def never_set(tensors):
    tensors["layer.weight_g_idx"] = torch.full((64,), -1, dtype=torch.int32)


def rows_in_order(tensors):
    tensors["layer.weight_format"] = torch.tensor(0, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("name", "change", "more"),
    [
        ("gptq 4", second_version, {"checkpoint_format": "gptq_v2"}),
        # As transformers 5 and gptqmodel write it.
        ("gptq 4", second_version, {"format": "gptq_v2"}),
        ("gptq 4", lambda tensors: None, {"format": "gptq"}),
        ("pack 4", never_set, {}),
        ("int8", rows_in_order, {}),
    ],
)
def test_a_weight_in_another_form_of_its_method_is_the_same(name, change, more):
    tensors, section, read = recorded(name), CASES[name]["section"], []
    for given in (section, section | more):
        assert refusal(given) is None
        files = InMemory({n: x.numpy() for n, x in tensors.items()})
        weights = plain(files, given)
        box = whole_box(weights.specs["layer.weight"].shape)
        read.append(weights.read("layer.weight", box))
        change(tensors)
    np.testing.assert_array_equal(*read)


def test_a_group_that_does_not_divide_the_inputs_ends_with_fewer():
    """As auto-gptq counts: input i is of group i // group_size."""
    inputs, outputs, group = 48, 32, 32
    named = {
        "qweight": np.zeros((inputs // 8, outputs), np.int32),
        "qzeros": np.zeros((2, outputs // 8), np.int32),  # A code of 0 of 1.
        "scales": np.stack([np.full(outputs, x, np.float16) for x in (1, 2)]),
    }
    files = InMemory({f"layer.{name}": x for name, x in named.items()})
    section = {"quant_method": "gptq", "bits": 4, "group_size": group}
    found = plain(files, section).read("layer.weight", ((0, outputs), (0, inputs)))
    wanted = np.where(np.arange(inputs) < group, -1, -2)
    np.testing.assert_array_equal(found, np.broadcast_to(wanted, found.shape))


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_parts_of_weights_with_inputs_first_take_no_more_than_is_counted(method):
    """Rows of outputs, of words of all outputs: equal to the rows of a whole read."""
    inputs, outputs = 2048, 4096
    draw = np.random.default_rng(0).integers
    shape = (inputs // 8, outputs) if method == "gptq" else (inputs, outputs // 8)
    groups = inputs // 128
    named = {
        "qweight": draw(0, 2**31, shape, np.int32),
        "qzeros": draw(0, 2**31, (groups, outputs // 8), np.int32),
        "scales": np.ones((groups, outputs), np.float16),
    }
    files = InMemory({f"layer.{name}": x for name, x in named.items()})
    weights = plain(files, {"quant_method": method, "bits": 4})
    name, (rows, _) = "layer.weight", weights.block("layer.weight")
    assert rows < outputs and rows % 8 == 0
    whole = weights.read(name, ((0, outputs), (0, inputs)))
    weights.read(name, ((0, 8), (0, inputs)))  # What is imported at the first call.
    tracemalloc.start()
    part = weights.read(name, ((rows, 2 * rows), (0, inputs)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak <= weights.copies_of(name) * part.nbytes
    np.testing.assert_array_equal(part, whole[rows : 2 * rows])


class InMemory(AbstractTensors):
    """Arrays as the tensors of files, which are read by copying."""

    def __init__(self, arrays):
        self.arrays = arrays
        self.specs = {
            name: ArraySpec(x.shape, x.dtype.name, x.itemsize)
            for name, x in arrays.items()
        }

    def block(self, name):
        return chunk_shape(self.specs[name])

    def read(self, name, box):
        return self.arrays[name][tuple(slice(*edges) for edges in box)].copy()


def in_numpy(tensor):
    if tensor.dtype != torch.float8_e4m3fn:
        return tensor.numpy()
    return tensor.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)


def in_fp4(name):
    """Files with one weight, how they are quantized, and bits a number that it takes.

    Those of one number take 32 bits more.
    """
    if name == "gpt-oss":
        tensors = {"layer.down_proj": torch.zeros(2, 64, 6)}
        to_mxfp4(tensors)
        return {n: x.numpy() for n, x in tensors.items()}, MXFP4, 4.25
    if name == "modelopt":
        weight = torch.from_numpy(np.random.default_rng(0).normal(size=(6, 64)))
        tensors, section = {"proj.weight": weight.float()}, NVFP4
        to_nvfp4(tensors)
    else:
        tensors, section = recorded(name), CASES[name]["section"]
    arrays = {part: in_numpy(x) for part, x in tensors.items()}
    return arrays, section, 4.25 if name == "mxfp4" else 4.5


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "modelopt", "gpt-oss"])
def test_codes_that_stay_as_they_are_give_the_numbers_that_are_read(name):
    arrays, section, bits = in_fp4(name)
    files = InMemory(arrays)
    weights = plain(files, section)
    ((weight, packed),) = weights.made.items()
    codes, shape = Codes({weight: [(files, packed)]}), packed.spec.shape
    kept = {}
    for part, spec in codes.specs.items():
        # Parts that begin and end within rows of the files.
        edges = [*range(0, spec.shape[0], 3), spec.shape[0]]
        rows = [
            codes.read(part, (x, *whole_box(spec.shape)[1:])) for x in pairwise(edges)
        ]
        kept[part.rpartition("/")[2]] = np.concatenate(rows)
        assert kept[part.rpartition("/")[2]].dtype == spec.dtype
    whole = 32 * ("tensor_scale" in kept)
    assert 8 * sum(x.nbytes for x in kept.values()) == bits * prod(shape) + whole
    found = codes.encodings[weight].decode(kept, shape)
    wanted = weights.read(weight, whole_box(shape)).astype(np.float32)
    np.testing.assert_array_equal(found, wanted)


def test_all_exponents_of_mxfp4_are_those_of_transformers():
    """But for numbers below the normal ones of float32, which XLA takes as 0."""
    powers = np.arange(255, dtype=np.uint8)  # 255 stands for no number.
    codes = np.tile(np.arange(16, dtype=np.uint8) * 17, (255, 1))
    parts = (torch.from_numpy(x)[None, :, None] for x in (codes, powers))
    wanted = convert_moe_packed_tensors(*parts)[0].T.float().numpy()
    named = {"codes": codes, "scales": powers}
    found = np.asarray(Encoding("mxfp4", 32).decode(named, (255, 32)))
    is_normal = (np.abs(wanted) >= np.finfo(np.float32).tiny) | (wanted == 0)
    assert is_normal[0].any() and not is_normal[0].all()
    np.testing.assert_array_equal(found[is_normal], wanted[is_normal])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "change", "section", "bits", "dtype"),
    [
        (llama, to_nvfp4, NVFP4, 4.5, "bfloat16"),
        (mixtral, to_nvfp4, NVFP4, 4.5, "float32"),
        (gpt_oss, to_mxfp4, MXFP4, 4.25, "float32"),
    ],
    ids=["nvfp4", "nvfp4, experts one by one", "mxfp4, turned experts"],
)
def test_published_weights_of_4_bits_rest_and_move_so(
    config, change, section, bits, dtype, tmp_path
):
    """Logits are those of the decoded weights, to the bit, on all tiers."""
    tensors = stored(config(), tmp_path / "model", change, section)
    model, batch = hf.load(tmp_path / "model", dtype=dtype), {"input_ids": tokens()}
    itemsize, tx = np.dtype(dtype).itemsize, optax.adam(1e-2)
    with hf.initialize(model, tx, on_tier("host", tmp_path), batch=batch) as engine:
        # All are trained, so they are decoded.
        params = {name: engine.get(name) for name in model.specs}
        wanted = engine.apply(model.logits, batch)
    assert model.encodings
    numel = sum(params[name].size for name in model.encodings)
    nbytes = itemsize * (model.num_parameters - numel) + numel * bits / 8
    nbytes += 4 * len([name for name in tensors if name.endswith("_scale_2")])
    texts = []
    for tier in ("device", "host", "nvme"):
        with hf.open_model(model, on_tier(tier, tmp_path), rows=4, length=16) as engine:
            found = engine.apply(engine.adapted.applied(model.logits), batch)
            np.testing.assert_array_equal(found, wanted)
            texts.append(engine.generate(PROMPTS, max_new_tokens=8, rows=4))
            held = engine.plan.home_bytes[Tier[tier.upper()]]
        # The device also has the table of each weight, 256 pairs of numbers.
        assert held == nbytes or tier == "device"
    assert texts[1:] == texts[:1] * 2
    config = on_tier("nvme", tmp_path) | {"adapter": {"r": 2}}
    with hf.initialize(model, tx, config, batch=batch) as engine:
        # The merged weights, before a step: what transformers would decode.
        hf.export(engine, tmp_path / "merged")
        losses = [engine.step(batch)["loss"] for _ in range(3)]
    assert losses[2] < losses[0]
    merged = hf.load(tmp_path / "merged")
    assert not merged.encodings
    files, weights = merged.open_weights()
    with files:
        for name, value in params.items():
            found = weights.whole(name).astype(dtype)
            np.testing.assert_array_equal(found, value, err_msg=name)


IN_WORDS = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}
MIXED = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
DOWN = "model.layers.0.mlp.down_proj"


def in_groups(*groups, left_out=("lm_head",)):
    """A section of compressed-tensors, of pairs of a format and its targets."""
    named = {
        f"group_{i}": {"format": form, "targets": targets}
        for i, (form, targets) in enumerate(groups)
    }
    found = {"config_groups": named, "ignore": left_out, "format": groups[0][0]}
    return found | {"quant_method": "compressed-tensors"}


def to_zeros(tensors, parts, *, names="proj"):
    """Linear layers as tensors of 0, of the shapes and dtypes that `parts` gives."""
    for name in [n for n in tensors if n.endswith("proj.weight") and names in n]:
        for end, x in parts(*tensors.pop(name).shape).items():
            value = torch.zeros(*x[:-1], dtype=x[-1]) if isinstance(x, tuple) else x
            tensors[name.removesuffix("weight") + end] = value


def gptq_parts(rows, inputs):
    return {
        "qweight": (inputs // 8, rows, torch.int32),
        "qzeros": (inputs // GROUP, rows // 8, torch.int32),
        "scales": (inputs // GROUP, rows, torch.float16),
    }


def awq_parts(rows, inputs):
    return gptq_parts(rows, inputs) | {"qweight": (inputs, rows // 8, torch.int32)}


def nf4_parts(rows, inputs):
    state = json.dumps({"shape": [rows, inputs], "blocksize": 64}).encode()
    return {
        "weight": (rows * inputs // 2, 1, torch.uint8),
        "weight.absmax": (rows * inputs // 64, torch.float32),
        "weight.quant_map": (16, torch.float32),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(state)).byte(),
    }


def int8_parts(rows, inputs):
    return {
        "weight": (rows, inputs, torch.int8),
        "weight_scale": (rows, 1, torch.float32),
    }


def nvfp4_parts(rows, inputs):
    return {
        "weight_packed": (rows, inputs // 2, torch.uint8),
        "weight_scale": (rows, inputs // 16, torch.float8_e4m3fn),
        "weight_global_scale": (1, torch.float32),
    }


def mxfp4_parts(rows, inputs):
    return {
        "weight_packed": (rows, inputs // 2, torch.uint8),
        "weight_scale": (rows, inputs // 32, torch.uint8),
    }


def to_mixed(tensors):
    to_zeros(tensors, nvfp4_parts, names="mlp")
    to_zeros(tensors, int8_parts, names="self_attn")


NVFP4_PACK, MXFP4_PACK = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
EXPECTED = {
    "fp8": (llama, to_fp8, FP8, 0, ""),
    "gptq": (llama, partial(to_zeros, parts=gptq_parts), IN_WORDS, 0, ""),
    "awq": (
        llama,
        partial(to_zeros, parts=awq_parts),
        IN_WORDS | {"quant_method": "awq"},
        0,
        "",
    ),
    "nf4": (llama, partial(to_zeros, parts=nf4_parts), NF4, 0, ""),
    "int8": (
        llama,
        partial(to_zeros, parts=int8_parts),
        in_groups(("int-quantized", ["Linear"])),
        0,
        "",
    ),
    "nvfp4": (
        llama,
        partial(to_zeros, parts=nvfp4_parts),
        in_groups((NVFP4_PACK, ["Linear"])),
        14,
        "",
    ),
    "nvfp4 of some": (
        llama,
        partial(to_zeros, parts=nvfp4_parts, names="mlp"),
        in_groups((NVFP4_PACK, ["Linear"]), left_out=["lm_head", "re:.*self_attn"]),
        6,
        "",
    ),
    "nvfp4 and int8": (
        llama,
        to_mixed,
        in_groups((NVFP4_PACK, ["re:.*mlp"]), ("int-quantized", ["re:.*self_attn"])),
        6,
        "",
    ),
    "mxfp4": (
        partial(llama, intermediate_size=64),
        partial(to_zeros, parts=mxfp4_parts),
        in_groups((MXFP4_PACK, ["Linear"])),
        14,
        "",
    ),
    "modelopt": (llama, to_nvfp4, NVFP4 | {"ignore": ["lm_head"]}, 14, ""),
    "modelopt, open": (llama, to_nvfp4, NVFP4, 14, "not say which layers are plain"),
    "modelopt, experts": (
        mixtral,
        to_nvfp4,
        NVFP4 | {"exclude_modules": ["lm_head", "*gate", "model.visual*"]},
        12,
        "it names model.visual*, which are not in the model",
    ),
    "modelopt, routers": (
        mixtral,
        to_nvfp4,
        NVFP4 | {"ignore": ["lm_head"]},
        12,
        "it may mean model.layers.0.block_sparse_moe.gate, ",
    ),
    "modelopt, by layer": (
        llama,
        partial(to_nvfp4, names=DOWN),
        MIXED | {"quantized_layers": {DOWN: {"quant_algo": "NVFP4"}}},
        1,
        "",
    ),
    "gpt-oss": (
        gpt_oss,
        to_mxfp4,
        MXFP4 | {"modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
        4,
        "",
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_config_json_alone_is_planned_as_with_its_files(name, tmp_path, caplog):
    """The bytes of each tier; where config.json does not decide, a warning says so."""
    make_config, change, section, count, words = EXPECTED[name]
    stored(make_config(), tmp_path / "model", change, section)
    (tmp_path / "alone").mkdir()
    copy(tmp_path / "model/config.json", tmp_path / "alone")
    found = []
    for folder in ("model", "alone"):
        model, config = hf.load(tmp_path / folder), on_tier("nvme", tmp_path)
        run = hf.running(model, config, rows=1, length=8)
        _, mesh = on_devices(config)
        planner = run.planner(mesh=mesh, topology=None)
        plan = planner.plan(planner.batch_spec(run.batch)).plan
        found.append((model.encodings, plan.home_bytes, plan.peak_bytes))
        said = [x.getMessage() for x in caplog.records if x.name == "zinf.hf.model"]
        assert not said or folder == "alone"
    assert found[0] == found[1] and len(found[0][0]) == count
    assert len(said) == bool(words) and words in "".join(said)


def test_a_section_of_another_form_is_no_plan(tmp_path):
    sections = [in_groups((NVFP4_PACK, ["re:("])), NVFP4 | {"ignore": [1]}]
    for section in sections:
        llama(quantization_config=section).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="config.json is not of the form that its"):
            _ = hf.load(tmp_path).encodings


def test_weights_of_modelopt_are_codes_times_two_scales_and_float8_one():
    name, section = "layer.weight", {"quant_method": "modelopt", "quant_algo": "FP8"}
    assert refusal(section) is None
    tensors = recorded("float 8 tensor")
    codes = tensors[name].view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    given = {name: codes, f"{name}_scale": tensors[f"{name}_scale"].numpy()}
    found = plain(InMemory(given), section)
    scale = given["layer.weight_scale"].reshape(())
    np.testing.assert_array_equal(
        found.read(name, whole_box((32, 64))), given[name].astype(np.float32) * scale
    )
    tensors = recorded("nvfp4")
    codes = tensors["layer.weight_packed"].numpy()
    scales = tensors["layer.weight_scale"].float().numpy()
    second = np.float32(1 / 3)
    half = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    table = np.array([*half, *(-x for x in half)], np.float32)
    numbers = table[np.stack([codes & 15, codes >> 4], -1).reshape(32, 64)]
    named = {
        name: codes,
        f"{name}_scale": scales.astype(ml_dtypes.float8_e4m3fn),
        f"{name}_scale_2": np.array(second),
        "layer.input_scale": np.array(second),
    }
    found = plain(InMemory(named), section | {"quant_algo": "NVFP4"})
    wanted = numbers * np.repeat(scales * second, 16, axis=1)
    np.testing.assert_array_equal(found.read(name, whole_box((32, 64))), wanted)
    rows = found.read(name, ((5, 9), (3, 40)))
    np.testing.assert_array_equal(rows, wanted[5:9, 3:40])


BY_ROWS = ("compressed-tensors", "bitsandbytes")


@pytest.mark.parametrize(
    "name", [n for n in CASES if CASES[n]["section"]["quant_method"] in BY_ROWS]
)
def test_a_part_reads_the_scales_of_its_own_rows(name, tmp_path, monkeypatch):
    save_file(recorded(name), tmp_path / "model.safetensors")
    section, boxes_of, read = CASES[name]["section"], {}, SafetensorsFiles.read

    def noting(files, part, box):
        boxes_of[part] = box
        return read(files, part, box)

    with SafetensorsFiles(tmp_path / "model.safetensors") as files:
        weights = plain(files, section)
        rows, width = weights.specs["layer.weight"].shape
        monkeypatch.setattr(SafetensorsFiles, "read", noting)
        weights.read("layer.weight", ((7, 8), (0, width)))
        scales = [n for n in boxes_of if n.endswith(("t_scale", ".absmax", ".SCB"))]
        assert len(scales) == 1
        count = files.specs[scales[0]].shape[0]
    (low, high), *_ = boxes_of[scales[0]]
    # One row, or the blocks that it touches; or one scale for all.
    assert high - low <= max(1, -(-count // rows) + 1)


@pytest.mark.parametrize(
    ("name", "part", "words"),
    [
        ("gptq 4", "layer.scales", "layer.scales is absent, and 'layer.qweight' "),
        ("gptq 4 sorted", "layer.g_idx", None),
        ("awq", "layer.qzeros", "layer.qzeros is absent, and 'layer.qweight' "),
        ("pack 4", "layer.weight_shape", "layer.weight_shape is absent. Get the files"),
        ("pack 4", "layer.weight_scale", "layer.weight_scale is absent. Get the"),
        ("nvfp4", "layer.weight_scale", "layer.weight_scale is absent. Get the"),
        ("nf4 nested", "layer.weight.nested_absmax", "nested_absmax is absent. Get"),
        ("nf4", "layer.weight.absmax", "layer.weight.absmax is absent, and "),
    ],
)
def test_a_part_that_is_missing_is_named(name, part, words, tmp_path):
    tensors = recorded(name)
    del tensors[part]
    save_file(tensors, tmp_path / "model.safetensors")
    with SafetensorsFiles(tmp_path / "model.safetensors") as files:
        if words is None:  # Inputs are in the order of their groups.
            assert "layer.weight" in plain(files, CASES[name]["section"]).specs
            return
        with pytest.raises((ValueError, NotImplementedError)) as error:
            check_dtypes(plain(files, CASES[name]["section"]).specs)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("name", "part", "value", "section", "words"),
    [
        ("int8", "layer.weight_format", 2, {}, "order of a kernel (layer.weight_form"),
        (
            *("float 8 tensor", "layer.pre_quant_scale", 1),
            {"quant_method": "modelopt", "quant_algo": "FP8"},
            "layer.pre_quant_scale multiplies the inputs of a layer, which",
        ),
    ],
)
def test_a_part_that_changes_what_is_computed_is_refused(
    name, part, value, section, words
):
    arrays = {n: in_numpy(x) for n, x in recorded(name).items()}
    files = InMemory(arrays | {part: np.array(value, np.uint8)})
    with pytest.raises(ValueError) as error:
        plain(files, CASES[name]["section"] | section)
    assert words in str(error.value)


def mixed(*formats, **others):
    """A section of compressed-tensors whose groups have formats of their own."""
    formats = formats or ("pack-quantized", "float-quantized")
    groups = {f"group_{i}": {"format": name} for i, name in enumerate(formats)}
    section = {"quant_method": "compressed-tensors", "format": "mixed-precision"}
    return section | {"config_groups": groups} | others


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (mixed(), None),
        ({"quant_method": "gptq", "bits": 3}, "gptq, 3 bits, and "),
        (
            {"quant_method": "gptq", "bits": 4, "format": "marlin"},
            "gptq, checkpoint_format marlin, and gptq and gptq_v2 are read",
        ),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq, version gemv"),
        ({"quant_method": "awq", "bits": 4, "format": "gemv"}, "awq, version gemv"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4"}, "format nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "algo W4A8_AWQ, and"),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {
                    "layers.0.q_proj": {"quant_algo": "NVFP4"},
                    "layers.0.k_proj": {"quant_algo": "W4A8_AWQ"},
                },
            },
            "modelopt, quant_algo W4A8_AWQ of layers.0.k_proj, and NVFP4",
        ),
        (mixed("nvfp4-pack-quantized", "marlin-24"), "tensors, format marlin-24, and"),
        (mixed("int-quantized", None), "compressed-tensors, format mixed-precision, "),
        (
            mixed(sparsity_config={"format": "sparse-24-bitmask"}),
            "sparsity_config.format sparse-24-bitmask, and dense is read",
        ),
        (mixed(transform_config={"config_groups": {"u": {}}}), "transform_config, wh"),
        (
            {"quant_method": "bitsandbytes", "bnb_4bit_quant_storage": "bfloat16"},
            "bitsandbytes, bnb_4bit_quant_storage bfloat16, and uint8 is read",
        ),
        ({"quant_method": "hqq"}, "hqq"),
        ({}, "an unknown method"),
    ],
)
def test_what_is_not_read_is_said(section, words):
    reason = refusal(section)
    assert reason is None if words is None else words in reason


def to_int8(tensors):
    for name in [n for n in tensors if n.endswith("proj.weight")]:
        scales = tensors[name].abs().amax(1, keepdim=True) / 127
        codes = torch.round(tensors[name] / scales).to(torch.int8)
        tensors |= {name: codes, f"{name}_scale": scales}


@pytest.mark.parametrize(
    ("change", "section", "is_kept"),
    [
        (to_int8, CASES["int 8"]["section"], False),
        (to_nvfp4, NVFP4, True),
    ],
    ids=["int8", "nvfp4"],
)
def test_adapters_train_over_a_model_in_few_bits(change, section, is_kept, tmp_path):
    tensors = stored(llama(), tmp_path, change, section)
    model, batch = hf.load(tmp_path), {"input_ids": tokens()}
    config = on_tier("host", tmp_path) | {"adapter": {"r": 2}}
    with hf.initialize(model, optax.adam(1e-2), config, batch=batch) as engine:
        name = "model.layers.1.mlp.down_proj.weight"
        if is_kept:
            scales = tensors[f"{name}_scale"].view(torch.uint8).reshape(-1)
            assert np.array_equal(engine.get(f"base/{name}/scales"), scales)
        else:
            wanted = tensors[name] * tensors[f"{name}_scale"]
            assert np.array_equal(engine.get(f"base/{name}"), wanted.numpy())
        losses = [engine.step(batch)["loss"] for _ in range(3)]
    assert losses[2] < losses[0]


@pytest.mark.parametrize(
    ("config", "change", "section", "bf16"),
    [(llama, to_nvfp4, NVFP4, False), (gpt_oss, to_mxfp4, MXFP4, True)],
    ids=["nvfp4, float32", "mxfp4, bfloat16"],
)
def test_a_checkpoint_whose_base_is_decoded_is_restored_over_a_packed_one(
    config, change, section, bf16, tmp_path, monkeypatch
):
    """As zinf saved them before it kept published weights in few bits."""
    stored(config(), tmp_path / "model", change, section)
    batch, tx = {"input_ids": tokens()}, optax.adam(1e-2)
    settings = on_tier("host", tmp_path) | {"adapter": {"r": 2}}
    settings["bf16"] = {"enabled": bf16}
    old, new = tmp_path / "old", tmp_path / "new"

    def engine_of():
        return hf.initialize(hf.load(tmp_path / "model"), tx, settings, batch=batch)

    with monkeypatch.context() as patch:
        patch.setattr(hf.Model, "encodings", {})
        with engine_of() as engine:
            engine.step(batch)
            engine.save(old)
            wanted = engine.step(batch)["loss"]
    with engine_of() as engine:
        paths = [a.path for a in engine.residents.specs if a.role == Role.PARAM]
        codes = {path: engine.get(path) for path in paths if path.endswith("/codes")}
        engine.restore(old)
        assert codes
        for path, value in codes.items():
            np.testing.assert_array_equal(engine.get(path), value)
        engine.save(new)
        found = engine.step(batch)["loss"]
        assert found == pytest.approx(wanted, rel=1e-3 if bf16 else 1e-6)
        change_files(tmp_path / "model", other_codes, None)
        path = next(path for path in paths if path.endswith("lora_B"))
        trained = engine.get(path)
        with pytest.raises(ValueError, match="not what the files of .* decode to"):
            engine.restore(old)
        np.testing.assert_array_equal(engine.get(path), trained)
        with Saved(old) as one, Saved(new) as two:
            before, after = (MergedTensors(engine.adapted, x) for x in (one, two))
            for name, spec in before.specs.items():
                box = whole_box(spec.shape)
                values = (np.float32(x.read(name, box)) for x in (before, after))
                # A base in bfloat16 is rounded once more where it is merged.
                rounding = {"rtol": 2**-7, "atol": 2**-9} if bf16 else {"rtol": 0}
                np.testing.assert_allclose(*values, **rounding, err_msg=name)


def other_codes(tensors):
    """Change a bit of each code of a weight."""
    for name, value in tensors.items():
        if value.dtype == torch.uint8 and name.endswith(("blocks", "down_proj.weight")):
            tensors[name] = value ^ 1
