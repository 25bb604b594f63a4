"""`elementwise_update`: every implementation against NumPy and exact arithmetic."""

from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.unit.refusals import refusals
from zinf_kernels.arrays import BFLOAT16, FLOAT16, FLOAT32
from zinf_kernels.elementwise import Operation, Program, elementwise_update
from zinf_kernels.elementwise.api import EXISTING
from zinf_kernels.elementwise.bounds import error_bounds
from zinf_kernels.elementwise.cases import Case, cases, lion
from zinf_kernels.elementwise.contract import contracted
from zinf_kernels.elementwise.cpu import compiled
from zinf_kernels.elementwise.program import ARITIES
from zinf_kernels.threads import LEAST_NUMEL

CASES = {case.name: case for case in cases()}
SMALLEST = 2.0**-126
# Of which no sum of a product is halfway between two float32, where the reference may
# round twice.
SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e30, -1e30, 2.0], np.float32)

by_implementation = pytest.mark.parametrize("implementation", EXISTING)


def update(case: Case, arrays: list[np.ndarray], **options: Any) -> None:
    elementwise_update(case.program, arrays, case.scalars, **options)


def bits(arrays: list[np.ndarray]) -> list[bytes]:
    """Those of all numbers; NaNs are alike, whatever they carry."""
    return [np.where(np.isnan(x), x.dtype.type(np.nan), x).tobytes() for x in arrays]


def test_every_operation_has_a_case():
    named = {o.name for case in CASES.values() for o in case.program.operations}
    assert named == set(ARITIES)


@pytest.mark.parametrize("name", CASES)
def test_implementations_give_the_same_bits_in_vectors(name):
    case = CASES[name]
    # Also what is left after the last whole vector.
    arrays = case.make(1003)
    values = np.array([*product(SPECIAL, repeat=len(arrays))], np.float32)
    columns = zip(values.T, case.program.arrays, strict=True)
    with np.errstate(over="ignore"):
        special = [np.tile(x, 3).astype(dtype) for x, dtype in columns]
    expected, found = deepcopy(arrays), deepcopy(arrays)
    update(case, expected, implementation="reference")
    update(case, found, implementation="cpu")
    assert bits(arrays) != bits(expected) == bits(found)
    expected, found = deepcopy(special), deepcopy(special)
    update(case, expected, implementation="reference")
    update(case, found, implementation="cpu")
    for x, y in zip(found, expected, strict=True):
        # Of two zeros either may be the larger.
        np.testing.assert_array_equal(x.astype(np.float32), y.astype(np.float32))
    # A scalar loop is five times as slow, and nothing else would show it.
    (code,) = compiled(case.program).inspect_llvm().values()
    assert any(f"<{n} x float>" in code or f"<{n} x i32>" in code for n in (4, 8, 16))


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


@pytest.mark.parametrize("name", EXACT)
def test_operations_are_rounded_once_and_bounded(name):
    case = CASES[name]
    arrays = [np.abs(x) for x in case.make(1000)]
    wide = [x.astype(np.float64) for x in arrays[: ARITIES[name]]]
    expected = EXACT[name](*wide)
    (bound,) = error_bounds(case.program, arrays, case.scalars)
    update(case, arrays, implementation="reference")
    error = np.abs(arrays[-1] - expected)
    # A root and a division for the reciprocal root; half a unit in the last place is up
    # to 2**-24 of the number.
    roundings = 2 if name == "rsqrt" else 1
    assert np.all(error <= roundings * 2.0**-24 * np.abs(expected))
    # For the worst there is: a product that is not fused, an estimate of a root.
    assert np.all(error <= bound)
    assert np.all(bound <= 6 * 2.0**-24 * sum(wide) * max(map(np.max, wide)) + 1e-3)


COMPARISONS = {
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}


@by_implementation
def test_comparisons_are_those_of_numpy_for_equal_numbers_too(implementation):
    """Each selects one of two scalars, values 8 and 9."""
    operations = [Operation(name, (0, 1)) for name in COMPARISONS]
    operations += [Operation("select", (10 + k, 8, 9)) for k in range(6)]
    outputs = tuple((2 + k, 16 + k) for k in range(6))
    program = Program((FLOAT32,) * 8, 2, tuple(operations), outputs)
    x, y = np.array([*product(SPECIAL, repeat=2)], np.float32).T.copy()
    arrays = [x, y, *np.zeros((6, len(x)), np.float32)]
    scalars = [np.float32(3), np.float32(5)]
    elementwise_update(program, arrays, scalars, implementation=implementation)
    for found, compare in zip(arrays[2:], COMPARISONS.values(), strict=True):
        np.testing.assert_array_equal(found, np.where(compare(x, y), 3, 5))


