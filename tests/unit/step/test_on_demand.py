"""Experts on demand beside adapters, and in few bits: fewer bytes, the same numbers."""

import jax
import numpy as np
import optax
import pytest

import zinf
from tests.tiers import streamed
from zinf.core.plan import Link
from zinf.moe import experts

NUM_EXPERTS, K, DIM, HIDDEN, TOKENS = 32, 2, 8, 16, 6
EXPERT_BYTES = 2 * DIM * HIDDEN * 4
MICROBATCHES = 2
RNG = np.random.default_rng(0)


def normal(*shape):
    return (RNG.normal(size=shape) / np.sqrt(shape[-2])).astype(np.float32)


def layer():
    return {
        "dense": normal(DIM, DIM),
        "router": normal(DIM, NUM_EXPERTS),
        "up": normal(NUM_EXPERTS, DIM, HIDDEN),
        "down": normal(NUM_EXPERTS, HIDDEN, DIM),
    }


PARAMS = {"layers": [layer() for _ in range(2)], "head": normal(DIM, DIM)}
BATCH = {"x": RNG.normal(size=(MICROBATCHES, TOKENS, DIM)).astype(np.float32)}


def one_expert(own, rows):
    return jax.nn.silu(rows @ own["up"]) @ own["down"]


def features(params, batch):
    x = batch["x"].reshape(-1, DIM)
    for own in params["layers"]:
        x = x + jax.numpy.tanh(x @ own["dense"])
        gate, choice = jax.lax.top_k(jax.nn.softmax(x @ own["router"]), K)
        x = x + experts(
            one_expert, {n: own[n] for n in ("up", "down")}, x, choice, gate
        )
    return x @ params["head"]


def loss(params, batch):
    return jax.numpy.mean(features(params, batch) ** 2)


def make(tier, folder, num_slots, batch=BATCH, **adapter):
    """The transform of the loss, and an engine that trains adapters.

    Args:
        num_slots: experts in the dtype of the parameters that fit the slots; None: as
            the plan chooses.
    """
    asked = num_slots if num_slots in (None, "off") else num_slots * EXPERT_BYTES
    paths = {"nvme": [str(folder)]} if tier == "nvme" else {}
    rest = {"persistence_threshold": 0, "gradient_accumulation_steps": MICROBATCHES}
    config = streamed(tier, memory={"experts": asked, **paths}, **rest)
    how = {"r": 2, "target_modules": ["dense"], **adapter}
    adapted = zinf.adapt.lora(loss, PARAMS, batch={"x": batch["x"][:1]}, **how)
    given = adapted.loss_fn, adapted.params, optax.adam(1e-2), adapted.config(config)
    return adapted, zinf.initialize(*given, batch=batch)


def trained(*arguments, **options):
    """Losses and norms of three steps, and the bytes that the last one fetched."""
    adapted, engine = make(*arguments, **options)
    with engine:
        found = [engine.step(BATCH) for _ in range(3)]
        numbers = [(each["loss"], each["grad_norm"]) for each in found]
        moved = engine.last_step.moved_bytes
        values = engine.apply(adapted.applied(features), {"x": BATCH["x"][:1]})
    # From nvme, experts are counted on the link of the drive.
    return numbers, values, moved[Link.H2D] + moved[Link.NVME_READ]


@pytest.mark.parametrize(
    ("base", "tiers"),
    [
        (None, ("cpu", "nvme")),
        pytest.param(None, ("none",), marks=pytest.mark.slow),
        ("int8", ("cpu",)),
    ],
)
def test_frozen_experts_are_read_by_choice_to_the_same_bits(base, tiers, tmp_path):
    how = {"quantize_base": base, "quantize_block": DIM} if base else {}
    numbers, values, whole_bytes = trained("cpu", tmp_path, "off", **how)
    for tier in tiers:
        # As many slots as one microbatch may need, of the experts of both layers.
        found = trained(tier, tmp_path, TOKENS * K, **how)
        assert found[0] == numbers
        np.testing.assert_array_equal(found[1], values)
        if tier == "cpu":
            assert found[2] < 0.7 * whole_bytes


def test_the_plan_says_which_experts_are_read_and_why(tmp_path):
    _, engine = make("cpu", tmp_path, None)
    with engine:
        # What a few bytes take is nothing beside beginning to read them.
        assert "With those alone that are chosen" in str(engine.plan)
    _, engine = make("cpu", tmp_path, TOKENS * K)
    with engine:
        assert "reads the experts that its tokens choose" in str(engine.plan)
    many = {"x": np.zeros((MICROBATCHES, 64, DIM), np.float32)}
    _, engine = make("cpu", tmp_path, None, many)
    with engine:
        said = "64 tokens choose 2 each, and so 31.5 of 32"
        assert said in str(engine.plan)
        assert not engine._runners.current.streamed.segmented.program.chosen


def test_slots_keep_what_steps_read_until_it_is_set(tmp_path):
    losses, moved = [], []
    for num_slots in ("off", 2 * NUM_EXPERTS):
        _, engine = make("cpu", tmp_path, num_slots)
        with engine:
            for _ in range(2):
                engine.step(BATCH)
                moved.append(engine.last_step.moved_bytes[Link.H2D])
            engine.set("base/layers/1/down", -PARAMS["layers"][1]["down"])
            losses.append(engine.step(BATCH)["loss"])
    assert losses[0] == losses[1]
    whole, again, _, warm = moved
    assert whole == again
    assert warm < 0.1 * whole


def test_slots_keep_no_experts_that_steps_change():
    """Layer 1 is trained, and a function reads its experts to the slots of layer 0."""
    memory = {"experts": NUM_EXPERTS * EXPERT_BYTES}
    config = streamed("cpu", memory=memory, persistence_threshold=0)
    config |= {"frozen": ["layers/0/*"]}
    batch = {"x": BATCH["x"][:1]}
    given = loss, PARAMS, optax.adam(1e-1), config
    with zinf.initialize(*given, batch=batch) as engine:
        engine.apply(features, batch)
        engine.step(batch)
        wanted = features(engine.params(), batch)
        found = engine.apply(features, batch)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
