"""`elementwise_update`: every implementation against NumPy and exact arithmetic."""

from dataclasses import replace
from itertools import product
from typing import Any

import chex
import numpy as np
import pytest

from zinf_kernels.arrays import BFLOAT16, FLOAT32
from zinf_kernels.elementwise import Operation, Program, elementwise_update
from zinf_kernels.elementwise.api import EXISTING
from zinf_kernels.elementwise.bounds import error_bounds
from zinf_kernels.elementwise.cases import Case, cases, lion
from zinf_kernels.elementwise.contract import contracted
from zinf_kernels.elementwise.cpu import compiled
from zinf_kernels.elementwise.program import ARITIES
from zinf_kernels.threads import LEAST_NUMEL

CASES = tuple(cases())
SMALLEST = 2.0**-126
# Of which no sum of a product is halfway between two float32, where the reference may
# round twice.
SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e30, -1e30, 2.0], np.float32)

by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
by_implementation = pytest.mark.parametrize("implementation", EXISTING)


def update(case: Case, arrays: list[np.ndarray], **options: Any) -> None:
    elementwise_update(case.program, arrays, case.scalars, **options)


def copied(arrays: list[np.ndarray]) -> list[np.ndarray]:
    return [x.copy() for x in arrays]


def bits(arrays: list[np.ndarray]) -> list[bytes]:
    """Those of all numbers; NaNs are alike, whatever they carry."""
    return [np.where(np.isnan(x), x.dtype.type(np.nan), x).tobytes() for x in arrays]


def test_every_operation_has_a_case():
    named = {o.name for case in CASES for o in case.program.operations}
    assert named == set(ARITIES)


@pytest.mark.sampled(10)
@by_case
def test_implementations_give_the_same_bits(case):
    # Also what is left after the last whole vector.
    arrays = case.make(1003)
    expected = copied(arrays)
    update(case, expected, implementation="reference")
    assert bits(expected) != bits(arrays)
    update(case, arrays, implementation="cpu")
    assert bits(arrays) == bits(expected)


@by_case
def test_infinities_nans_and_zeros_go_where_they_go_in_numpy(case):
    values = np.array([*product(SPECIAL, repeat=len(case.program.arrays))], np.float32)
    columns = zip(values.T, case.program.arrays, strict=True)
    with np.errstate(over="ignore"):
        arrays = [np.tile(x, 3).astype(dtype) for x, dtype in columns]
    expected = copied(arrays)
    update(case, expected, implementation="reference")
    update(case, arrays, implementation="cpu")
    # Of two zeros either may be the larger.
    chex.assert_trees_all_equal(arrays, expected, strict=True)


# What each operation is, in float64, for positive operands.
EXACT = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "fused_add": lambda x, y, z: x * y + z,
    "fused_sub": lambda x, y, z: x * y - z,
    "fused_from": lambda x, y, z: z - x * y,
    "neg": np.negative,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sign": np.sign,
    "max": np.maximum,
    "min": np.minimum,
}


@by_implementation
@pytest.mark.parametrize("name", EXACT)
def test_operations_are_rounded_once_and_bounded(name, implementation):
    (case,) = (case for case in CASES if case.name == name)
    arrays = [np.abs(x) for x in case.make(1000)]
    wide = [x.astype(np.float64) for x in arrays[: ARITIES[name]]]
    expected = EXACT[name](*wide)
    (bound,) = error_bounds(case.program, arrays, case.scalars)
    update(case, arrays, implementation=implementation)
    error = np.abs(arrays[-1] - expected)
    # A root and a division for the reciprocal root; half a unit in the last place is up
    # to 2**-24 of the number.
    roundings = 2 if name == "rsqrt" else 1
    assert np.all(error <= roundings * 2.0**-24 * np.abs(expected))
    # For the worst there is: a product that is not fused, an estimate of a root.
    assert np.all(error <= bound)
    assert np.all(bound <= 6 * 2.0**-24 * sum(wide) * max(map(np.max, wide)) + 1e-3)


@by_implementation
def test_lion_steps_by_its_rate(implementation):
    case = lion()
    gradient, master, momentum, copy = case.make(500)
    _, _, rate, b2, _ = map(float, case.scalars)
    direction = 0.9 * momentum.astype(float) + 0.1 * gradient.astype(float)
    expected = master + rate * np.sign(direction)
    wanted = b2 * momentum + 0.01 * gradient.astype(np.float32)
    update(case, [gradient, master, momentum, copy], implementation=implementation)
    # One rounding of a number near 1, and of products and sums below 4.
    np.testing.assert_allclose(master, expected, rtol=2.0**-24, atol=2.0**-40)
    np.testing.assert_allclose(momentum, wanted, rtol=2.0**-22, atol=2.0**-22)
    assert copy.tobytes() == master.astype(BFLOAT16).tobytes()


