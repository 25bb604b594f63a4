"""`adam_update`: every implementation against exact arithmetic and against optax."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zinf_kernels.adam import adam_scalars, adam_update, adam_update_scalars
from zinf_kernels.adam.api import EXISTING
from zinf_kernels.adam.arguments import Arrays, Scalars
from zinf_kernels.adam.cases import ADAM, ADAMW, Case, cases
from zinf_kernels.adam.cpu import compiled
from zinf_kernels.arrays import BFLOAT16, FLOAT16, FLOAT32
from zinf_kernels.threads import LEAST_NUMEL, usable_cores

CASES = tuple(cases())
LEARNING_RATE = 3e-4
# Half a unit in the last place of 1, in float32 and in bfloat16.
E = 2.0**-24
E_BFLOAT16 = 2.0**-8
SMALLEST = 2.0**-126

by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
by_implementation = pytest.mark.parametrize("implementation", EXISTING)


def update(case: Case, arrays: Arrays, *, step: int, **options: Any) -> None:
    adam_update(
        **vars(arrays),
        step=step,
        learning_rate=LEARNING_RATE,
        factor=case.factor,
        **case.hyperparameters,
        **options,
    )


def copied(arrays: Arrays) -> Arrays:
    return Arrays(*(None if a is None else a.copy() for a in vars(arrays).values()))


def bits(arrays: Arrays) -> list[bytes]:
    return [a.tobytes() for a in vars(arrays).values() if a is not None]


@dataclass(frozen=True)
class Exact:
    """A step in float64 (exact for our purpose) and the bounds of the docstring."""

    values: dict[str, np.ndarray]
    bounds: dict[str, np.ndarray]


def exact(arrays: Arrays, scalars: Scalars) -> Exact:
    s = {name: float(value) for name, value in vars(scalars).items()}
    old = [np.asarray(a, np.float64) for a in list(vars(arrays).values())[:4]]
    master, m, v, gradient = old
    g = s["factor"] * gradient
    new_m = s["one_minus_b1"] * g + s["b1"] * m
    new_v = s["one_minus_b2"] * g**2 + s["b2"] * v
    root = np.sqrt(new_v / s["correction2"] + s["eps_root"])
    slope = 1 / s["correction1"] / (root + s["eps"])
    change, decay = new_m * slope, s["weight_decay"] * master
    new = master - s["learning_rate"] * (change + decay)
    error_m = 3 * E * (abs(s["one_minus_b1"] * g) + abs(s["b1"] * m))
    error_change = 12 * E * (abs(change) + abs(decay)) + error_m * slope
    is_short = arrays.m.dtype == BFLOAT16
    bounds = {
        "master": E * abs(new) + s["learning_rate"] * error_change,
        "m": error_m + (E_BFLOAT16 * (abs(new_m) + error_m) if is_short else 0),
        "v": 6 * E * new_v,
    }
    return Exact({"master": new, "m": new_m, "v": new_v}, bounds)


def assert_within(arrays: Any, expected: Exact, *, times: float = 1.0) -> None:
    for name, value in expected.values.items():
        error = abs(np.asarray(getattr(arrays, name), np.float64) - value)
        excess = error - times * expected.bounds[name] - 4 * SMALLEST
        assert (excess <= 0).all(), (name, excess.max())


@cache
def optax_step(m_dtype: Any, copy_dtype: Any, hyperparameters: Any) -> Any:
    kwargs = dict(hyperparameters)
    tx = optax.adamw(LEARNING_RATE, mu_dtype=m_dtype, **kwargs)

    @jax.jit
    def step(master, state, gradient, factor):
        gradient = gradient.astype(jnp.float32) * factor
        change, state = tx.update(gradient, state, master)
        master = optax.apply_updates(master, change)
        copy = None if copy_dtype is None else master.astype(copy_dtype)
        return master, state, copy

    return tx, step


def optax_update(case: Case, arrays: Arrays, *, step: int) -> Arrays:
    """What `optax.adamw` under jit makes of the arrays."""
    key = tuple(case.hyperparameters.items())
    tx, function = optax_step(case.m_dtype, case.copy_dtype, key)
    adam, *rest = tx.init(jnp.asarray(arrays.master))
    # XLA may use the memory of NumPy arrays in place, which the other side updates.
    given = jax.tree.map(jnp.array, copied(arrays).__dict__)
    adam = adam._replace(count=jnp.int32(step - 1), mu=given["m"], nu=given["v"])
    factor = np.float32(case.factor)
    master, (adam, *_), copy = function(
        given["master"], (adam, *rest), given["gradient"], factor
    )
    made = [None if x is None else np.array(x) for x in (copy,)]
    moments = np.array(adam.mu), np.array(adam.nu)
    return Arrays(np.array(master), *moments, arrays.gradient, *made)


@pytest.mark.sampled(8)
@by_implementation
@by_case
def test_a_step_is_within_the_stated_bound_of_exact_arithmetic(case, implementation):
    for step in (1, 2, 1000):
        arrays = case.make(seed=step)
        scalars = adam_scalars(
            step=step,
            learning_rate=LEARNING_RATE,
            factor=case.factor,
            m_dtype=case.m_dtype,
            **case.hyperparameters,
        )
        expected = exact(arrays, scalars)
        update(case, arrays, step=step, implementation=implementation)
        assert_within(arrays, expected)
        if arrays.copy is not None:
            expected_copy = arrays.master.astype(case.copy_dtype)
            assert arrays.copy.tobytes() == expected_copy.tobytes()


@pytest.mark.sampled(8)
@by_case
def test_steps_are_within_the_bound_of_optax_under_jit(case):
    """Each step starts from the arrays of the last, so that errors cannot hide."""
    arrays = case.make()
    for step in range(1, 6):
        arrays = replace(arrays, gradient=case.gradients(seed=step))
        scalars = adam_scalars(
            step=step,
            learning_rate=LEARNING_RATE,
            factor=case.factor,
            m_dtype=case.m_dtype,
            **case.hyperparameters,
        )
        expected = exact(arrays, scalars)
        theirs = optax_update(case, arrays, step=step)
        update(case, arrays, step=step)
        assert_within(arrays, expected)
        assert_within(theirs, expected)


# With float16 gradients XLA rounds one product or the other by the length of the array.
SAME_BITS = [c for c in CASES if c.numel > 500 and c.gradient_dtype != FLOAT16]


@pytest.mark.parametrize("case", SAME_BITS, ids=lambda case: case.name)
def test_cpu_has_the_bits_of_optax_under_jit_on_xla_cpu(case):
    """Not promised for ever: LLVM decides which product of a sum XLA rounds."""
    if jax.default_backend() != "cpu":
        pytest.skip("optax runs on a device that is not the CPU")
    arrays = theirs = case.make()
    arrays = copied(arrays)
    for step in range(1, 20):
        gradient = case.gradients(seed=step)
        arrays = replace(arrays, gradient=gradient)
        theirs = optax_update(case, replace(theirs, gradient=gradient), step=step)
        update(case, arrays, step=step)
    assert bits(arrays) == bits(theirs)


def test_number_of_threads_and_position_in_memory_change_no_bit():
    long = Case("long", 5 * LEAST_NUMEL + 7, BFLOAT16, BFLOAT16, BFLOAT16)
    start = long.make()
    expected = copied(start)
    update(long, expected, step=3, num_threads=1)
    for num_threads, offset in product((2, 3, 7, None), (0, 1, 3)):
        moved = Arrays(
            *(
                np.concatenate([np.zeros(offset, a.dtype), a])[offset:]
                for a in vars(start).values()
            )
        )
        update(long, moved, step=3, num_threads=num_threads)
        assert bits(moved) == bits(expected)


def test_arrays_may_lie_at_different_offsets_in_their_cache_lines():
    case = Case("offsets", 1003, BFLOAT16, copy_dtype=BFLOAT16)
    start = case.make()
    expected = copied(start)
    update(case, expected, step=3)
    moved = Arrays(
        *(
            np.concatenate([np.zeros(k, a.dtype), a])[k:]
            for k, a in enumerate(vars(start).values())
        )
    )
    update(case, moved, step=3)
    assert bits(moved) == bits(expected)


def test_a_part_of_an_array_gets_the_bits_of_the_whole():
    case = Case("whole", 1003)
    whole = case.make()
    parts = copied(whole)
    update(case, whole, step=3)
    for cut in (slice(0, 1), slice(1, 18), slice(18, 1003)):
        part = Arrays(*(None if a is None else a[cut] for a in vars(parts).values()))
        update(case, part, step=3)
    assert bits(parts) == bits(whole)


def test_many_threads_may_update_at_once_while_xla_computes():
    case = Case("shared", 2 * LEAST_NUMEL + 1)
    start = case.make()
    expected = copied(start)
    update(case, expected, step=3, num_threads=1)
    matmul = jax.jit(lambda x: jnp.tanh(x @ x))
    square = jnp.full((256, 256), 1e-3, jnp.float32)

    def work(_: int) -> bool:
        mine = copied(start)
        pending = matmul(square)
        update(case, mine, step=3, num_threads=4)
        pending.block_until_ready()
        return bits(mine) == bits(expected)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(24)))


SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e30, -1e30, 1e-30, 1.0])


@by_implementation
def test_infinities_and_nans_go_where_they_go_in_optax(implementation):
    values = np.array([*product(SPECIAL, repeat=4)], np.float32)
    # Padded, so that both the vectors and what is left after them see every value.
    master, m, v, gradient = np.tile(values, (1, 2)).reshape(-1, 4).T.copy()
    v = abs(v)
    copy = np.zeros(len(master), BFLOAT16)
    for hyperparameters, step in product((ADAMW, ADAM | {"eps": 0.0}), (1, 10)):
        case = Case("special", len(master), copy_dtype=BFLOAT16)
        case = replace(case, hyperparameters=hyperparameters)
        arrays = copied(Arrays(master, m, v, gradient, copy))
        theirs = optax_update(case, arrays, step=step)
        with np.errstate(all="ignore"):
            update(case, arrays, step=step, implementation=implementation)
        for name in ("master", "m", "v", "copy"):
            ours = np.asarray(getattr(arrays, name), np.float32)
            optax_s = np.asarray(getattr(theirs, name), np.float32)
            assert (np.isnan(ours) == np.isnan(optax_s)).all(), name
            for infinity in (np.inf, -np.inf):
                assert ((ours == infinity) == (optax_s == infinity)).all(), name


def test_moments_that_decay_below_the_normal_numbers_become_zero():
    arrays = Arrays(*(np.full(40, x, np.float32) for x in (0.5, 2e-38, 2e-38, 0)), None)
    for step in range(1, 20):
        update(Case("decay", 40), arrays, step=step)
        for moment in (arrays.m, arrays.v):
            assert ((moment == 0) | (abs(moment) >= SMALLEST)).all()
    assert (arrays.m == 0).all()


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
def test_the_copy_is_rounded_as_by_numpy_for_every_kind_of_number(dtype):
    """With learning rate 0 the master stays, so the copy is that of any float32."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    # In bfloat16: exact, just under, at and just over a tie.
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    master = (upper[:, None] | lower).reshape(-1).view(np.float32)
    zero = np.zeros_like(master)
    copy = np.zeros(len(master), dtype)
    before = master.copy()
    settings = {"learning_rate": 0.0, "step": 1, "b1": 0.9, "b2": 0.9, "eps": 1e-8}
    adam_update(master, zero.copy(), zero.copy(), zero, copy=copy, **settings)
    # A signalling NaN comes back quiet.
    is_nan = np.isnan(before)
    assert (np.isnan(master) == is_nan).all()
    assert master[~is_nan].tobytes() == before[~is_nan].tobytes()
    with np.errstate(over="ignore", invalid="ignore"):
        expected = before.astype(dtype)
    assert (np.isnan(copy.astype(np.float32)) == is_nan).all()
    assert copy[~is_nan].tobytes() == expected[~is_nan].tobytes()


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
def test_every_short_gradient_is_widened_exactly(dtype):
    """With b1 = 0 and factor 1 the average is the gradient."""
    gradient = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    wide = gradient.astype(np.float32)
    master, m, v = np.zeros((3, len(wide)), np.float32)
    settings = {"learning_rate": 0.0, "step": 1, "b1": 0.0, "b2": 0.0, "eps": 1e-8}
    adam_update(master, m, v, gradient, **settings)
    expected = np.where(abs(wide) < SMALLEST, 0, wide)
    np.testing.assert_array_equal(m, expected)


