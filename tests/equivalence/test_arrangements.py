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

import chex
import numpy as np
import pytest

from tests.equivalence.models import PYTREE
from tests.equivalence.training import OPTIMIZERS, STEPS, streamed_config
from tests.marks import slow_except
from zinf.executor import transfer
from zinf.memory import alias
from zinf.plan import (
    Arrangement,
    Catalog,
    Choices,
    Decide,
    Keeping,
    Pass,
    Resident,
    Run,
    StepOptions,
    Transfer,
    Update,
    UpdateUnit,
    arrange,
    passage,
    place,
)
from zinf.plan.job import Job
from zinf.plan.schedule import _Schedule
from zinf.prepare import updates
from zinf.program import Role, Tier

DEVICE, HOST, NVME = ORDER = tuple(Tier)
ACCUMULATING = {"gradient_accumulation_steps": 2}
# Below the norms that occur, so that every step is clipped.
CLIPPED = {"gradient_clipping": 0.05}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": ACCUMULATING,
    "clipping": CLIPPED,
    "accumulation and clipping": ACCUMULATING | CLIPPED,
    "bf16 and clipping": {"bf16": {"enabled": True}} | CLIPPED,
    "overflow": FP16 | ACCUMULATING,
    "on a mesh": ACCUMULATING | CLIPPED | {"mesh": {"replica": 2, "fsdp": 2}},
}
# Several devices, and dtypes that DLPack does not take from NumPy.
UNSHARED = {"on a mesh", "bf16 and clipping"}
# In the step of this number the gradient overflows in float16.
OVERFLOWS = 12


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
    is_horizontal: bool = False
    block_bytes: int = updates.BLOCK_BYTES
    by_row: bool = False

    def __str__(self) -> str:
        return (
            f"{self.params}-{self.states}-late{self.deferred_share}-on-"
            f"{self.update_tier}-values-{self.value_tier}-gradients-"
            f"{self.gradient_tier}"
        )


PLAINEST = Arranged()
# Every pair of what can be chosen is in one of these at least: see the test below.
OTHERS = [
    Arranged("nvme", "nvme", 1.0, HOST, DEVICE, HOST),
    Arranged("nvme", "nvme", 0.5, DEVICE, HOST, NVME),
    Arranged("nvme", "nvme", 1.0, DEVICE, NVME, HOST),
    Arranged("nvme", "nvme", 0.0, HOST, NVME, NVME),
    Arranged("cpu", "nvme", 0.5, HOST, HOST, HOST),
    Arranged("cpu", "nvme", 0.0, DEVICE, DEVICE, NVME),
    Arranged("cpu", "cpu", 1.0, HOST, HOST, NVME),
    Arranged("cpu", "cpu", 0.5, DEVICE, NVME, HOST),
    Arranged("none", "cpu", 1.0, DEVICE, DEVICE, HOST),
    Arranged("none", "nvme", 0.5, HOST, DEVICE, NVME),
    Arranged("none", "none", 0.0, HOST, HOST, HOST),
    Arranged("none", "none", 1.0, HOST, NVME, HOST),
]


@dataclass(frozen=True)
class Result:
    losses: tuple[float, ...]
    skipped: tuple[bool, ...]
    params: Any
    operations: frozenset[tuple[Tier, bool]]
    runs: tuple[tuple[Pass, int], ...]
    num_shared: int
    rows_moved: int