@by_implementation
def test_what_is_below_the_normal_numbers_counts_as_zero(implementation):
    """Else the sign of what XLA has for zero would be a whole step of Lion's."""
    operations = Operation("mul", (0, 2)), Operation("sign", (3,))
    program = Program((FLOAT32,) * 2, 1, operations, ((0, 3), (1, 4)))
    for number, factor in ((1.5, 0.5), (0.75, 1)):
        arrays = [np.full(100, number * SMALLEST, np.float32), np.ones(100, np.float32)]
        scalars = [np.float32(factor)]
        elementwise_update(program, arrays, scalars, implementation=implementation)
        assert not arrays[0].any() and not arrays[1].any()
    # Afterwards the thread has its small numbers again.
    update(lion(), lion().make(1000), num_threads=1)
    assert np.float32(SMALLEST) * np.float32(0.5) > 0


SHORT = pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)


def stored_as(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The array's elements, stored in an array of this dtype."""
    program = Program((array.dtype, dtype), 0, (), ((1, 0),))
    result = np.zeros(len(array), dtype)
    elementwise_update(program, [array, result], [], implementation="cpu")
    return result


@SHORT
def test_numbers_are_shortened_as_by_numpy_for_every_kind_of_number(dtype):
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    # In bfloat16: exact, just under, at and just over a tie.
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    wide = (upper[:, None] | lower).reshape(-1).view(np.float32)
    # No operation flushes the smallest numbers to zero: they are stored as they are.
    found = stored_as(wide, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        assert bits([found]) == bits([wide.astype(dtype)])


@SHORT
def test_every_short_number_is_widened_exactly(dtype):
    short = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    np.testing.assert_array_equal(stored_as(short, FLOAT32), short.astype(np.float32))


def test_number_of_threads_and_position_in_memory_change_no_bit():
    case = lion()
    start = case.make(3 * LEAST_NUMEL + 7)
    expected = deepcopy(start)
    update(case, expected, num_threads=1)
    for num_threads, offset in product((2, None), (0, 1, 3)):
        moved = [np.concatenate([x[:offset], x])[offset:] for x in start]
        update(case, moved, num_threads=num_threads)
        assert bits(moved) == bits(expected)


# a b + c d; the products are values 4 and 5 and the sum is value 6.
SUM_OF_PRODUCTS = Program(
    (FLOAT32,) * 4,
    0,
    (Operation("mul", (0, 1)), Operation("mul", (2, 3)), Operation("add", (4, 5))),
    ((0, 6),),
)


@pytest.mark.parametrize("name", ["add", "sub"])
def test_the_product_that_is_fused_is_the_one_that_is_wanted(name):
    *products, _ = SUM_OF_PRODUCTS.operations
    operations = *products, Operation(name, (4, 5))
    program = replace(SUM_OF_PRODUCTS, operations=operations)
    firsts = {"add": "fused_add", "sub": "fused_sub"}
    seconds = {"add": "fused_add", "sub": "fused_from"}
    for wanted in (
        Operation(firsts[name], (0, 1, 5)),
        Operation(seconds[name], (2, 3, 4)),
    ):
        found = contracted(program, lambda p, w=wanted: int(p.operations[2] != w))
        assert found.operations == (*products, wanted)


def test_a_product_that_is_used_twice_is_fused_only_if_wanted():
    program = replace(SUM_OF_PRODUCTS, outputs=((0, 6), (1, 4), (2, 5)))
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


def test_the_bound_knows_that_a_sign_and_a_choice_may_turn():
    """Those of 1 * 1 + y, of which the product may be wrong by 2**-24."""
    operations = (
        Operation("mul", (0, 0)),
        Operation("add", (5, 1)),
        Operation("sign", (6,)),
        Operation("gt", (6, 2)),
        Operation("not_", (8,)),
        # 3 or 1, scalars 3 and 4.
        Operation("select", (9, 3, 4)),
    )
    program = Program((FLOAT32,) * 2, 3, operations, ((0, 7), (1, 10)))
    y = np.array([-1, -1 + 2.0**-24, -1 + 2.0**-22, 1], np.float32)
    scalars = [np.float32(x) for x in (0, 3, 1)]
    for bound in error_bounds(program, [np.ones_like(y), y], scalars):
        assert list(bound >= 2) == [True, True, False, False]
        assert np.all(bound[2:] < 1e-6) and np.all(bound[:2] < 2 + 1e-6)


def test_what_cannot_be_updated_is_refused(golden):
    a = lion().make(64)
    wrong = {
        "fewer arrays": a[:3],
        "dtype": [a[1], *a[1:]],
        "length": [*a[:3], a[3][1:]],
        "shared": [a[0], a[1], a[1], a[3]],
        "strided": [a[0][::2], *a[1:]],
    }
    calls = {name: partial(update, lion(), arrays) for name, arrays in wrong.items()}
    calls["threads"] = partial(update, lion(), a, num_threads=0)
    # Only what is written has to be writeable.
    given, written = lion().make(64), lion().make(64)
    given[0].flags.writeable = written[1].flags.writeable = False
    update(lion(), given)
    calls["read-only"] = partial(update, lion(), written)
    golden.check("elementwise.txt", refusals(calls))