KINDS = [
    *product((FLOAT32, BFLOAT16), (FLOAT32, BFLOAT16, FLOAT16), (None,), (True,)),
    *product((FLOAT32,), (BFLOAT16, FLOAT16), (BFLOAT16, FLOAT16), (False, True)),
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind)))
def test_every_loop_is_vectorised(kind):
    """A scalar loop is five times as slow, and nothing else would show it."""
    (code,) = compiled(*kind).inspect_llvm().values()
    assert "x float> @llvm.sqrt.v" in code


def test_without_decay_an_infinite_parameter_stays_infinite():
    arrays = Case("adam", 40, hyperparameters=ADAM).make()
    arrays.master[:] = np.inf
    update(Case("adam", 40, hyperparameters=ADAM), arrays, step=1)
    assert (arrays.master == np.inf).all()


def test_scalars_that_are_given_are_used_as_they_are():
    case = Case("scalars", 100)
    one, other = case.make(), case.make()
    update(case, one, step=7)
    scalars = adam_scalars(step=7, learning_rate=LEARNING_RATE, **case.hyperparameters)
    adam_update_scalars(**vars(other), scalars=scalars)
    assert bits(one) == bits(other)
    changed = replace(scalars, correction1=np.float32(1))
    adam_update_scalars(**vars(case.make()), scalars=changed)
    assert bits(other) == bits(one)