@cache
def train(setting: str, arranged: Arranged) -> Result:
    """Twenty steps, with updates by gradients of steps before where they are late."""
    settings = SETTINGS[setting]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(updates, "BLOCK_BYTES", arranged.block_bytes)
        patch.setattr(updates, "UNIT_BLOCKS", 1)
        # All but the reference have one memory for host and device, where they can.
        smallest = 1 << 40 if arranged == PLAINEST else 1
        patch.setattr(alias, "SHARED_FROM_BYTES", smallest)
        shared: list[Any] = []
        for alias_of in (alias.device_alias, alias.host_alias):
            noting = partial(_noting, shared, alias_of)
            patch.setattr(transfer, alias_of.__name__, noting)
        if arranged.is_horizontal:
            patch.setattr(passage, "schedule", horizontal_schedule)
        config = streamed_config((arranged.params, arranged.states), folder)
        if arranged.kept_share:
            config["segment"] = {"remat": "auto"}
        engine = PYTREE.start(OPTIMIZERS["adam"], {**config, **settings})
        forced = partial(_forced, arranged)
        engine.planner = replace(engine.planner, build_placed=forced)
        metrics, operations = [], set()
        count = settings.get("gradient_accumulation_steps", 1)
        for number, batch in enumerate(PYTREE.batches(STEPS, count), start=1):
            if "fp16" in settings and number == OVERFLOWS:
                batch = batch | {"y": batch["y"] * 1e4}
            metrics.append(engine.step(batch))
            operations.update(
                (x.operation.tier, x.operation.is_pending)
                for x in engine.last_step.plan.instructions
                if isinstance(x.operation, Update)
            )
            runs = [
                (x.operation.kind, x.operation.microbatch)
                for x in engine.last_step.plan.instructions
                if isinstance(x.operation, Run)
            ]
        moved = [
            array
            for x in engine.last_step.plan.instructions
            if isinstance(x.operation, Transfer)
            for array in x.operation.arrays
            if array.role == Role.GRADIENT and array.rows is not None
        ]
        params = engine.params()
        engine.close()
    return Result(
        tuple(m["loss"] for m in metrics),
        tuple(m["skipped"] for m in metrics),
        params,
        frozenset(operations),
        tuple(runs),
        sum(x is not None for x in shared),
        len(moved),
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
    units = units_for(homes, arranged.update_tier)
    # Every other unit, or all, or none.
    step = round(1 / arranged.deferred_share) if arranged.deferred_share else None
    return arrange(
        replace(catalog, homes=homes, keeping=keeping),
        units_for,
        capacity_bytes,
        replace(
            options,
            update_tier=arranged.update_tier,
            value_tier=min(arranged.value_tier, tiers[-1], key=ORDER.index),
            gradient_tier=min(arranged.gradient_tier, tiers[-1], key=ORDER.index),
            gradients_by_row=arranged.by_row,
            num_kept=round(arranged.kept_share * len(keeping)),
            deferred=frozenset(range(len(units))[::step] if step else ()),
        ),
    )


def _noting(found: list[Any], function: Callable[..., Any], *args: Any) -> Any:
    found.append(function(*args))
    return found[-1]


# Each arrangement in half of the settings, and each setting in half of them.
CASES = [
    (setting, arranged)
    for i, arranged in enumerate(OTHERS)
    for j, setting in enumerate(SETTINGS)
    if (i + j) % 2 == 0 or setting == "overflow"
]
# Each arrangement in one of them, and each setting in one arrangement at least.
NAMES = list(SETTINGS)
FAST = list(zip([*NAMES, *NAMES[1:6]], OTHERS, strict=True))
assert {*FAST} <= {*CASES}


@pytest.mark.sampled(1, slow=6)
@pytest.mark.parametrize(
    ("setting", "arranged"),
    slow_except(FAST, CASES),
    ids=["-".join(map(str, case)) for case in CASES],
)
def test_losses_and_parameters_are_bit_equal(setting, arranged):
    expected, found = train(setting, PLAINEST), train(setting, arranged)
    assert found.losses == expected.losses
    assert found.skipped == expected.skipped
    chex.assert_trees_all_equal(found.params, expected.params, strict=True)
    # And it was arranged so: updates ran there and then, and memory was shared.
    assert expected.num_shared == 0
    assert setting in UNSHARED or found.num_shared > 0 or arranged.params == "none"
    tiers = {tier for tier, _ in found.operations}
    if (arranged.params, arranged.states) == ("none", "none"):
        assert tiers == {DEVICE}
    else:
        assert arranged.update_tier in tiers
    assert any(late for _, late in found.operations) == (arranged.deferred_share > 0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("setting", "kept_share"),
    slow_except(
        [("accumulation and clipping", 1.0), ("overflow", 0.5)],
        product(["accumulation and clipping", "overflow"], [0.5, 1.0]),
    ),
)
def test_kept_residuals_change_what_rounding_does_at_most(setting, kept_share):
    """XLA may fuse the two backward passes in different ways."""
    keeping = Arranged(deferred_share=1.0, kept_share=kept_share)
    expected, found = train(setting, PLAINEST), train(setting, keeping)
    passes = {kind for kind, _ in found.runs}
    assert {Pass.KEEPING, Pass.KEPT} <= passes
    assert (Pass.BACKWARD in passes) == (kept_share < 1)
    assert found.skipped == expected.skipped
    # Float32 keeps 24 bits, of which twenty steps of Adam lose a few; float16 keeps 11.
    rtol = 1e-2 if setting == "overflow" else 1e-5
    np.testing.assert_allclose(found.losses, expected.losses, rtol=rtol)


@pytest.mark.parametrize(
    "setting", slow_except(["accumulation"], ["plain", "accumulation"])
)
def test_gradients_that_come_by_row_change_no_bit(setting):
    blocks = Arranged(block_bytes=256)
    expected = train(setting, blocks)
    found = train(setting, replace(blocks, by_row=True))
    # Rows of a stacked leaf come one by one in both.
    assert found.rows_moved > expected.rows_moved
    assert found.losses == expected.losses
    chex.assert_trees_all_equal(found.params, expected.params, strict=True)


def horizontal_schedule(
    catalog: Catalog, units: Sequence[UpdateUnit], options: StepOptions
) -> list[Job]:
    """One microbatch after another through all segments, and updates at the end."""
    made = _Schedule(catalog, units, options)
    segments = made.program.segments
    body = [k for k in reversed(made.body) if segments[k].has_backward]
    losses = []
    for m in made.microbatches:
        for k in made.body:
            made.forward(k, m)
        losses.append(made.loss(made.last, m))
        for k in body:
            made.backward(k, m)
    for k in (made.last, *body):
        made.finish_gradients(k)
    read = [*losses, *made.norms]
    made.jobs.add_host(Decide(tuple(losses), tuple(made.norms)), read)
    made.updates.add_ready(made.is_complete)
    return made.jobs


@pytest.mark.parametrize(
    "setting",
    slow_except(
        ["accumulation and clipping"],
        ["accumulation", "accumulation and clipping", "overflow"],
    ),
)
def test_the_vertical_schedule_gives_the_losses_of_the_horizontal_one(setting):
    expected = train(setting, Arranged(is_horizontal=True))
    found = train(setting, PLAINEST)
    # One goes back to the first segment for the second microbatch, one does not.
    assert (Pass.LOSS, 1) in found.runs[: len(found.runs) // 2 + 1]
    assert expected.runs.index((Pass.LOSS, 0)) < expected.runs.index((Pass.FORWARD, 1))
    assert found.losses == expected.losses
    assert found.skipped == expected.skipped
    chex.assert_trees_all_equal(found.params, expected.params, strict=True)


@pytest.mark.slow
def test_the_late_overflow_is_one():
    skipped = train("overflow", PLAINEST).skipped
    assert skipped[OVERFLOWS - 1]
    assert not any(skipped[: OVERFLOWS - 1])


def test_every_pair_of_choices_occurs():
    """Guards the list above."""
    fields = {
        "deferred_share": (0.0, 0.5, 1.0),
        "update_tier": (HOST, DEVICE),
        "value_tier": tuple(Tier),
        "gradient_tier": (HOST, NVME),
    }
    for first, second in product(fields, fields):
        if first < second:
            for pair in product(fields[first], fields[second]):
                assert any(
                    (getattr(a, first), getattr(a, second)) == pair for a in OTHERS
                ), (first, second, pair)
