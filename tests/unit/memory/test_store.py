"""The same verbs mean the same on every tier."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from random import Random
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from zinf.core.memory import AbstractStore, BudgetExceeded, HostStore
from zinf.core.memory.hold import Holds
from zinf.core.program import ArrayId, Role

WHOLE = ArrayId(Role.PARAM, "blocks/0/kernel")
OTHER = ArrayId(Role.MASTER, "b")
DTYPES = (
    *(np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn),
    *(np.int32, np.uint8, np.bool_, np.complex64),
)


VERBS = ("write", "write", "write", "read", "free")


def rows_of(array: ArrayId, start: int, stop: int) -> ArrayId:
    return replace(array, rows=(start, stop))


def counted(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """An array whose entries differ, as far as the dtype can tell them apart."""
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def write(store: AbstractStore, array: ArrayId, value: np.ndarray) -> None:
    # The store owns what it is given; tests go on comparing with theirs.
    assert store.write(array, np.array(value)).result() is None


def read(store: AbstractStore, array: ArrayId) -> np.ndarray:
    return np.asarray(store.read(array).result())


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(found, expected, strict=True)


def test_wholes_and_rows_of_any_dtype_keep_their_values(store):
    for number, dtype in enumerate(DTYPES):
        array, value = replace(WHOLE, path=str(number)), counted(5, 2, dtype=dtype)
        write(store, array, value)
        assert_same(read(store, array), value)
        assert_same(read(store, rows_of(array, 1, 4)), value[1:4])
        assert_same(read(store, rows_of(array, 0, 5)), value)
        write(store, rows_of(array, 1, 3), value[3:5])
        value[1:3] = value[3:5].copy()
        assert_same(read(store, array), value)


def test_any_shape_and_layout_can_be_kept_bit_for_bit(store):
    bits = np.array([0x7FC00001, 0x80000000, 0x7F800000, 1], np.uint32)
    values = [bits.view(np.float32), counted(4, 6)[::2, ::-1].T]
    values += [
        np.asarray(counted(*x) + 1) for x in ((), (1,), (0,), (3, 0, 2), (2, 3, 4, 5))
    ]
    for value in values:
        for content in (np.zeros(value.shape, np.float32), value):
            store.write(WHOLE, content).result()
        assert_same(read(store, WHOLE).view(np.uint32), value.copy().view(np.uint32))
        store.free(WHOLE)
        assert store.ledger.used_bytes == 0


class Model:
    """What a store promises, as a dict of arrays."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes, self.peak_bytes = capacity_bytes, 0
        self.kept: dict[ArrayId, np.ndarray] = {}

    @property
    def used_bytes(self) -> int:
        return sum(value.nbytes for value in self.kept.values())

    def find(self, array: ArrayId) -> np.ndarray:
        """The array of exactly this id, else rows of its whole."""
        if array not in self.kept and array.rows and array.whole in self.kept:
            (start, stop), whole = array.rows, self.kept[array.whole]
            if not 0 <= start < stop <= len(whole):
                raise ValueError
            return whole[start:stop]
        return self.kept[array]

    def contains(self, array: ArrayId) -> bool:
        return array in self.kept or array.whole in self.kept

    def write(self, array: ArrayId, value: np.ndarray) -> None:
        if self.contains(array):
            found = self.find(array)
            if (found.shape, found.dtype) != (value.shape, value.dtype):
                raise ValueError
            found[...] = value
            return
        if self.used_bytes + value.nbytes > self.capacity_bytes:
            raise MemoryError
        self.kept[array] = value.copy()
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def read(self, array: ArrayId) -> np.ndarray:
        return self.find(array).copy()

    def free(self, array: ArrayId) -> None:
        del self.kept[array]


def outcome(store: Any, verb: str, arguments: Sequence[Any]) -> Any:
    """What a verb returned, or the type of its error."""
    try:
        found = getattr(store, verb)(*arguments)
        return found.result() if isinstance(found, Future) else found
    except BudgetExceeded:
        return MemoryError
    except (KeyError, ValueError, MemoryError) as error:
        return type(error)


def test_a_store_is_a_dict_of_arrays_that_counts_their_bytes(open_store):
    """Ids differ in role, path, microbatch and rows; a whole comes before its rows."""
    capacity_bytes = 9 * 2 * 4  # of 9 rows
    store, model, random = open_store(capacity_bytes), Model(capacity_bytes), Random(0)
    wholes = [WHOLE, replace(WHOLE, role=Role.MASTER), replace(WHOLE, path="blocks/1")]
    wholes += [replace(WHOLE, microbatch=n) for n in range(2)]
    ids = [*wholes, *(rows_of(WHOLE, *r) for r in ((0, 1), (1, 3), (2, 2), (2, 4)))]
    outcomes = set()
    for turn in range(250):
        array, verb = random.choice(ids), random.choice(VERBS)
        arguments: list[Any] = [array]
        if verb == "write":
            dtype = random.choice((np.float32,) * 8 + (np.int32,))
            shape = random.choice((1, 2, 2, 3, 3)), 2
            arguments.append(np.full(shape, turn, dtype))
        expected = outcome(model, verb, arguments)
        found = outcome(store, verb, [array, *(x.copy() for x in arguments[1:])])
        if isinstance(expected, np.ndarray):
            assert_same(np.asarray(found), expected)
        else:
            assert found == expected, (turn, verb, array)
        outcomes.add((verb, expected if isinstance(expected, type) else None))
        assert store.ledger.used_bytes == model.used_bytes
        kept = [array for array in ids if store.contains(array)]
        assert kept == [array for array in ids if model.contains(array)]
    assert store.ledger.peak_bytes == model.peak_bytes
    refused = {("read", KeyError), ("read", ValueError), ("free", KeyError)}
    refused |= {("write", ValueError), ("write", MemoryError)}
    assert outcomes == refused | {(verb, None) for verb in VERBS}


