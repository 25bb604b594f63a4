"""Whole plans of small programs, as text: `golden/` is the best place to read them.

Each scenario shows one feature. A change of the schedule, of transfers, of frees or of
what waits for what shows in the diff.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.golden import Golden
from tests.toy.program import Layer, LeafCase, Toy, chain, make_toy
from zinf.core.plan import (
    Catalog,
    Free,
    Instruction,
    Keeping,
    Link,
    Plan,
    StepOptions,
    Transfer,
    show_bytes,
    show_seconds,
)
from zinf.core.plan.catalog import UpdateUnit
from zinf.core.plan.passage import (
    Passage,
    checked,
    first_passage,
    flush_passage,
    forward_passage,
    step_passage,
    streamed,
)
from zinf.core.program import ArrayId, ArraySpec, Role, RowSum, Tier, Tiling

DEVICE, HOST, NVME = Tier
W = ArrayId(Role.PARAM, "w")
FIRST = Layer("first", (W,), ("batch/x",), ("x",))
TIED = [FIRST, Layer("last", (W,), ("x",), ())]
FROZEN = [replace(FIRST, name="frozen", params=(ArrayId(Role.PARAM, "f"),)), TIED[1]]
# Both of the last two segments read `x`.
SKIP = [
    replace(FIRST, params=(ArrayId(Role.PARAM, "w0"),)),
    Layer("second", (ArrayId(Role.PARAM, "w1"),), ("x",), ("y",)),
    Layer("third", (ArrayId(Role.PARAM, "w2"),), ("x", "y"), ()),
]
EVERY = dict.fromkeys(Tier, 1 << 20)
RESIDUALS = (ArraySpec((50,), "f4", 4),)


def planned(
    toy: Toy,
    *,
    param: Tier = NVME,
    state: Tier = NVME,
    microbatches: int = 1,
    in_backward: bool = True,
    values: Tier = DEVICE,
    gradients: Tier = HOST,
    by_row: bool = False,
    defers: bool = False,
    kept: int = 0,
    passage: Callable[..., Passage] = step_passage,
    **budgets: int,
) -> Plan:
    """The checked plan of a passage of a toy; `kept` segments save residuals."""
    homes = toy.homes(param, state)
    catalog: Catalog = toy.catalog(homes, num_microbatches=microbatches)
    if kept:
        keeping = {k: Keeping(RESIDUALS, (3, 5), True, 7) for k in range(2)}
        catalog = replace(catalog, keeping=keeping)
    units: list[UpdateUnit] = toy.units(homes)
    options = StepOptions(
        microbatches,
        in_backward,
        values,
        gradients,
        num_kept=kept,
        deferred=frozenset(range(len(units)) if defers else ()),
        gradients_by_row=by_row,
    )
    if passage is forward_passage:
        made = forward_passage(catalog, options)
    else:
        made = passage(catalog, units, options)
    capacity = EVERY | {Tier(name): nbytes for name, nbytes in budgets.items()}
    return checked(streamed(made, catalog, capacity), made, catalog)


def with_row_sum(toy: Toy) -> Toy:
    """The first segment leaves the gradient of its table as two rows of float16."""
    row_sum = RowSum(W, ArraySpec((2, 64), "f2", 2), ArraySpec((2, 1), "i4", 4))
    first, *others = toy.program.segments
    segments = replace(first, row_sums=(row_sum,)), *others
    return replace(toy, program=replace(toy.program, segments=segments))


def with_tiles(toy: Toy) -> Toy:
    tiling = Tiling("w", 4, 4, (0, 1))
    return replace(toy, program=replace(toy.program, tilings=(tiling,)))


def returning(toy: Toy) -> Toy:
    """A function whose first segment makes an output too."""
    program = toy.program
    returned = (*program.segments[0].outputs, *program.outputs)
    program = replace(program, outputs=returned, is_trained=False)
    return replace(toy, program=program)


LEAF, ROWS = LeafCase("w"), LeafCase("w", 3, 64)
UNEVEN = make_toy(
    [LeafCase("w0", 1, 64), LeafCase("w1", 2, 64), LeafCase("w2", 3, 64)], SKIP
)
SCENARIOS: dict[str, Callable[[], Plan]] = {
    # Both microbatches pass a layer before the next; gradients accumulate in order.
    "microbatches": lambda: planned(chain(2), microbatches=2),
    # With clipping no update runs before the last norm; values and gradients wait.
    "clipped": lambda: planned(
        chain(2), in_backward=False, values=NVME, gradients=NVME
    ),
    "values on the host": lambda: planned(chain(2), values=HOST),
    "all on the device": lambda: planned(chain(2), param=DEVICE, state=DEVICE),
    # Narrow gradients are widened first; the parameter and its master go home.
    "mixed precision": lambda: planned(
        chain(1, is_mixed=True), param=DEVICE, microbatches=2
    ),
    "tied": lambda: planned(make_toy([LEAF], TIED)),
    # The gradient of a tied tile leaves the device between its two segments.
    "tied tile": lambda: planned(with_tiles(make_toy([LEAF], TIED))),
    "tied tile on the device": lambda: planned(
        with_tiles(make_toy([LEAF], TIED)), param=DEVICE
    ),
    "row sums": lambda: planned(with_row_sum(make_toy([LEAF], TIED)), microbatches=2),
    # Two segments read one value: its cotangents add up. Leaves differ in size.
    "skip connection": lambda: planned(UNEVEN),
    "frozen": lambda: planned(
        make_toy([LeafCase("f", is_trainable=False), LEAF], FROZEN)
    ),
    # Rows are updated inside of a whole that is on the host already.
    "blocks": lambda: planned(chain(2, leaf=ROWS, block_rows=2)),
    "gradients by row": lambda: planned(
        chain(1, leaf=ROWS, block_rows=1, is_fine=True), by_row=True
    ),
    "deferred": lambda: planned(chain(2), defers=True, in_backward=False),
    "deferred, first step": lambda: planned(
        chain(2), defers=True, in_backward=False, passage=first_passage
    ),
    "deferred, flush": lambda: planned(
        chain(1, leaf=ROWS, block_rows=1, is_fine=True),
        defers=True,
        passage=flush_passage,
    ),
    "deferred on the device": lambda: planned(
        chain(1, leaf=ROWS, block_rows=2), param=DEVICE, defers=True
    ),
    "residuals": lambda: planned(chain(3), kept=1, microbatches=2),
    "evaluation": lambda: planned(chain(2), passage=forward_passage),
    # An output goes to the host before the next segment runs, wherever values wait.
    "function": lambda: planned(
        returning(chain(3)), values=NVME, passage=forward_passage
    ),
    # The first layers make way for others, and are read again.
    "tight": lambda: planned(chain(4), device=1200, host=1500),
}


def listed(instruction: Instruction) -> str:
    """What an instruction does and to what, and what it waits for."""
    operation = instruction.operation
    reads, writes = (
        " ".join(str(array) for array, _ in copies)
        for copies in (instruction.reads, instruction.writes)
    )
    text = f"{operation}: {reads} => {writes}"
    if isinstance(operation, Transfer):
        text = f"{operation.source} => {operation.target}: {reads}"
    elif isinstance(operation, Free):
        text = f"free on {operation.tier}: {' '.join(map(str, operation.arrays))}"
    for tier, nbytes in instruction.workspace:
        text += f", {nbytes} B on {tier}"
    if instruction.flops:
        text += f", {instruction.flops} flops"
    if instruction.after:
        text += f" (after {' '.join(map(str, instruction.after))})"
    return text


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_plan_is_what_it_was(name: str, golden: Golden) -> None:
    plan = SCENARIOS[name]()
    lines = [f"{i:2} {listed(x)}" for i, x in enumerate(plan.instructions)]
    peaks = ", ".join(f"{n:,} B on {tier}" for tier, n in plan.peak_bytes.items())
    lines.append(f"At most {peaks}")
    golden.check(f"{name.replace(',', '').replace(' ', '_')}.txt", "\n".join(lines))


def test_a_plan_prints_a_summary_and_every_instruction(golden: Golden) -> None:
    """One layer whose state rests on the host and whose parameter is on the drive."""
    plan = planned(chain(1, leaf=LeafCase("w", 4)), state=HOST)
    golden.check("printed.txt", str(plan))
    assert max(map(len, str(plan).splitlines())) <= 88
    assert "homes=" not in repr(plan)
    # The middle of a long plan is left out, and the plan says how to see it.
    long = planned(chain(9, leaf=LeafCase("w", 4)), state=HOST)
    left, lines = len(long.instructions) - 40, long.listing().splitlines()
    gap = f"... {left} more instructions (print(plan.listing()) has all)"
    assert left > 0 and len(lines) == 1 + len(long.instructions)
    assert str(long).endswith("\n".join([*lines[:31], gap, *lines[-10:]]))
    moved = sum(x.nbytes for x in plan.instructions if x.link == Link.NVME_READ)
    assert plan.link_bytes(Link.NVME_READ) == moved > 0
    assert plan.tiers == set(Tier)
    assert plan.timeline is plan.timeline
    # The summary leaves out tiers and links that are not used.
    assert "nvme" not in planned(chain(1), param=HOST, state=HOST, nvme=0).summary()


def test_bytes_have_three_digits_and_a_unit_and_short_times_are_milliseconds() -> None:
    cases = {
        0: "0 B",
        999: "999 B",
        1000: "0.98 KiB",
        1024: "1.00 KiB",
        10 * 1024 - 1: "10.0 KiB",
        100 * 1024 - 1: "100 KiB",
        999 * 1024: "999 KiB",
        1000 * 1024: "0.98 MiB",
        3 * 2**30 // 2: "1.50 GiB",
        5000 * 2**50: "5000 PiB",
    }
    assert {n: show_bytes(n) for n in cases} == cases
    seconds = {0.00004: "0.0 ms", 0.0123: "12.3 ms", 1.0: "1.00 s"}
    assert {s: show_seconds(s) for s in seconds} == seconds
