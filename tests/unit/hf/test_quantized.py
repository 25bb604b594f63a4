"""Models of `transformers` run with weights in 8 and 4 bits, from every tier."""

import numpy as np
import pytest

pytest.importorskip("torchax", reason="needs torch and more: pip install '.[hf]'")

import jax

from tests.unit.hf.models import VOCAB, llama, save, tokens
from zinf import hf
from zinf.adapt.blocks import OF_BITS, Encoding
from zinf.plan import Link
from zinf.program import Role, Tier

PROMPTS = [np.random.default_rng(0).integers(3, VOCAB, length) for length in (3, 9, 16)]
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GROUP = 16


def settings(tier, folder, **groups):
    offload = {"device": {"device": "none", "host": "cpu"}.get(tier, tier)}
    found = {
        "zero_optimization": {"stage": 3, "offload_param": offload},
        "persistence_threshold": 0,
        "memory": {"nvme": str(folder)},
    }
    if groups:
        groups["group_size"] = GROUP
        found["weight_quantization"] = {"quantized_initialization": groups}
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "symmetric"), [(8, False), (4, True)])
def test_tokens_are_equal_on_all_tiers_and_fewer_bytes_move(bits, symmetric, tmp_path):
    save(llama(), tmp_path / "model")
    model = hf.load(tmp_path / "model")
    linear = sum(
        spec.nbytes // 4
        for name, spec in model.specs.items()
        if any(part in name for part in LINEAR)
    )
    others = 4 * (model.num_parameters - linear)
    # Codes, and one or two float32 numbers a group.
    wanted = others + linear * bits // 8 + linear // GROUP * (4 if symmetric else 8)
    found = []
    for tier in Tier:
        groups = {"num_bits": bits, "symmetric": symmetric}
        config = settings(tier, tmp_path / "nvme", **groups)
        with hf.open_model(model, config, rows=4, length=16) as engine:
            found.append(engine.generate(PROMPTS, max_new_tokens=8, rows=4))
            made = list(engine._forward._made.values())[-1]
            scores = engine.log_probabilities({"input_ids": tokens()})
            assert np.isfinite(scores).all()
            plan = engine.plan
        homes = {a: home for a, home in plan.homes.items() if a.role == Role.PARAM}
        assert set(homes.values()) == {tier}
        # Each of two layers is a segment of the same executable, as with plain weights.
        bodies = [s.body for s in made.decode.segmented.program.segments]
        assert bodies == [0, 1, 1, 2]
        if tier == Tier.NVME:
            assert made.decode.plan.link_bytes(Link.NVME_READ) == wanted
            assert plan.home_bytes[tier] == wanted
    assert found[0] == found[1] == found[2]
    assert len({tuple(text) for text in found[0]}) == len(PROMPTS)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
def test_logits_are_those_of_weights_that_are_rounded_by_hand(bits, tmp_path):
    save(llama(), tmp_path / "model")
    model = hf.load(tmp_path / "model")
    files, weights = model.open_weights()
    with files:
        params = {name: np.array(weights.whole(name)) for name in model.specs}
    encoding = Encoding(OF_BITS[bits, False], GROUP, 0)
    rounded = {
        name: np.asarray(encoding.decode(encoding.encode(x), x.shape))
        if any(part in name for part in LINEAR)
        else x
        for name, x in params.items()
    }
    batch = {"input_ids": tokens()}
    wanted = np.asarray(jax.jit(model.logits)(rounded, batch))
    plain = np.asarray(jax.jit(model.logits)(params, batch))
    config = settings("nvme", tmp_path / "nvme", num_bits=bits)
    with hf.open_model(model, config, rows=4, length=16) as engine:
        found = engine.apply(engine.adapted.applied(model.logits), batch)
    # Decoded in the segment: the same numbers, up to rounding of fused sums.
    largest = np.abs(wanted).max()
    np.testing.assert_allclose(found, wanted, atol=2e-6 * largest)
    assert np.abs(found - plain).max() > 1e-4 * largest


@pytest.mark.slow
def test_only_what_a_key_names_is_rounded(tmp_path):
    save(llama(), tmp_path / "model")
    model = hf.load(tmp_path / "model")
    config = settings("host", tmp_path / "nvme")
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
