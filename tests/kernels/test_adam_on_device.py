"""`adam_update` on the device: the bounds of the one in host memory hold for it."""

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.test_adam import LEARNING_RATE, assert_within, exact
from zinf_kernels.absent_gpu import GPUS, compile_for
from zinf_kernels.adam import adam_scalars
from zinf_kernels.adam import adam_update as adam_update_on_host
from zinf_kernels.adam.arguments import BFLOAT16, FLOAT32, Arrays, Scalars
from zinf_kernels.adam.cases import ADAM, ADAMW, Case
from zinf_kernels.adam_on_device import adam_update, mosaic_gpu, obstacles, reference
from zinf_kernels.adam_on_device.api import EXISTING, NAMES
from zinf_kernels.adam_on_device.cases import benchmark_cases, bytes_moved, cases
from zinf_kernels.interpreter import interpreted

BACKENDS = {"mosaic_gpu": mosaic_gpu, "reference": reference}
CASES = tuple(case for case in cases() if case.numel)
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
by_implementation = pytest.mark.parametrize("implementation", EXISTING)


def scalars_of(case: Case, *, step: int) -> Scalars:
    return adam_scalars(
        step=step,
        learning_rate=LEARNING_RATE,
        factor=case.factor,
        m_dtype=case.m_dtype,
        **case.hyperparameters,
    )


def updated(implementation: str, arrays: Arrays, scalars: Scalars) -> Arrays:
    """What the backend makes, in the interpreter if it is a kernel."""
    copy_dtype = None if arrays.copy is None else arrays.copy.dtype
    given = [jnp.array(a) for a in list(vars(arrays).values())[:4]]
    numbers = jnp.array([getattr(scalars, name) for name in NAMES])
    with interpreted():
        made = BACKENDS[implementation].adam_update(
            *given, numbers, copy_dtype=copy_dtype, num_cores=1
        )
    master, m, v, copy = (None if a is None else np.asarray(a) for a in made)
    return Arrays(master, m, v, arrays.gradient, copy)


@by_implementation
@by_case
def test_a_step_is_within_the_stated_bound_of_exact_arithmetic(case, implementation):
    for step in (1, 1000):
        arrays, scalars = case.make(seed=step), scalars_of(case, step=step)
        made = updated(implementation, arrays, scalars)
        assert (made.m.dtype, made.master.size) == (case.m_dtype, case.numel)
        assert_within(made, exact(arrays, scalars))
        if case.copy_dtype is None:
            assert made.copy is None
        else:
            np.testing.assert_array_equal(
                made.copy, made.master.astype(case.copy_dtype)
            )


SPECIAL = np.float32([np.nan, np.inf, -np.inf, 0.0, 1e30, -1e30, 1e-30, 1.0])


@by_implementation
@pytest.mark.parametrize("hyperparameters", [ADAMW, ADAM | {"eps": 0.0}])
def test_infinities_and_nans_go_where_they_go_on_the_host(
    implementation, hyperparameters
):
    values = np.array([*product(SPECIAL, repeat=4)], np.float32)
    master, m, v, gradient = values.T.copy()
    arrays = Arrays(master, m, abs(v), gradient, np.zeros(len(master), BFLOAT16))
    case = Case("special", len(master), hyperparameters=hyperparameters)
    made = updated(implementation, arrays, scalars_of(case, step=10))
    with np.errstate(all="ignore"):
        settings = hyperparameters | {"learning_rate": LEARNING_RATE, "step": 10}
        adam_update_on_host(**vars(arrays), **settings, implementation="cpu")
    for name in ("master", "m", "v", "copy"):
        ours, host = (np.asarray(getattr(a, name), float) for a in (made, arrays))
        np.testing.assert_array_equal(np.isnan(ours), np.isnan(host), name)
        np.testing.assert_array_equal(ours == np.inf, host == np.inf, name)
        np.testing.assert_array_equal(ours == -np.inf, host == -np.inf, name)


