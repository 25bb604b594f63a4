"""However a step is arranged, its numbers are the same.

When updates run and where, how long gradients wait, and where activations do: the same
executables compute the same values, so losses and parameters are equal to the bit. The
one exception is stated where it is tested: with room, a segment keeps residuals, and
its backward pass is another executable.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.equivalence.models import PYTREE
from tests.equivalence.training import (
    ACCUMULATION,
    BF16,
    CLIPPING,
    OPTIMIZERS,
    Run,
    assert_bit_equal,
    run_of,
    streamed_config,
)
from zinf.core.memory.host import alias
from zinf.core.plan import (
    Arrangement,
    Catalog,
    Choices,
    Keeping,
    Pass,
    Resident,
    StepOptions,
    Transfer,
    Update,
    UpdateUnit,
    arrange,
    place,
)
from zinf.core.plan import Run as RunSegment
from zinf.core.program import Role, Tier
from zinf.core.step import updates
from zinf.core.step.run import links, run, transfer
from zinf.core.step.run.links import InFlight

DEVICE, HOST, NVME = ORDER = tuple(Tier)
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": ACCUMULATION,
    "clipping": CLIPPING,
    "accumulation and clipping": ACCUMULATION | CLIPPING,
    "bf16 and clipping": BF16 | CLIPPING,
    "overflow": FP16 | ACCUMULATION,
    "on a mesh": ACCUMULATION | CLIPPING | {"mesh": {"replica": 2, "fsdp": 2}},
}
# Several devices, and dtypes that DLPack does not take from NumPy.
UNSHARED = {"on a mesh", "bf16 and clipping"}
# In the step of this number the gradient overflows in float16. Updates that the step
# before left run all the same, and those that the step after it leaves are read by the
# last.
STEPS, OVERFLOWS = 5, 3


@dataclass(frozen=True)
class Arranged:
    """What is forced on a step; `params` and `states` are where arrays rest."""

    params: str = "nvme"
    states: str = "nvme"
    deferred_share: float = 0.0
    update_tier: Tier = HOST
    value_tier: Tier = DEVICE
    gradient_tier: Tier = HOST
    kept_share: float = 0.0
    block_bytes: int = updates.BLOCK_BYTES
    by_row: bool = False
    turns: int = 0


PLAINEST = Arranged()
# Every pair of what can be chosen is in one of these at least: see the test below.
CASES = [
    ("plain", Arranged("nvme", "nvme", 1.0, HOST, DEVICE, HOST)),
    ("accumulation", Arranged("nvme", "nvme", 0.5, DEVICE, HOST, NVME)),
    ("clipping", Arranged("nvme", "nvme", 1.0, DEVICE, NVME, HOST)),
    ("accumulation and clipping", Arranged("nvme", "nvme", 0.0, HOST, NVME, NVME)),
    ("bf16 and clipping", Arranged("cpu", "nvme", 0.5, HOST, HOST, HOST)),
    ("overflow", Arranged("cpu", "nvme", 0.0, DEVICE, DEVICE, NVME)),
    ("on a mesh", Arranged("cpu", "cpu", 1.0, HOST, HOST, NVME)),
    ("overflow", Arranged("cpu", "cpu", 0.5, DEVICE, NVME, HOST)),
    ("accumulation", Arranged("none", "cpu", 1.0, DEVICE, DEVICE, HOST)),
    ("overflow", Arranged("none", "nvme", 0.5, HOST, DEVICE, NVME)),
    ("clipping", Arranged("none", "none", 0.0, HOST, HOST, HOST)),
    ("accumulation and clipping", Arranged("none", "none", 1.0, HOST, NVME, HOST)),
]
FAST = [CASES[i] for i in (0, 2, 7)]


@dataclass(frozen=True)
class Result:
    """Attributes:
    updates: the tiers of all updates, and whether a step before left them.
    passes: of the last step.
    num_shared: arrays that host and device hold in one memory.
    at_once: the most programs that devices had at a time.
    rows_moved: transfers of rows of gradients in the last step.
    """

    run: Run
    updates: frozenset[tuple[Tier, bool]]
    passes: frozenset[Pass]
    num_shared: int
    at_once: int
    rows_moved: int


@cache
def train(setting: str, arranged: Arranged) -> Result:
    """Some steps, with updates by gradients of the step before where they are late."""
    settings = SETTINGS[setting]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(updates, "BLOCK_BYTES", arranged.block_bytes)
        patch.setattr(updates, "UNIT_BLOCKS", 1)
        # All but the reference have one memory for host and device, where they can.
        is_plain = arranged == PLAINEST
        patch.setattr(alias, "SHARED_FROM_BYTES", 1 << 40 if is_plain else 1)
        # And their devices get programs ahead, as accelerators do.
        patch.setattr(run, "programs_at_once", lambda _: 1 if is_plain else 2)
        given: list[int] = []
        patch.setattr(links, "InFlight", partial(_Noted, given))
        shared: list[Any] = []
        for alias_of in (alias.device_alias, alias.host_alias):
            noting = partial(_noting, shared, alias_of)
            patch.setattr(transfer, alias_of.__name__, noting)
        config = streamed_config((arranged.params, arranged.states), folder) | settings
        if arranged.kept_share:
            config["segment"] = {"remat": "auto"}
        with PYTREE.start(OPTIMIZERS["adam"], config) as engine:
            forced = partial(_forced, arranged)
            engine.planner = replace(engine.planner, build_placed=forced)
            metrics, late = [], set()
            count = settings.get("gradient_accumulation_steps", 1)
            for number, batch in enumerate(PYTREE.batches(STEPS, count), start=1):
                if setting == "overflow" and number == OVERFLOWS:
                    batch = batch | {"y": batch["y"] * 1e4}
                metrics.append(engine.step(batch))
                operations = [x.operation for x in engine.last_step.plan.instructions]
                late |= {
                    (x.tier, x.is_pending) for x in operations if isinstance(x, Update)
                }
            found = run_of(metrics, engine.params())
    moved = [a for x in operations if isinstance(x, Transfer) for a in x.arrays]
    return Result(
        found,
        frozenset(late),
        frozenset(x.kind for x in operations if isinstance(x, RunSegment)),
        sum(x is not None for x in shared),
        max(given, default=1),
        sum(a.role == Role.GRADIENT and a.rows is not None for a in moved),
    )


def _forced(
    arranged: Arranged,
    catalog: Catalog,
    residents: Sequence[Resident],
    units_for: Callable[..., Sequence[UpdateUnit]],
    capacity_bytes: dict[Tier, int],
    options: StepOptions,
    choices: Choices,
) -> Arrangement:
    """The step as `arranged` says; where there is no drive, the host stands for it."""
    tiers = [t for t in Tier if capacity_bytes[t]]
    homes = place(residents, capacity_bytes, persistence_bytes=256)
    keeping: Mapping[int, Keeping] = {}
    if arranged.kept_share:
        keeping = choices.keepings[0](capacity_bytes[DEVICE])
    units = units_for(homes, arranged.update_tier, arranged.turns)
    # Every other unit, or all, or none.
    step = round(1 / arranged.deferred_share) if arranged.deferred_share else None
    return arrange(
        replace(catalog, homes=homes, keeping=keeping),
        units_for,
        capacity_bytes,
        replace(
            options,
            update_tier=arranged.update_tier,
            turns=arranged.turns,
            value_tier=min(arranged.value_tier, tiers[-1], key=ORDER.index),
            gradient_tier=min(arranged.gradient_tier, tiers[-1], key=ORDER.index),
            gradients_by_row=arranged.by_row,
            num_kept=round(arranged.kept_share * len(keeping)),
            deferred=frozenset(range(len(units))[::step] if step else ()),
        ),
    )


class _Noted(InFlight):
    """Notes how many programs there are whenever one is added."""

    def __init__(self, counts: list[int], *args: Any):
        super().__init__(*args)
        self.counts = counts

    def add(self, index: int, wait: Any) -> None:
        super().add(index, wait)
        self.counts.append(len(self))


def _noting(results: list[Any], function: Callable[..., Any], *args: Any) -> Any:
    results.append(function(*args))
    return results[-1]


def name_of(value: Any) -> str:
    if isinstance(value, str):
        return value
    late = f"late {value.deferred_share}"
    tiers = value.params, value.states, value.update_tier, value.value_tier
    return "-".join((*map(str, tiers), str(value.gradient_tier), late))


@pytest.mark.parametrize(
    ("setting", "arranged"),
    [pytest.param(*c, marks=() if c in FAST else pytest.mark.slow) for c in CASES],
    ids=name_of,
)
def test_losses_and_parameters_are_bit_equal(setting, arranged):
    expected, found = train(setting, PLAINEST), train(setting, arranged)
    assert found.run.skipped == expected.run.skipped
    overflows = setting == "overflow"
    assert expected.run.skipped == tuple(
        overflows and number == OVERFLOWS for number in range(1, STEPS + 1)
    )
    assert_bit_equal(found.run, expected.run)
    # And it was arranged so: updates ran there and then, programs were given ahead, and
    # memory was shared.
    assert (expected.num_shared, expected.at_once, found.at_once) == (0, 1, 2)
    assert setting in UNSHARED or found.num_shared > 0 or arranged.params == "none"
    tiers = {tier for tier, _ in found.updates}
    if (arranged.params, arranged.states) == ("none", "none"):
        assert tiers == {DEVICE}
    else:
        assert arranged.update_tier in tiers
    assert any(late for _, late in found.updates) == (arranged.deferred_share > 0)


@pytest.mark.parametrize(
    ("setting", "kept_share"),
    [
        ("overflow", 0.5),
        pytest.param("accumulation and clipping", 1.0, marks=pytest.mark.slow),
    ],
)
def test_kept_residuals_change_what_rounding_does_at_most(setting, kept_share):
    """XLA may fuse the two backward passes in different ways."""
    keeping = Arranged(deferred_share=1.0, kept_share=kept_share)
    expected, found = train(setting, PLAINEST), train(setting, keeping)
    assert {Pass.KEEPING, Pass.KEPT} <= found.passes
    assert (Pass.BACKWARD in found.passes) == (kept_share < 1)
    assert found.run.skipped == expected.run.skipped
    # Float32 keeps 24 bits, of which steps of Adam lose a few; float16 keeps 11.
    rtol = 1e-2 if setting == "overflow" else 1e-5
    np.testing.assert_allclose(found.run.losses, expected.run.losses, rtol=rtol)


def test_updates_on_host_and_device_in_turn_change_no_bit():
    turns = Arranged("cpu", "cpu", 1.0, turns=2)
    expected, found = (train("clipping", x) for x in (PLAINEST, turns))
    assert {tier for tier, _ in found.updates} == {HOST, DEVICE}
    assert_bit_equal(found.run, expected.run)


def test_gradients_that_come_by_row_change_no_bit():
    blocks = Arranged(block_bytes=256)
    expected = train("accumulation", blocks)
    found = train("accumulation", replace(blocks, by_row=True))
    # Rows of a stacked leaf come one by one in both.
    assert found.rows_moved > expected.rows_moved
    assert_bit_equal(found.run, expected.run)


def test_every_pair_of_choices_occurs():
    """Guards the list above."""
    assert {setting for setting, _ in CASES} == SETTINGS.keys()
    fields = {
        "deferred_share": (0.0, 0.5, 1.0),
        "update_tier": (HOST, DEVICE),
        "value_tier": tuple(Tier),
        "gradient_tier": (HOST, NVME),
    }
    for first, second in product(fields, fields):
        if first < second:
            occurring = {(getattr(a, first), getattr(a, second)) for _, a in CASES}
            assert occurring == {*product(fields[first], fields[second])}
