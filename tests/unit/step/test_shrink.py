"""When a search for smaller segments ends, and which budgets its error names."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from zinf.core.plan import InfeasibleError, Shortage
from zinf.core.program import ArrayId, ArraySpec, Leaf, Role, Tier
from zinf.core.step import shrink
from zinf.core.step.shrink import Limits, shrunk

WEIGHT_BYTES, VALUE_BYTES = 1 << 20, 1000


def program_of(max_bytes: int | None) -> Any:
    """One matrix of rows of 4 bytes, read whole or by tile."""
    whole = Leaf("w", ArraySpec((WEIGHT_BYTES // 4,), "float32", 4), True)
    rows = None if max_bytes is None else (0, max_bytes // 4)
    segment = SimpleNamespace(
        params=[ArrayId(Role.PARAM, "w", rows)], inputs=["x"], outputs=[]
    )
    return SimpleNamespace(
        leaves=[whole],
        segments=[segment],
        tilings=[] if rows is None else [whole],
        values={"x": SimpleNamespace(nbytes=VALUE_BYTES)},
        untiled={},
    )


def search(
    device_bytes: int, need_bytes: Callable[[int], int], monkeypatch: Any
) -> tuple[list[int], str]:
    """The sizes of tiles that are tried, and the message of the error, if any.

    Args:
        need_bytes: from the size of a tile to what the step needs.
    """
    space = SimpleNamespace(forward_bytes=0, backward_bytes=0)
    segment = SimpleNamespace(workspace=lambda: space, why_whole="")
    made = SimpleNamespace(segments=[segment])
    monkeypatch.setattr(shrink, "compiled", lambda *_: made)
    capacity, sizes = {Tier.DEVICE: device_bytes}, []
    setup: Any = SimpleNamespace(
        capacity=lambda: capacity,
        rule=SimpleNamespace(mesh=SimpleNamespace(size=1)),
        group=SimpleNamespace(is_first=True),
    )

    def attempt(segmented: Any, compiled: Any, limits: Limits) -> None:
        sizes.append(limits.param_bytes or WEIGHT_BYTES)
        needed = need_bytes(sizes[-1])
        if needed > device_bytes:
            short = Shortage(device_bytes, needed, "a tile")
            raise InfeasibleError({Tier.DEVICE: short}, capacity)

    def cut_to(max_bytes: int | None) -> Any:
        return SimpleNamespace(program=program_of(max_bytes))

    layouts: Any = None
    try:
        shrunk(setup, layouts, cut_to, attempt, Limits(None))
    except InfeasibleError as error:
        return sizes, str(error)
    return sizes, ""


@pytest.mark.parametrize(
    ("device_bytes", "need_bytes", "num_tried", "message"),
    [
        # What tiles do not change does not fit: three sizes of tiles say so.
        (
            1_200_000,
            lambda n: 1_300_000 + n,
            4,
            "would need at least 1,300,000 bytes. Raise memory.device to 1,431,072 "
            "(this suffices; less may), or",
        ),
        (1_301_000, lambda n: 1_300_000 + n, 12, ""),
        # Smaller tiles need more: the first size is the nearest.
        (
            500_000,
            lambda n: 2_000_000 - n,
            4,
            "memory.device to 951,424 (this suffices; less may), or",
        ),
        # The job that needs most is of another weight, until it is tiled too.
        (500_000, lambda n: 2 * n if n < 1 << 18 else 900_000, 4, ""),
        # Nothing smaller is compiled if the values of a segment do not fit.
        (
            900,
            lambda n: n,
            1,
            "one take 1,000 bytes. Raise memory.device to 1,048,576 (",
        ),
    ],
)
def test_a_search_ends_and_names_the_smallest_budget_that_was_tried(
    device_bytes, need_bytes, num_tried, message, monkeypatch
):
    sizes, found = search(device_bytes, need_bytes, monkeypatch)
    assert len(sizes) == num_tried, (sizes, found)
    assert message in found and bool(message) == bool(found)


def test_a_long_search_says_what_it_tries(monkeypatch, caplog):
    clock = iter(range(0, 1000, 6))
    monkeypatch.setattr(shrink, "monotonic", lambda: next(clock))
    with caplog.at_level(logging.WARNING):
        search(1_301_000, lambda n: 1_300_000 + n, monkeypatch)
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 11
    assert lines[0].startswith("Planning for 12 s. Attempt 2: 1 segments of up to ")