@by_implementation
def test_moments_below_the_normal_numbers_become_zero(implementation):
    arrays = Arrays(*(np.full(40, x, np.float32) for x in (0.5, 2e-38, 2e-38, 0)), None)
    scalars = scalars_of(Case("decay", 40), step=3)
    for _ in range(20):
        arrays = updated(implementation, arrays, scalars)
        for moment in (arrays.m, arrays.v):
            assert ((moment == 0) | (abs(moment) >= 2.0**-126)).all()
    assert (arrays.m == 0).all()


def on_device(case: Case, *, shape: tuple[int, ...] | None = None) -> list[Any]:
    arrays = list(vars(case.make()).values())[:4]
    return [jnp.array(a).reshape(shape or a.shape) for a in arrays]


def test_any_shape_and_no_elements_come_back_as_they_were():
    case = Case("shaped", 24, BFLOAT16, copy_dtype=BFLOAT16)
    scalars = scalars_of(case, step=2)
    flat = adam_update(*on_device(case), scalars=scalars, copy_dtype=BFLOAT16)
    shaped = adam_update(
        *on_device(case, shape=(2, 3, 4)), scalars=scalars, copy_dtype=BFLOAT16
    )
    for one, other in zip(flat, shaped, strict=True):
        assert other.shape == (2, 3, 4)
        np.testing.assert_array_equal(one, other.reshape(-1))
    empty = adam_update(*on_device(replace(case, numel=0)), scalars=scalars)
    assert [a.size for a in empty[:3]] == [0, 0, 0] and empty.copy is None


def test_scalars_may_be_traced_and_make_no_new_program():
    case = Case("traced", 100)
    arrays = on_device(case)
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(1)
    def step(arrays, numbers):
        return adam_update(*arrays, scalars=Scalars(*numbers))

    for number in (1, 2):
        scalars = scalars_of(case, step=number)
        made = step(arrays, [getattr(scalars, name) for name in NAMES])
        assert_within(made, exact(case.make(), scalars))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": jnp.zeros(64, BFLOAT16)}, "v is bfloat16, not float32"),
        ({"m": jnp.zeros(63)}, r"m has shape \(63,\) and master \(64,\)"),
        ({"copy_dtype": jnp.float32}, "copy is float32, not bfloat16 or float16"),
        ({"implementation": "cpu"}, "no implementation 'cpu'"),
        ({"implementation": "mosaic_gpu"}, "it is for GPUs and this is a CPU"),
    ],
)
def test_what_cannot_be_updated_is_refused(change, message):
    case = Case("good", 64)
    names = ("master", "m", "v", "gradient")
    arrays = dict(zip(names, on_device(case), strict=True))
    given = arrays | {"scalars": scalars_of(case, step=1)} | change
    with pytest.raises(ValueError, match=message):
        adam_update(**given)


def test_the_floor_counts_every_array_once_each_way():
    """Read: master, m, v, gradient; written: master, m, v, copy."""
    plain, mixed, short = benchmark_cases(10)
    assert bytes_moved(plain) == 10 * (4 + 4 + 4 + 4 + 4 + 4 + 4)
    assert bytes_moved(mixed) == 10 * (4 + 4 + 4 + 2 + 4 + 4 + 4 + 2)
    assert bytes_moved(short) == 10 * (4 + 2 + 4 + 2 + 4 + 2 + 4 + 2)


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(
    "case", tuple(benchmark_cases(1 << 16)), ids=lambda case: case.name
)
def test_it_compiles_for_every_gpu_without_a_copy_of_anything(gpu, case):
    shapes = [
        jax.ShapeDtypeStruct((case.numel,), dtype)
        for dtype in (FLOAT32, case.m_dtype, FLOAT32, case.gradient_dtype)
    ]
    run = partial(
        adam_update, scalars=scalars_of(case, step=1), copy_dtype=case.copy_dtype
    )
    compiled = compile_for(GPUS[gpu], run, *shapes)
    is_hopper = not obstacles(GPUS[gpu].device)
    assert ("mosaic_gpu" in compiled.as_text()) == is_hopper
    assert is_hopper == (GPUS[gpu].capability == (9, 0))
    # Nothing but the scalars and tables of pointers.
    assert compiled.memory_analysis().temp_size_in_bytes < 1024