@by_implementation
def test_what_is_below_the_normal_numbers_counts_as_zero(implementation):
    """Else the sign of what XLA has for zero would be a whole step of Lion's."""
    program = Program(
        (FLOAT32, FLOAT32),
        1,
        (Operation("mul", (0, 2)), Operation("sign", (3,))),
        ((0, 3), (1, 4)),
    )
    numbers = np.full(100, 1.5 * SMALLEST, np.float32)
    signs = np.zeros(100, np.float32)
    arrays, half = [numbers, signs], [np.float32(0.5)]
    elementwise_update(program, arrays, half, implementation=implementation)
    assert not numbers.any() and not signs.any()
    numbers[:] = 0.75 * SMALLEST
    elementwise_update(program, arrays, [np.float32(1)], implementation=implementation)
    assert not numbers.any() and not signs.any()


def test_afterwards_the_thread_has_its_small_numbers_again():
    case = lion()
    update(case, case.make(1000), num_threads=1)
    assert np.float32(SMALLEST) * np.float32(0.5) > 0


def test_number_of_threads_and_position_in_memory_change_no_bit():
    case = lion()
    start = case.make(3 * LEAST_NUMEL + 7)
    expected = copied(start)
    update(case, expected, num_threads=1)
    for num_threads, offset in product((2, 7, None), (0, 1, 3)):
        moved = [np.concatenate([x[:offset], x])[offset:] for x in start]
        update(case, moved, num_threads=num_threads)
        assert bits(moved) == bits(expected)


@by_case
def test_every_loop_is_vectorised(case):
    """A scalar loop is five times as slow, and nothing else would show it."""
    (code,) = compiled(case.program).inspect_llvm().values()
    assert any(f"<{n} x float>" in code or f"<{n} x i32>" in code for n in (4, 8, 16))


def sum_of_products() -> Program:
    """a b + c d, and the product c d itself; the values are 4, 5 and 6."""
    operations = (
        Operation("mul", (0, 1)),
        Operation("mul", (2, 3)),
        Operation("add", (4, 5)),
    )
    return Program((FLOAT32,) * 4, 0, operations, ((0, 6),))


@pytest.mark.parametrize("fused", [(0, 1, 5), (2, 3, 4)])
def test_the_product_that_is_fused_is_the_one_that_is_wanted(fused):
    wanted = Operation("fused_add", fused)
    found = contracted(sum_of_products(), lambda p: int(p.operations[2] != wanted))
    assert found.operations[2] == wanted


def test_a_product_that_is_used_twice_is_fused_only_if_wanted():
    program = replace(sum_of_products(), outputs=((0, 6), (1, 4), (2, 5)))
    kept = contracted(program, lambda p: int(p != program))
    assert kept == program
    wanted = Operation("fused_add", (0, 1, 5))
    found = contracted(program, lambda p: int(p.operations[2] != wanted))
    assert found.operations[2] == wanted


def test_the_bound_is_that_of_the_larger_terms_where_terms_cancel():
    """Of x y minus the same, rounded, little is left but the rounding."""
    operations = Operation("mul", (0, 1)), Operation("sub", (3, 2))
    program = Program((FLOAT32,) * 3, 0, operations, ((2, 4),))
    x, y = lion().make(1000)[1:3]
    product_ = (x.astype(float) * y).astype(np.float32)
    (bound,) = error_bounds(program, [x, y, product_], [])
    error = np.abs(x.astype(float) * y - product_)
    assert error.max() > 0
    assert np.all(error <= bound)
    # Of the product, of the difference, and of storing the latter.
    assert np.all(bound <= 3 * 2.0**-24 * np.abs(product_) + 1e-30)


def test_the_bound_knows_that_a_sign_may_turn():
    """That of 1 * 1 + y, of which the product may be wrong by 2**-24."""
    operations = (
        Operation("mul", (0, 0)),
        Operation("add", (2, 1)),
        Operation("sign", (3,)),
    )
    program = Program((FLOAT32,) * 2, 0, operations, ((1, 4),))
    y = np.array([-1, -1 + 2.0**-24, -1 + 2.0**-22, 1], np.float32)
    (bound,) = error_bounds(program, [np.ones_like(y), y], [])
    assert list(bound >= 2) == [True, True, False, False]


WRONG = {
    "fewer_arrays": (lambda a: a[:3], "4 arrays and 5 scalars, but 3"),
    "dtype": (lambda a: [a[1], *a[1:]], "array 0 is float32, not bfloat16"),
    "length": (lambda a: [*a[:3], a[3][1:]], "array 3 has 63 elements and array 0"),
    "shared": (lambda a: [a[0], a[1], a[1], a[3]], "array 1 and array 2 share memory"),
    "strided": (lambda a: [a[0][::2], *a[1:]], "array 0 has shape"),
}


@pytest.mark.parametrize(("wrong", "message"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_updated_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        update(lion(), wrong(lion().make(64)))


def test_only_what_is_written_has_to_be_writeable():
    arrays = lion().make(64)
    arrays[0].flags.writeable = False
    update(lion(), arrays)
    arrays[1].flags.writeable = False
    with pytest.raises(ValueError, match="array 1 is read-only"):
        update(lion(), arrays)
