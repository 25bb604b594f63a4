"""A lower bound on the time of a step, over all orders and with unlimited memory.

Each link is a machine of a job shop. An instruction has a head, the time that must pass
before it can start, and a tail, the time that must pass after it ends. No schedule of
one link ends earlier than its preemptive schedule by the longest tail (Carlier, "The
one-machine sequencing problem", 1982). The head of an instruction is the largest such
bound, over the links, of the instructions that it waits for; its tail likewise
(Brucker, Jurisch and Sievers, "A branch and bound algorithm for the job-shop scheduling
problem", 1994, section 4).
"""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from zinf.core.plan.cost import Rates, duration
from zinf.core.plan.instruction import Instruction
from zinf.core.program import Link


def bound_seconds(instructions: Sequence[Instruction], rates: Rates) -> float:
    """A lower bound on the seconds of these instructions; waits for frees are ignored.

    Takes time quadratic in their number: about a second for 1,000.
    """
    numbers = range(len(instructions))
    seconds = [duration(i, rates) for i in instructions]
    links = [i.link for i in instructions]
    waits_for = [
        [j for j in i.after if not instructions[j].link.only_frees]
        for i in instructions
    ]
    waited_for: list[list[int]] = [[] for _ in numbers]
    for number, before in enumerate(waits_for):
        for j in before:
            waited_for[j].append(number)
    heads = _least_before(numbers, waits_for, seconds, links)
    tails = _least_before(reversed(numbers), waited_for, seconds, links)
    return _busiest_link(numbers, heads, seconds, tails, links)


def _least_before(
    order: Iterable[int],
    waits_for: Sequence[Sequence[int]],
    seconds: Sequence[float],
    links: Sequence[Link],
) -> list[float]:
    """The head (earliest start) of each instruction, or in reverse its tail.

    The tail is the least time after an instruction: then `order` and `waits_for` are
    reversed.
    """
    heads = [0.0] * len(seconds)
    places: dict[int, int] = {}  # Number -> its position in `order`.
    # Bit sets of places: the instructions that each waits for, directly or indirectly.
    ancestors = [0] * len(seconds)
    seen: list[int] = []
    for number in order:
        places[number] = len(seen)
        seen.append(number)
        for j in waits_for[number]:
            ancestors[number] |= ancestors[j] | 1 << places[j]
        before = [seen[place] for place in _bits(ancestors[number])]
        # Longest chain from the end of each ancestor to the start of `number`.
        tails = [0.0] * len(seconds)
        for j in before:
            for i in waits_for[j]:
                tails[i] = max(tails[i], tails[j] + seconds[j])
        heads[number] = _busiest_link(before, heads, seconds, tails, links)
    return heads


def _bits(word: int) -> list[int]:
    """The positions of the bits that are set, highest first."""
    found = []
    while word:
        found.append(word.bit_length() - 1)
        word ^= 1 << found[-1]
    return found


def _busiest_link(
    numbers: Iterable[int],
    heads: Sequence[float],
    seconds: Sequence[float],
    tails: Sequence[float],
    links: Sequence[Link],
) -> float:
    """The largest of the links' preemptive bounds."""
    by_link: dict[Link, list[int]] = {}
    for number in numbers:
        by_link.setdefault(links[number], []).append(number)
    return max(
        (_preemptive(n, heads, seconds, tails) for n in by_link.values()), default=0.0
    )


def _preemptive(
    numbers: Sequence[int],
    heads: Sequence[float],
    seconds: Sequence[float],
    tails: Sequence[float],
) -> float:
    """When Jackson's preemptive schedule ends: the longest tail that is ready runs."""
    coming = sorted(numbers, key=lambda k: heads[k], reverse=True)
    ready: list[tuple[float, int]] = []
    left = {number: seconds[number] for number in numbers}
    now = end = 0.0
    while coming or ready:
        if not ready:
            now = max(now, heads[coming[-1]])
        while coming and heads[coming[-1]] <= now:
            number = coming.pop()
            heappush(ready, (-tails[number], number))
        tail, number = ready[0]
        until = heads[coming[-1]] if coming else float("inf")
        if now + left[number] <= until:
            heappop(ready)
            now += left[number]
            end = max(end, now - tail)
        else:
            left[number] -= until - now
            now = until
    return end
