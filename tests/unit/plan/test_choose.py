"""Of the arrangements that fit, the fastest; of equal ones, the plainest.

`golden/choices.txt` has what is chosen in each scenario, whose name says why.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest

from tests.golden import Golden
from tests.toy.program import LeafCase, chain
from zinf.core.plan import (
    Arrangement,
    Choices,
    InfeasibleError,
    Keeping,
    Link,
    Rates,
    Resident,
    Run,
    StepOptions,
    UpdateUnit,
    build_at_home,
    build_placed,
    prove,
)
from zinf.core.program import ArrayId, ArraySpec, Role, Tier

DEVICE, HOST, NVME = Tier
AMPLE = 1 << 30
NUM_LAYERS, KEPT_BYTES, MATRIX_BYTES = 8, 4000, 4000
TOY = chain(NUM_LAYERS, leaf=LeafCase("w", 4, MATRIX_BYTES // 16))
STATE_BYTES = 3 * NUM_LAYERS * MATRIX_BYTES  # parameters and two moments
# A matrix of 4,000 bytes takes a millisecond each way, its moments two more.
DRIVE = {Link.NVME_READ: 4e6, Link.NVME_WRITE: 4e6, Link.H2D: 1e9, Link.D2H: 1e9}
UPDATES = {HOST: 1e9, DEVICE: 1e9}
# A forward pass is of 100 operations: a tenth of a millisecond, 10 ms or a second.
FAST, SLOW, SLOWEST = (Rates(DRIVE, flops, UPDATES, 1e-6) for flops in (1e6, 1e4, 1e2))
# The updates of a layer take 12 ms on the host and 8 ms each way, its forward pass 2.
SLOW_BOTH = Rates(
    dict.fromkeys(DRIVE, 1.5e6), 5e4, {HOST: 1e6, DEVICE: 1e9}, overhead_seconds=1e-6
)
SLOW_HOST = replace(FAST, update_bytes_per_second={HOST: 1e5, DEVICE: 1e9})


@dataclass
class Keeper:
    """What the seven first segments can save, of these bytes each.

    Attributes:
        flops_again: what a segment computes again that saves less; None if it saves
            all.
        asked: the room that was offered, for each time that somebody asked.
    """

    nbytes: int = KEPT_BYTES
    flops_again: int | None = None
    asked: list[int] = field(default_factory=list)

    def __call__(self, room_bytes: int) -> dict[int, Keeping]:
        self.asked.append(room_bytes)
        residuals = (ArraySpec((self.nbytes // 4,), "f4", 4),)
        again = self.flops_again
        keeping = Keeping(residuals, (0, 0), again is not None, again or 0)
        return dict.fromkeys(range(NUM_LAYERS - 1), keeping)


def counted(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in numbers.items())


def described(made: Arrangement, *keepers: Keeper) -> str:
    prove(made)
    plan, options = made.plan, made.options
    runs = [x for x in plan.instructions if isinstance(x.operation, Run)]
    passes = [f"{x.operation.kind} {x.flops}" for x in runs]
    order = " ".join("".join(w[0] for w in p.split()[:-1]) for p in passes)
    at_rest = Counter(f"{a.role} {t}" for a, t in made.catalog.homes.items())
    turns = f" but every {options.turns}." if options.turns else ""
    less = any(keeping.is_selective for keeping in made.catalog.keeping.values())
    lines = [
        f"{made.seconds:.4g} s, {options.num_kept} keep {'less' if less else 'all'}"
        f" of the room {[k.asked for k in keepers]}",
        f"updates on {options.update_tier}{turns}, "
        f"deferred {sorted(options.deferred)}, {len(made.pending)} pending",
        f"{counted(Counter(passes))}: {order}",
        f"{counted(at_rest)}: bytes at rest {counted(made.plan.home_bytes)}",
        f"peaks {counted(plan.peak_bytes)}",
    ]
    assert all(plan.peak_bytes[t] <= plan.capacity_bytes[t] for t in Tier)
    assert (made.first is None) == (made.flush is None) == (not options.deferred)
    return "\n".join(f"    {line}" for line in lines)


def at_home(
    rates: Rates,
    *keepers: Keeper,
    host: int = AMPLE,
    device: int = AMPLE,
    waits: bool = False,
    microbatches: int = 1,
    home: Tier = NVME,
    turns: tuple[int, ...] = (),
) -> str:
    """The step with all arrays at home on the drive, or another tier."""
    keepers = keepers or (Keeper(),)
    homes = TOY.homes(home, home)
    catalog = TOY.catalog(homes, num_microbatches=microbatches)
    made = build_at_home(
        replace(catalog, rates=rates),
        TOY.units_for,
        {DEVICE: device, HOST: host, NVME: AMPLE},
        StepOptions(microbatches, not waits, DEVICE, HOST),
        Choices((DEVICE,), (HOST,), 0, (DEVICE,), turns, keepers, defers=True),
    )
    return described(made, *keepers)


def placed(
    rates: Rates,
    device: int,
    keeps: bool = True,
    asked: Tier | None = None,
    host: int = 6 * MATRIX_BYTES,
    nvme: int = AMPLE,
) -> str:
    """The step whose arrays rest where they gain most."""
    # Arrays on the device, for each time that units were asked for.
    attempts = []

    def units_for(
        homes: Mapping[ArrayId, Tier], tier: Tier, turns: int
    ) -> Sequence[UpdateUnit]:
        attempts.append(sum(tier == DEVICE for tier in homes.values()))
        return TOY.units_for(homes, tier, turns)

    residents = [
        Resident(
            array,
            spec.nbytes,
            asked,
            3 if array.role == Role.PARAM else 2,
            segment=int(array.path[len("layer")]),
        )
        for array, spec in TOY.specs.items()
    ]
    keepers = [Keeper()] if keeps else []
    try:
        made = build_placed(
            replace(TOY.catalog({}), rates=rates),
            residents,
            units_for,
            {DEVICE: device, HOST: host, NVME: nvme},
            StepOptions(1, True, DEVICE, HOST),
            Choices((DEVICE,), (HOST,), 0, keepings=tuple(keepers)),
        )
    except InfeasibleError as error:
        return f"    {error}\n    tried with {attempts} arrays on the device"
    said = described(made, *keepers)
    return f"{said}\n    tried with {attempts} arrays on the device"


# Each instruction takes a second, a step 29 s. Computing again takes 0.6 s, or nothing.
LATE = replace(SLOWEST, overhead_seconds=1.0, flops_per_second=700 / 0.6)
IDLE = replace(LATE, flops_per_second=1e12)
SCENARIOS: dict[str, Callable[[], str]] = {
    "computing binds: nothing is deferred": lambda: at_home(SLOWEST),
    # With a matrix and its gradient as much as three and four segments keep: the last.
    "residuals of three": lambda: at_home(SLOWEST, device=24_000),
    "residuals of four": lambda: at_home(SLOWEST, device=28_000),
    "each microbatch keeps its own": lambda: at_home(
        SLOWEST, device=34_000, microbatches=2
    ),
    "less by more of them": lambda: at_home(
        SLOWEST, Keeper(), Keeper(400, 10), device=24_000
    ),
    "less is not asked for where all fits": lambda: at_home(
        SLOWEST, Keeper(), Keeper(400, 10)
    ),
    "less that saves nothing": lambda: at_home(
        SLOWEST, Keeper(), Keeper(400, 100), device=24_000
    ),
    "the drive binds: updates wait": lambda: at_home(FAST),
    "updates after the norm wait": lambda: at_home(FAST, waits=True),
    "what is read first is updated in time": lambda: at_home(
        FAST, waits=True, host=48_000
    ),
    "a slow host": lambda: at_home(SLOW_HOST),
    "host and links are slow: both take turns": lambda: at_home(
        SLOW_BOTH, waits=True, home=HOST, turns=(2,)
    ),
    "host and links are fast: no turns": lambda: at_home(
        SLOW, waits=True, home=HOST, turns=(2,)
    ),
    "residuals that gain nothing": lambda: at_home(IDLE),
    "residuals that gain 2%": lambda: at_home(LATE),
    # Where computing binds, residuals are kept, and the first layers rest.
    "placed to keep": lambda: placed(SLOW, 12 * MATRIX_BYTES),
    "asked for nvme": lambda: placed(SLOW, 12 * MATRIX_BYTES, asked=NVME),
    # Without residuals or with a slow drive memory is filled, by what moves most.
    "placed without keeping": lambda: placed(SLOW, 12 * MATRIX_BYTES, keeps=False),
    "placed with a slow drive": lambda: placed(FAST, 12 * MATRIX_BYTES),
    # Without a drive, state waits on the host.
    "no drive": lambda: placed(SLOW, 14 * MATRIX_BYTES, host=AMPLE, nvme=0),
    # Refused after one attempt.
    "a byte less than all state": lambda: placed(
        FAST, 24_000, False, host=24_000, nvme=STATE_BYTES - 48_001
    ),
    # All 24 arrays would fit, but no step beside them: ever more room is left.
    "a byte more than all state": lambda: placed(
        FAST, STATE_BYTES + 1, False, host=AMPLE
    ),
    "no drive, no keeping": lambda: placed(
        SLOW, 14 * MATRIX_BYTES, False, host=AMPLE, nvme=0
    ),
}


def test_the_fastest_is_chosen_and_the_plainest_of_equal_ones(golden: Golden) -> None:
    found = [f"{name}:\n{scenario()}" for name, scenario in SCENARIOS.items()]
    golden.check("choices.txt", "\n".join(found))


def test_where_a_plan_is_long_no_other_placement_is_searched_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def chosen(keeps: bool = True) -> list[str]:
        return placed(SLOW, 14 * MATRIX_BYTES, keeps).splitlines()[1:-1]

    searched = chosen()
    monkeypatch.setattr("zinf.core.plan.placed.MAX_INSTRUCTIONS", 8)
    assert chosen() == chosen(keeps=False) != searched
