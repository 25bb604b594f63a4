"""How much of a step overlaps, on a virtual clock with links of random speeds.

The bound is what no order of the links' instructions could beat: for each link, the
work of any set of its instructions, after the earliest time that one of them could
start and before the least that has to follow one of them (the one-machine relaxation of
job-shop scheduling; Carlier, 1982). It is at least the busiest link and the critical
path. A step is not there yet in general: updates only begin in the backward pass, and
fences hold what is in flight to the peak of the list order.
"""

from collections.abc import Sequence
from functools import cache
from random import Random
from statistics import median

import pytest

from tests.toy.program import Layer, LeafCase, Toy, make_toy
from zinf.plan import Instruction, Link, Plan, Rates, StepOptions, build, predict
from zinf.plan.cost import duration
from zinf.program import ArrayId, Tier

NUM_PROGRAMS = 20
PLENTY = 10**9
KB = 1e3


@cache
def steps(clips: bool) -> list[tuple[Plan, Rates]]:
    """Plans of random chains with everything on NVMe, and how fast their links are."""
    return [_step(Random(seed), clips=clips) for seed in range(NUM_PROGRAMS)]


def _step(random: Random, *, clips: bool) -> tuple[Plan, Rates]:
    toy = _chain(random)
    homes = toy.homes(Tier.NVME, Tier.NVME)
    num_microbatches = random.choice([1, 2, 4])
    value_tier = random.choice([Tier.DEVICE, Tier.HOST])
    plan = build(
        toy.catalog(homes, num_microbatches=num_microbatches),
        toy.units(homes),
        dict.fromkeys(Tier, PLENTY),
        StepOptions(num_microbatches, not clips, value_tier, Tier.HOST),
    )
    links = {
        Link.NVME_READ: random.uniform(0.5, 4) * KB,
        Link.NVME_WRITE: random.uniform(0.5, 4) * KB,
        Link.H2D: 8 * KB,
        Link.D2H: 8 * KB,
    }
    updates = {Tier.HOST: random.uniform(2, 10) * KB, Tier.DEVICE: 10 * KB}
    return plan, Rates(links, random.uniform(20, 400), updates, 1e-4)


def _chain(random: Random) -> Toy:
    leaves, layers, value = [], [], "batch/x"
    for i in range(random.randint(4, 16)):
        rows, numel = random.choice([1, 2, 4]), random.choice([500, 1000, 2000, 4000])
        leaves.append(LeafCase(f"w{i}", num_rows=rows, row_numel=numel))
        output = f"s{i}.0"
        layers.append(Layer(f"s{i}", (ArrayId("param", f"w{i}"),), (value,), (output,)))
        value = output
    return make_toy(
        leaves,
        layers,
        value_numel=random.choice([50, 200, 800]),
        block_rows=random.choice([None, 1]),
    )


def bound_seconds(instructions: Sequence[Instruction], rates: Rates) -> float:
    """What no order of the instructions of each link could beat."""
    seconds = [duration(i, rates) for i in instructions]
    heads = [0.0] * len(seconds)
    tails = [0.0] * len(seconds)
    for k, instruction in enumerate(instructions):
        heads[k] = max((heads[j] + seconds[j] for j in instruction.after), default=0.0)
    for k in reversed(range(len(seconds))):
        for j in instructions[k].after:
            tails[j] = max(tails[j], tails[k] + seconds[k])
    best = 0.0
    for link in {i.link for i in instructions}:
        mine = [k for k, i in enumerate(instructions) if i.link == link]
        mine.sort(key=lambda k: -tails[k])
        for head in {heads[k] for k in mine}:
            work = 0.0
            for k in mine:
                if heads[k] >= head:
                    work += seconds[k]
                    best = max(best, head + work + tails[k])
    return best


@pytest.mark.parametrize("clips", [False, True])
def test_a_step_never_takes_longer_than_its_instructions_one_by_one(clips) -> None:
    for plan, rates in steps(clips):
        serial = sum(duration(i, rates) for i in plan.instructions)
        assert predict(plan.instructions, rates).seconds <= serial


@pytest.mark.parametrize("clips", [False, True])
def test_a_step_takes_little_longer_than_the_bound(clips) -> None:
    # Measured: medians of 1.15 and 1.16, at most 1.36 and 1.46. The aim is 1.10.
    ratios = [
        predict(plan.instructions, rates).seconds
        / bound_seconds(plan.instructions, rates)
        for plan, rates in steps(clips)
    ]
    assert min(ratios) > 1 - 1e-9, "the bound is none"
    assert median(ratios) < 1.2
    assert max(ratios) < 1.5
