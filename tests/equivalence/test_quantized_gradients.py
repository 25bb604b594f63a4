"""Gradients that are exchanged as 4-bit integers (ZeRO++ qgZ)."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import zinf
from tests.equivalence.models import Model
from tests.equivalence.test_quantized_weights import (
    ADAM,
    DIM,
    LAYERS,
    NUM_DEVICES,
    QUANTIZED,
    WHOLE,
    WIDE,
    draw,
    init,
    planner,
)
from tests.equivalence.training import (
    BOTH,
    BOUND,
    ON_HOST,
    OPTIMIZERS,
    Run,
    Setting,
    assert_bit_equal,
    mesh_of,
    train,
)
from zinf.core.engine.initialize import make_planner
from zinf.core.sharding import Nibbles
from zinf.core.step.compiled import compiled_runs, step_traffic
from zinf.core.topology import collectives_of, parse_topology

QGZ = (("zero_optimization.zero_quantized_gradients", True),)
PARTS = Setting(mesh="8", more=QGZ)
# Within nodes of 4 devices, then between two of them.
LOCO = "zero_optimization.zeropp_loco_param"
TWO_LEVELS = (("zero_optimization.zero_hpz_partition_size", 4),)
# A number of a part is rounded by at most 1/14 of the largest in its block, by less on
# average, and the signs differ: norms differ by up to 0.6% in three steps.
LOSS_BOUND = 2e-2


def unrolled(params: Any, batch: Any) -> jax.Array:
    """The loss of `WIDE`, without a loop over its layers."""
    x = batch["x"] @ params["first"]
    for i in range(LAYERS):
        x = x + jnp.tanh(x @ params["layers"][i])
    out = params["scale"] * (x @ params["last"])
    return jnp.mean(jnp.square(out - batch["y"]))


UNROLLED = Model("unrolled", init, unrolled, draw, size=16, config=WIDE.config)


def rounded_gradient(loss: Any, params: Any, batch: Any) -> Any:
    """The gradient with the parts of each device rounded, and then added."""
    whole = jax.tree.map(jnp.zeros_like, params)
    for rows in range(NUM_DEVICES):
        size = len(batch["x"]) // NUM_DEVICES
        own = {k: x[rows * size : (rows + 1) * size] for k, x in batch.items()}
        grads = jax.grad(loss)(params, own)
        whole = jax.tree.map(lambda t, g: t + _rounded(g / NUM_DEVICES), whole, grads)
    return whole


def _rounded(part: jax.Array) -> jax.Array:
    if part.ndim < 2:
        return part
    pieces = []
    for piece in jnp.split(part, NUM_DEVICES, axis=1):
        sent = [x[None] for x in Nibbles().encode(piece)]
        pieces += list(Nibbles().decode(sent, piece.shape, piece.dtype))
    return jnp.concatenate(pieces, axis=1)


def norm_of(grads: Any) -> float:
    return float(jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads))))


@pytest.fixture(scope="module")
def found() -> Run:
    return train(WIDE, PARTS, ADAM)


@pytest.mark.slow
def test_the_norm_is_of_the_gradient_that_is_applied(found):
    batch = {k: jnp.asarray(x) for k, x in WIDE.batches(1)[0].items()}
    expected = norm_of(rounded_gradient(WIDE.loss, init(), batch))
    whole = norm_of(jax.grad(WIDE.loss)(init(), batch))
    # A number next to the middle of two integers may be rounded the other way.
    assert found.grad_norms[0] == pytest.approx(expected, rel=1e-5)
    assert abs(found.grad_norms[0] / whole - 1) > 1e-4


@pytest.mark.slow
def test_losses_are_near_those_of_whole_gradients_and_equal_on_all_tiers(found):
    assert BOUND < found.deviation(train(WIDE, WHOLE, ADAM)) <= LOSS_BOUND
    assert_bit_equal(train(WIDE, Setting(ON_HOST, mesh="8", more=QGZ), ADAM), found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "more"), [("8", QGZ), ("2x4", QGZ + TWO_LEVELS + QUANTIZED)]
)
def test_a_fused_step_exchanges_as_a_streamed_one(mesh, more):
    # Microbatches are added up before the exchange, and their norm clips.
    streamed, fused = (
        train(UNROLLED, Setting(place, BOTH, mesh=mesh, more=more), ADAM)
        for place in (ON_HOST, "fused")
    )
    assert fused.deviation(streamed) <= 1e-4


@pytest.mark.slow
def test_an_eighth_of_the_bytes_is_sent_once_a_step():
    sent = {}
    for number in (1, 2):
        config = {"segment": {}, "gradient_accumulation_steps": number}
        made = planner(PARTS, **config).plan_batch(WIDE.batches(1)[0])
        sent[number] = step_traffic(compiled_runs(made))["all-to-all"].sent_bytes
    # Half a byte for each number and two for each block, to all others.
    leaves = [(16 * DIM, 32), (LAYERS * DIM * DIM, 256), (DIM * 128, 16)]
    others = (NUM_DEVICES - 1) / NUM_DEVICES
    expected = sum(n * (1 / 2 + 2 / block) * others for n, block in leaves)
    assert sent[1] == pytest.approx(expected, rel=1e-3)
    assert sent[2] == sent[1]
    assert sent[1] < 4 * sum(n for n, _ in leaves) * others / 7


@pytest.mark.slow
def test_errors_are_state_that_rests_and_is_saved_as_other_state(tmp_path):
    """Bit-equal on tiers and after a restore; refused on other devices."""
    more = (*QGZ, *TWO_LEVELS, (f"{LOCO}.reset_T", 3))
    expected = train(WIDE, Setting(mesh="2x4", more=more), ADAM)
    on_host = Setting(ON_HOST, mesh="2x4", more=more)
    assert_bit_equal(train(WIDE, on_host, ADAM), expected)
    without = train(WIDE, Setting(mesh="2x4", more=QGZ + TWO_LEVELS), ADAM)
    assert expected.losses[:2] == without.losses[:2]
    assert expected.losses[2] != without.losses[2]
    batches, found = WIDE.batches(6), {}
    for name, saved in (("whole", None), ("resumed", 4)):
        with engine(more) as first:
            losses = [first.step(b)["loss"] for b in batches[:saved]]
            if saved:
                first.save(tmp_path / "saved")
        if saved:
            with engine(more) as second:
                second.restore(tmp_path / "saved")
                losses += [second.step(b)["loss"] for b in batches[saved:]]
        found[name] = losses
    assert found["resumed"] == found["whole"]
    with engine((*QGZ, (f"{LOCO}.reset_T", 3))) as one_level:
        one_level.prepare(batches[0])
        with pytest.raises(ValueError, match="error1/first.*(?s:.)*error feedback"):
            one_level.restore(tmp_path / "saved")


def engine(more: tuple[tuple[str, Any], ...]) -> Any:
    mesh = "2x4" if TWO_LEVELS[0] in more else "8"
    config = Setting(ON_HOST, mesh=mesh, more=more).config(WIDE, "")
    arguments = WIDE.loss, WIDE.init, OPTIMIZERS[ADAM], config
    return zinf.initialize(*arguments, mesh=mesh_of(mesh))


@pytest.mark.slow
def test_a_fused_step_feeds_back_as_a_streamed_one():
    more = (*QGZ, (f"{LOCO}.err_beta", 0.5))
    streamed, fused = (
        train(UNROLLED, Setting(place, BOTH, mesh="8", more=more), ADAM)
        for place in (ON_HOST, "fused")
    )
    assert fused.deviation(streamed) <= 1e-4


NODES, LOCAL, WIDTH = 2, 8, 4096
NUMBERS = 8 * WIDTH**2


def sent_by_gpus(*more: tuple[str, Any], **mesh: int) -> Counter[tuple[str, int]]:
    """Bytes that one of 16 H200 on two nodes sends in a step, by kind and group."""
    topology, dim = parse_topology(f"h200:{NODES * LOCAL}"), WIDTH
    on = {"mesh": zinf.make_mesh(topology.devices(), **mesh), "topology": topology}

    def init() -> dict[str, jax.Array]:
        return {"up": jnp.zeros((dim, 4 * dim)), "down": jnp.zeros((4 * dim, dim))}

    def loss(params: Any, batch: Any) -> jax.Array:
        hidden = jax.nn.gelu(batch["x"].astype(jnp.bfloat16) @ params["up"])
        return jnp.mean(jnp.square((hidden @ params["down"]).astype(jnp.float32)))

    batch = {"x": jax.ShapeDtypeStruct((16, 1024, dim), jnp.float32)}
    config = Setting(mesh="8", more=more).config(WIDE, "")
    config |= {"bf16": {"enabled": True}, "execution": "fused", "memory": {}}
    config["zero_optimization"] |= {"offload_param": None, "offload_optimizer": None}
    made = make_planner(loss, init, OPTIMIZERS[ADAM], config, **on)
    ((_, code, _),) = made.plan_batch(batch).executables()
    sent: Counter[tuple[str, int]] = Counter()
    for one in collectives_of(code):
        sent[one.kind, one.group_size] += one.sent_bytes
    return sent


@pytest.mark.slow
@pytest.mark.gpu_compiler
def test_gpus_send_a_quarter_of_the_bytes_of_bfloat16():
    """Between the devices of a node, and between two nodes of eight H200."""
    plain = sent_by_gpus()["reduce-scatter", NODES * LOCAL]
    assert plain == 2 * NUMBERS * 15 / 16
    sent = sent_by_gpus(*QGZ)
    within, between = sent["all-to-all", LOCAL], sent["all-to-all", NODES]
    assert within + between <= 0.27 * plain
    # Between nodes each device has to send half of what the node's devices share.
    assert between <= 0.27 * (2 * NUMBERS / LOCAL / 2)
    assert ("reduce-scatter", NODES * LOCAL) not in sent


@pytest.mark.slow
@pytest.mark.gpu_compiler
def test_all_of_zeropp_sends_a_quarter_of_the_bytes_of_zero_3_between_nodes():
    """qwZ, hpZ and qgZ: updated weights in 8 bits and sums in 4, each once a step."""
    qwz = ("zero_optimization.zero_quantized_weights", True)
    hpz = ("zero_optimization.zero_hpz_partition_size", LOCAL)
    sent = sent_by_gpus(*QGZ, qwz, hpz, num_replicas=NODES)
    # A byte a number, and a scale of two bytes for 128 of them.
    gathered = NUMBERS * (1 + 2 / 128) * (LOCAL - 1) / LOCAL
    assert sent["all-gather", LOCAL] == pytest.approx(gathered, rel=1e-3)
    own = NUMBERS / (NODES * LOCAL)
    # A byte a number, and a scale of four bytes for 256 of them. No shard moves.
    assert sent["all-gather", NODES] == own * (1 + 4 / 256)
    assert not [kind for kind, _ in sent if kind == "collective-permute"]
    between = sent["all-to-all", NODES] + sent["all-gather", NODES]
    # ZeRO-3 gathers weights in both passes, and adds gradients up.
    assert between <= 0.27 * (3 * 2 * own)
    assert not [key for key in sent if key[1] == NODES * LOCAL and sent[key] > 100]


def test_the_plan_says_which_gradients_go_as_they_are():
    made = planner(PARTS).plan_batch(WIDE.batches(1)[0])
    said = (
        "Gradients of 3 leaves are exchanged as 4-bit integers; as they are, 1 with "
        "one dim or few numbers (scale)."
    )
    assert said in made.plan.why
    assert "exchange gradient/layers[0:1]" in str(made.plan.listing())


def test_a_fused_step_of_a_loop_over_layers_is_refused():
    batch = WIDE.batches(1)[0]
    with pytest.raises(NotImplementedError, match="1 leaves .layers."):
        planner(PARTS, execution="fused").plan_batch(batch)
    # Left to zinf, it is streamed.
    made = planner(PARTS, execution="auto").plan_batch(batch)
    assert not made.plan.is_fused
    assert "Not fused, because the gradients of 1 leaves" in made.plan.why


def test_on_one_device_nothing_is_exchanged():
    one = planner(Setting(more=QGZ))
    batch = WIDE.batches(1)[0]
    assert not one.layouts(one.trace(jax.eval_shape(lambda: batch))).parts