def good() -> dict[str, Any]:
    arrays = Case("good", 64, copy_dtype=BFLOAT16).make()
    settings = {"step": 1, "learning_rate": 0.1, "b1": 0.9, "b2": 0.9, "eps": 1e-8}
    return vars(arrays) | settings


def read_only() -> np.ndarray:
    array = np.zeros(64, np.float32)
    array.flags.writeable = False
    return array


def odd_address() -> np.ndarray:
    return np.zeros(64 * 4 + 1, np.uint8)[1:].view(np.float32)


WRONG = {
    "length": ({"v": np.zeros(63, np.float32)}, "v has 63 elements and master has 64"),
    "dtype": ({"v": np.zeros(64, BFLOAT16)}, "v is bfloat16, not float32"),
    "float64": ({"gradient": np.zeros(64)}, "float32 or bfloat16 or float16"),
    "2d": ({"m": np.zeros((8, 8), np.float32)}, "contiguous 1-D"),
    "strided": ({"m": np.zeros(128, np.float32)[::2]}, "strides"),
    "read_only": ({"master": read_only()}, "read-only"),
    "address": ({"master": odd_address()}, "multiple of its item size"),
    "step": ({"step": 0}, "first update is step 1"),
    "b1": ({"b1": 1.0}, "b1 is 1.0"),
    "b2": ({"b2": -0.1}, "b2 is -0.1"),
    "num_threads": ({"num_threads": 0}, "at least 1"),
    "implementation": ({"implementation": "cuda"}, "'cpu', 'reference'"),
    "names": ({"implementation": ("cuda", "tpu")}, "'cuda' or 'tpu'"),
}


@pytest.mark.parametrize(("wrong", "message"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_updated_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        adam_update(**good() | wrong)


def test_arrays_that_share_memory_are_refused():
    memory = np.zeros(100, np.float32)
    with pytest.raises(ValueError, match="master and gradient share memory"):
        adam_update(**good() | {"master": memory[:64], "gradient": memory[36:]})


def test_an_array_of_jax_is_refused():
    with pytest.raises(TypeError, match="gradient is a .*needs NumPy arrays"):
        adam_update(**good() | {"gradient": jnp.zeros(64)})


def test_a_read_only_gradient_is_enough():
    adam_update(**good() | {"gradient": read_only()})


def test_the_first_implementation_that_exists_is_taken():
    names = ("cuda", "reference", "cpu")
    one, other = good(), good()
    adam_update(**one, implementation=names)
    adam_update(**other, implementation="reference")
    assert one["master"].tobytes() == other["master"].tobytes()


def test_usable_cores_are_at_most_those_of_the_machine():
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
