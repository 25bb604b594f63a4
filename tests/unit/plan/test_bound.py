"""The bound of a step, beside the best of all orders of a few instructions."""

from dataclasses import replace
from itertools import combinations, permutations
from random import Random
from statistics import median

from zinf.plan import Instruction, Link, Rates, bound_seconds, predict
from zinf.plan.instruction import Free, Transfer
from zinf.program import Tier

LINKS = Link.NVME_READ, Link.H2D, Link.NVME_WRITE
RATES = Rates(dict.fromkeys(LINKS, 1.0), overhead_seconds=0.0)
MOVE = Transfer((), Tier.NVME, Tier.HOST)
NUM_PROGRAMS, NUM_INSTRUCTIONS = 60, 6


def _program(random: Random) -> list[Instruction]:
    """Instructions that wait for some of those before them."""
    return [
        Instruction(
            MOVE,
            random.choice(LINKS),
            tuple(j for j in range(number) if random.random() < 0.4),
            nbytes=random.randint(1, 9),
        )
        for number in range(NUM_INSTRUCTIONS)
    ]


def _best_seconds(program: list[Instruction]) -> float:
    """Of all orders in which each comes behind what it waits for."""
    return min(
        predict(_reordered(program, order), RATES).seconds
        for order in permutations(range(len(program)))
        if all(i not in program[j].after for j, i in combinations(order, 2))
    )


def _reordered(program: list[Instruction], order: tuple[int, ...]) -> list[Instruction]:
    place = {number: k for k, number in enumerate(order)}
    return [
        replace(program[number], after=tuple(place[j] for j in program[number].after))
        for number in order
    ]


def test_no_order_beats_the_bound_and_few_miss_it_by_much() -> None:
    ratios = []
    for seed in range(NUM_PROGRAMS):
        program = _program(Random(seed))
        ratios.append(_best_seconds(program) / bound_seconds(program, RATES))
    assert min(ratios) > 1 - 1e-9
    assert median(ratios) < 1 + 1e-9


def test_what_waits_only_for_memory_does_not_wait() -> None:
    program = [
        Instruction(MOVE, Link.NVME_READ, (), nbytes=2),
        Instruction(Free((), Tier.HOST), Link.FREE_AFTER_NVME_READ, (0,), nbytes=2),
        Instruction(MOVE, Link.H2D, (1,), nbytes=3),
    ]
    assert predict(program, RATES).seconds == 5
    assert bound_seconds(program, RATES) == 3