def test_mistakes_are_named_with_what_was_found(store, golden):
    write(store, WHOLE, counted(4, 2))
    write(store, OTHER, counted())
    unknown, spilled = replace(WHOLE, path="blocks/1/kernel"), rows_of(WHOLE, 1, 2)
    spilled = replace(spilled, microbatch=3)
    mistakes: list[tuple[Callable[..., Any], Any]] = [
        (store.read, (unknown,)),
        (store.read, (spilled,)),
        (store.free, (unknown,)),
        (store.free, (rows_of(WHOLE, 0, 2),)),
        (store.read, (rows_of(OTHER, 0, 1),)),
        (store.write, (WHOLE, np.zeros((5, 2), np.float32))),
        (store.write, (WHOLE, np.zeros((4, 2), np.float16))),
        (store.write, (rows_of(WHOLE, 0, 2), counted(3, 2))),
        (store.write, (rows_of(WHOLE, 0, 2), counted(2, 2, dtype=np.int32))),
        (store.write, (rows_of(WHOLE, 3, 3), counted(1, 2))),
        (store.write, (rows_of(WHOLE, -1, 2), counted(1, 2))),
        (store.write, (rows_of(WHOLE, 4, 5), counted(1, 2))),
    ]
    lines = []
    for verb, arguments in mistakes:
        with pytest.raises((KeyError, ValueError)) as error:
            verb(*arguments)
        text = error.value.args[0].replace(f"Tier {store.tier}", "Tier T")
        lines.append(f"{verb.__name__}: {type(error.value).__name__}: {text}")
    golden.check("store.txt", "\n".join(lines))
    with pytest.raises(TypeError, match=f"{store.tier} takes .*float"):
        store.write(unknown, 1.0)
    assert_same(read(store, WHOLE), counted(4, 2))
    assert store.ledger.used_bytes == 4 * (4 * 2 + 1)


def test_threads_may_use_different_arrays_and_different_rows_at_once(store):
    num_threads = 8
    write(store, WHOLE, np.zeros((num_threads, 16), np.float32))

    def work(number: int) -> None:
        row = rows_of(WHOLE, number, number + 1)
        own = ArrayId(Role.VALUE, "x", microbatch=number)
        for step in range(1, 6):
            for array in (row, own):
                write(store, array, np.full((1, 16), number * 10 + step, np.float32))
                assert (read(store, array) == number * 10 + step).all()
        if number % 2:
            store.free(own)

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(work, range(num_threads)))
    last = np.arange(num_threads, dtype=np.float32)[:, None] * 10 + 5
    assert_same(read(store, WHOLE), np.repeat(last, 16, axis=1))
    assert store.ledger.used_bytes == (num_threads + num_threads // 2) * 16 * 4


def assert_waits(act: Callable[[], Any], release: Callable[[], Any]) -> None:
    """Fails unless `act` ends only after `release`."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(act)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.05)
        release()
        waiting.result(timeout=30)


def test_what_is_held_is_neither_changed_nor_freed(store):
    write(store, WHOLE, counted(4, 2))
    changes: list[Callable[[], Any]] = [
        lambda: write(store, WHOLE, counted(4, 2) + 1),
        lambda: write(store, rows_of(WHOLE, 1, 2), counted(1, 2)),
        lambda: store.free(WHOLE),
    ]
    if isinstance(store, HostStore):
        changes.insert(0, lambda: store.update([WHOLE], np.negative))
    for change in changes:
        store.holds.hold([WHOLE])
        read(store, WHOLE)
        assert_waits(change, lambda: store.holds.release(WHOLE))


@pytest.mark.parametrize(
    ("held", "wanted", "waits"),
    [
        (WHOLE, WHOLE, True),
        (WHOLE, rows_of(WHOLE, 3, 4), True),
        (rows_of(WHOLE, 3, 4), WHOLE, True),
        (rows_of(WHOLE, 2, 4), rows_of(WHOLE, 3, 5), True),
        (rows_of(WHOLE, 2, 4), rows_of(WHOLE, 4, 5), False),
        (WHOLE, replace(WHOLE, role=Role.MASTER), False),
    ],
    ids=str,
)
def test_who_changes_rows_that_are_held_waits_for_the_last_of_their_holds(
    held, wanted, waits
):
    holds = Holds()
    holds.hold([held, held])
    holds.release(held)
    if waits:
        assert_waits(lambda: holds.wait(wanted), lambda: holds.release(held))
    else:
        holds.wait(wanted)
