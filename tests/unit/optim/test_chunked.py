"""Updates by pieces give the bits of whole blocks, and take less memory."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zinf.optim import chunked
from zinf.optim.chunked import chunked_updates
from zinf.optim.separate import separate
from zinf.optim.update import Unit, compile_advance, compile_updates

CHUNK = 1024
FACTOR = np.float32(0.37)
CPU = jax.devices("cpu")[0]
# Several pieces, the last of them short; whole pieces; less than one.
SHAPES = {"odd": (67, 33), "even": (4, CHUNK), "small": (5, 7)}
PARAMS = {path: jax.ShapeDtypeStruct(s, np.float32) for path, s in SHAPES.items()}
NUMBERS = {path: sorted(SHAPES).index(path) for path in SHAPES}
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": optax.adamw(optax.cosine_decay_schedule(1e-2, 5)),
    "nadam": optax.nadam(1e-2),
    "lion": optax.lion(1e-2),
    "adagrad": optax.adagrad(1e-2),
    "rmsprop": optax.rmsprop(1e-2, momentum=0.9),
    "adamax": optax.adamax(1e-2),
    "yogi": optax.yogi(1e-2),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunked, "CHUNK_NUMEL", CHUNK)


def unit_of(path, gradient_dtype=np.float32, compute_dtype=None):
    return Unit(NUMBERS[path], SHAPES[path], gradient_dtype, compute_dtype)


def normal(shape, dtype, seed):
    random = np.random.default_rng(seed)
    return random.standard_normal(shape).astype(np.float32).astype(dtype)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "dtypes", [(np.float32, None), (jnp.bfloat16, jnp.bfloat16)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pieces_together_have_the_bits_of_the_whole(name, dtypes):
    separated = separate(OPTIMIZERS[name], PARAMS)
    units = [unit_of("odd", *dtypes), unit_of("even", *dtypes)]
    steps = compile_updates(separated, units, device=CPU).steps
    updates = chunked_updates(separated, units, device=CPU)
    advance = compile_advance(separated, device=CPU)
    for unit, step, update in zip(units, steps, updates, strict=True):
        leaf = separated.leaves[unit.leaf]
        found = [normal(unit.shape, np.float32, 0)]
        found += [np.zeros(unit.shape, s.spec.dtype) for s in leaf.states]
        num_operands = len(found)
        found += [] if dtypes[1] is None else [found[0].astype(dtypes[1])]
        expected = [x.copy() for x in found]
        shared = [s.value for s in separated.shared]
        for n in range(3):
            shared, values = advance(shared)
            gradient = normal(unit.shape, dtypes[0], n + 1)
            update(FACTOR, values, gradient, *found)
            operands = jax.device_put(expected[:num_operands], CPU)
            expected = list(map(np.array, step(FACTOR, values, gradient, *operands)))
        chex.assert_trees_all_equal(found, expected, strict=True)


def test_pieces_need_room_for_one_of_them():
    separated = separate(optax.rmsprop(0.1, momentum=0.9), PARAMS)
    units = [unit_of("odd"), unit_of("even")]
    # A gradient, a parameter and two states, and new ones of the latter; XLA has a few
    # pointers beside them.
    arrays_bytes = 4 * CHUNK * (4 + 3)
    for update in chunked_updates(separated, units, device=CPU):
        assert arrays_bytes <= update.workspace_bytes < arrays_bytes + 64


@pytest.mark.parametrize(
    ("tx", "unit"),
    [
        (optax.lion(0.1), unit_of("small")),
        (optax.lion(0.1), unit_of("odd", np.float16)),
        (optax.lamb(0.1), unit_of("odd")),
    ],
    ids=["one_piece", "float16_gradient", "not_elementwise"],
)
def test_others_keep_their_executable(tx, unit):
    separated = separate(tx, PARAMS)
    assert chunked_updates(separated, [unit], device=CPU) == [None]


def test_leaves_of_all_shapes_share_an_executable():
    separated = separate(optax.lion(0.1), PARAMS)
    updates = chunked_updates(separated, [unit_of("odd"), unit_of("even")], device=CPU)
    assert len({id(update.step.executable) for update in updates}) == 1
