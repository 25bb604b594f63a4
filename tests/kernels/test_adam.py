"""`adam_update`: every implementation against exact arithmetic."""

from functools import partial
from itertools import product
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.unit.refusals import refusals
from zinf_kernels.adam import adam_scalars, adam_update
from zinf_kernels.adam.api import EXISTING
from zinf_kernels.adam.arguments import Arrays, Scalars
from zinf_kernels.adam.cases import ADAM, ADAMW, Case, cases
from zinf_kernels.adam.cpu import compiled
from zinf_kernels.arrays import BFLOAT16, FLOAT16
from zinf_kernels.threads import LEAST_NUMEL

CASES = tuple(cases())
LEARNING_RATE = 3e-4
# Half a unit in the last place of 1, in float32 and in bfloat16.
E = 2.0**-24
E_BFLOAT16 = 2.0**-8
SMALLEST = 2.0**-126
# What tests of one number do not vary.
STILL = {"learning_rate": 0.0, "step": 1, "eps": 1e-8}

by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
by_implementation = pytest.mark.parametrize("implementation", EXISTING)


def scalars_of(case: Case, step: int) -> Scalars:
    return adam_scalars(
        step=step,
        learning_rate=LEARNING_RATE,
        factor=case.factor,
        m_dtype=case.m_dtype,
        **case.hyperparameters,
    )


def update(case: Case, arrays: Arrays, *, step: int = 3, **options: Any) -> None:
    adam_update(
        **vars(arrays),
        step=step,
        learning_rate=LEARNING_RATE,
        factor=case.factor,
        **case.hyperparameters,
        **options,
    )


def mapped(function: Any, arrays: Arrays) -> Arrays:
    return Arrays(*(None if a is None else function(a) for a in vars(arrays).values()))


def bits(arrays: Arrays) -> list[bytes]:
    return [a.tobytes() for a in vars(arrays).values() if a is not None]


def exact(arrays: Arrays, scalars: Scalars) -> tuple[dict[str, Any], dict[str, Any]]:
    """A step in float64, and the bounds of the docstring."""
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
    return {"master": new, "m": new_m, "v": new_v}, bounds


@by_implementation
@by_case
def test_a_step_is_within_the_stated_bound_of_exact_arithmetic(case, implementation):
    for step in (1, 2, 1000):
        arrays = case.make(seed=step)
        values, bounds = exact(arrays, scalars_of(case, step))
        update(case, arrays, step=step, implementation=implementation)
        for name, value in values.items():
            error = abs(np.asarray(getattr(arrays, name), np.float64) - value)
            assert (error <= bounds[name] + 4 * SMALLEST).all(), name
        if arrays.copy is not None:
            expected_copy = arrays.master.astype(case.copy_dtype)
            assert arrays.copy.tobytes() == expected_copy.tobytes()


def test_threads_positions_in_memory_and_cuts_change_no_bit():
    long = Case("long", 5 * LEAST_NUMEL + 7, BFLOAT16, BFLOAT16, BFLOAT16)
    start = long.make()
    expected = mapped(np.copy, start)
    update(long, expected, num_threads=1)
    together, apart = [[k] * 5 for k in (0, 1, 3)], [list(range(5))]
    for num_threads, offsets in product((2, 3, None), together + apart):
        moved = Arrays(
            *(
                np.concatenate([np.zeros(k, a.dtype), a])[k:]
                for k, a in zip(offsets, vars(start).values(), strict=True)
            )
        )
        update(long, moved, num_threads=num_threads)
        assert bits(moved) == bits(expected)
    parts = mapped(np.copy, start)
    for cut in (slice(0, 1), slice(1, 18), slice(18, None)):
        update(long, mapped(lambda a, cut=cut: a[cut], parts))
    assert bits(parts) == bits(expected)


SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e30, -1e30, 1e-30, 1.0])


@pytest.mark.parametrize("hyperparameters", [ADAMW, ADAM | {"eps": 0.0}])
def test_infinities_and_nans_go_where_they_go_in_the_reference(hyperparameters):
    values = np.array([*product(SPECIAL, repeat=4)], np.float32)
    # Padded, so that both the vectors and what is left after them see every value.
    master, m, v, gradient = np.tile(values, (1, 2)).reshape(-1, 4).T.copy()
    copy = np.zeros(len(master), BFLOAT16)
    start = Arrays(master, m, abs(v), gradient, copy)
    case = Case("special", len(master), hyperparameters=hyperparameters)
    for step in (1, 10):
        found, expected = mapped(np.copy, start), mapped(np.copy, start)
        with np.errstate(all="ignore"):
            update(case, found, step=step, implementation="cpu")
            update(case, expected, step=step, implementation="reference")
        for name in ("master", "m", "v", "copy"):
            both = (np.asarray(getattr(x, name), "f") for x in (found, expected))
            special = (np.where(np.isfinite(x), 0, x) for x in both)
            np.testing.assert_array_equal(*special, name)


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
    m, v, gradient = np.zeros((3, len(master)), np.float32)
    copy = np.zeros(len(master), dtype)
    before = master.copy()
    adam_update(master, m, v, gradient, copy=copy, b1=0.9, b2=0.9, **STILL)
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
    # A gradient is only read.
    gradient.flags.writeable = False
    wide = gradient.astype(np.float32)
    master, m, v = np.zeros((3, len(wide)), np.float32)
    adam_update(master, m, v, gradient, b1=0.0, b2=0.0, **STILL)
    expected = np.where(abs(wide) < SMALLEST, 0, wide)
    np.testing.assert_array_equal(m, expected)


@by_case
def test_every_loop_is_vectorised(case):
    """A scalar loop is five times as slow, and nothing else would show it."""
    has_decay = case.hyperparameters["weight_decay"] != 0
    dtypes = case.m_dtype, case.gradient_dtype, case.copy_dtype
    (code,) = compiled(*dtypes, has_decay).inspect_llvm().values()
    assert "x float> @llvm.sqrt.v" in code


def good() -> dict[str, Any]:
    arrays = Case("good", 64, copy_dtype=BFLOAT16).make()
    settings = {"step": 1, "learning_rate": 0.1, "b1": 0.0, "b2": 0.0, "eps": 1e-8}
    return vars(arrays) | settings


SHARED = np.zeros(100, np.float32)
READ_ONLY = np.broadcast_to(np.float32(0), 64).copy()
READ_ONLY.flags.writeable = False
# Starts at an odd address.
ODD = np.zeros(64 * 4 + 1, np.uint8)[1:].view(np.float32)
WRONG = [
    ("v", np.zeros(63, np.float32)),
    ("v", np.zeros(64, BFLOAT16)),
    ("gradient", np.zeros(64)),
    ("gradient", jnp.zeros(64)),
    ("m", np.zeros((8, 8), np.float32)),
    ("m", np.zeros(128, np.float32)[::2]),
    ("master", READ_ONLY),
    ("master", ODD),
    ("copy", np.zeros(64, np.float32)),
    ("step", 0),
    ("b1", 1.0),
    ("b2", -0.1),
    ("num_threads", 0),
    ("implementation", "cuda"),
    ("implementation", ("cuda", "tpu")),
]


def test_what_cannot_be_updated_is_refused(golden):
    # The smallest numbers that are allowed.
    adam_update(**good() | {"num_threads": 1})
    cases = {f"{n}. {name}": {name: value} for n, (name, value) in enumerate(WRONG)}
    cases["shared"] = {"master": SHARED[:64], "gradient": SHARED[36:]}
    calls = {k: partial(adam_update, **good() | wrong) for k, wrong in cases.items()}
    golden.check("adam.txt", refusals(calls))
