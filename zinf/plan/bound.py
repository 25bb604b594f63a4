"""What no order of the instructions of a step could beat, whatever its memory.

Each link is a machine of a job shop. Heads and tails of its instructions, what must
happen before and after, bound what it can do: its preemptive schedule by the longest
tail is the best of all (Carlier, "The one-machine sequencing problem", 1982). The head
of an instruction is itself such a bound, of what it waits for on each of the links
(Brucker, Jurisch and Sievers, "A branch and bound algorithm for the job-shop scheduling
problem", 1994, section 4), and so is its tail.
"""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from zinf.plan.cost import Rates, duration
from zinf.plan.instruction import Instruction, Link


def bound_seconds(instructions: Sequence[Instruction], rates: Rates) -> float:
    """The bound for these instructions; what waits only for memory does not wait.

    Takes time by the square of their number: about a second for 1,000.
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
    """By number, the least time from the beginning to where each can start."""
    heads = [0.0] * len(seconds)
    places: dict[int, int] = {}  # of those looked at, in order
    # As bits of their places, all that one waits for, directly or not.
    ancestors = [0] * len(seconds)
    seen: list[int] = []
    for number in order:
        places[number] = len(seen)
        seen.append(number)
        for j in waits_for[number]:
            ancestors[number] |= ancestors[j] | 1 << places[j]
        before = [seen[place] for place in _bits(ancestors[number])]
        # The longest chain from the end of each to the start of this one.
        tails = [0.0] * len(seconds)
        for j in before:
            for i in waits_for[j]:
                tails[i] = max(tails[i], tails[j] + seconds[j])
        heads[number] = _busiest_link(before, heads, seconds, tails, links)
    return heads


def _bits(word: int) -> list[int]:
    """Places of what is set, highest first."""
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
    """The least until the last tail has passed, if each link may interrupt its work."""
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
    """The schedule of Jackson: of what can run, always what has the longest tail."""
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
