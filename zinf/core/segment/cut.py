"""Chooses the cuts: few live bytes at each, and every layer cut alike.

The search first looks for a repetition and cuts it at one phase of its period, the
narrowest; what comes before and after is cut on its own. Where nothing repeats, or one
period holds more parameters than a segment may, dynamic programming over the cut
positions minimises the live activation bytes subject to the parameter bytes of a
segment.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from zinf.core.jaxpr.compat import Var
from zinf.core.jaxpr.graph import variable_bytes
from zinf.core.jaxpr.share import equation_key
from zinf.core.segment.order import Order
from zinf.core.segment.repeat import Repetition, find_repetition

# The cost of a segment's dispatches and synchronisation, as live bytes at a cut.
SEGMENT_COST_BYTES = 4096


@dataclass(frozen=True)
class Tape:
    """The anchored equations of a program with the byte counts that cutting needs.

    Attributes:
        params: parameters that each equation reads, directly or by floating values.
        live_bytes: at each cut position, the bytes of anchored values defined before it
            and read at or after it.
        forced: the positions that are cut in any case.
    """

    keys: tuple
    params: tuple[tuple[Var, ...], ...]
    live_bytes: tuple[int, ...]
    forced: tuple[int, ...] = ()

    def param_bytes(self, start: int, stop: int) -> int:
        read = {v for i in range(start, stop) for v in self.params[i]}
        return sum(variable_bytes(v) for v in read)

    def __len__(self) -> int:
        return len(self.keys)


def read_tape(order: Order, forced: Sequence[int] = ()) -> Tape:
    defined: dict[Var, int] = {}
    last: dict[Var, int] = {}
    params, keys = [], []
    leaves = set(order.graph.invars) | set(order.graph.consts)
    for i, equation in enumerate(order.anchored):
        _, roots = order.closure(equation.invars)
        params.append(tuple(v for v in roots if v in order.params))
        for v in roots:
            if v not in leaves:
                last[v] = i
        defined.update(dict.fromkeys(equation.outvars, i))
        shapes = tuple((a.aval.shape, str(a.aval.dtype)) for a in equation.invars)
        keys.append((equation_key(equation), shapes))
    change = [0] * (len(keys) + 2)
    for v, reader in last.items():
        change[defined[v] + 1] += variable_bytes(v)
        change[reader + 1] -= variable_bytes(v)
    live, level = [], 0
    for delta in change[: len(keys) + 1]:
        level += delta
        live.append(level)
    return Tape(tuple(keys), tuple(params), tuple(live), tuple(forced))


def choose_cuts(tape: Tape, *, max_bytes: int | None) -> list[int]:
    """Positions of the cuts in the tape, with 0 and its length at the ends.

    Without `max_bytes` a layer is never cut, and the rest is cut to the size of a
    layer; so the cuts of the other parts do not depend on the number of layers.
    """
    part = _automatic_bytes(tape) if max_bytes is None else max_bytes
    found = {*_cut(tape, 0, len(tape), part, max_bytes), *tape.forced}
    return [0, *sorted(c for c in found if 0 < c < len(tape)), len(tape)]


def _automatic_bytes(tape: Tape) -> int:
    """The size of a layer, or an eighth of a program without layers.

    Never less than two of the largest arrays: a cut between a head and its loss, or
    between two small tables, carries more than it saves.
    """
    repetition = _repetition(tape, 0, len(tape))
    if repetition is None:
        part = tape.param_bytes(0, len(tape)) // 8
    else:
        start = repetition.start
        part = tape.param_bytes(start, start + repetition.period)
    largest = max((variable_bytes(v) for p in tape.params for v in p), default=0)
    return max(part, 2 * largest, 1)


def _cut(
    tape: Tape, start: int, stop: int, max_bytes: int, max_layer_bytes: int | None
) -> list[int]:
    """Cuts strictly inside `start:stop`."""
    if stop - start < 2:
        return []
    repetition = _repetition(tape, start, stop)
    if repetition is None:
        return _narrowest(tape, start, stop, max_bytes)
    phase = _best_phase(tape, repetition)
    first = repetition.start + phase
    period, copies = repetition.period, repetition.copies(phase)
    boundaries = [first + k * period for k in range(copies + 1)]
    # Cuts one copy in the middle of the run, and every other copy at the same places.
    middle = boundaries[copies // 2]
    inner = []
    if max_layer_bytes is not None:
        inner = _narrowest(tape, middle, middle + period, max_layer_bytes)
    offsets = [0, *(c - middle for c in inner)]
    cuts = [b + c for b in boundaries[:-1] for c in offsets] + [boundaries[-1]]
    before = _cut(tape, start, first, max_bytes, max_layer_bytes)
    after = _cut(tape, boundaries[-1], stop, max_bytes, max_layer_bytes)
    return sorted({c for c in (*before, *cuts, *after) if start < c < stop})


def _repetition(tape: Tape, start: int, stop: int) -> Repetition | None:
    """A repetition in the range that covers at least a quarter of its parameters."""
    seen: set[Var] = set()
    new_bytes = []
    for i in range(start, stop):
        new = [v for v in tape.params[i] if v not in seen]
        seen.update(new)
        new_bytes.append(sum(variable_bytes(v) for v in new))
    found = find_repetition(tape.keys[start:stop], new_bytes)
    if found is None:
        return None
    end = found.start + found.copies(0) * found.period
    if 4 * sum(new_bytes[found.start : end]) < sum(new_bytes):
        return None
    return Repetition(start + found.start, found.period, found.num_equal)


def _best_phase(tape: Tape, repetition: Repetition) -> int:
    forced = set(tape.forced)

    def cost(phase: int) -> tuple[bool, int, int]:
        first, copies = repetition.start + phase, repetition.copies(phase)
        cuts = [first + k * repetition.period for k in range(1, copies)]
        # A period that is cut in any case needs no other cut.
        is_other = bool(forced) and not forced.issuperset(cuts)
        return is_other, -copies, sum(tape.live_bytes[c] for c in cuts)

    return min(range(repetition.period), key=cost)


def _narrowest(tape: Tape, start: int, stop: int, max_bytes: int) -> list[int]:
    """Dynamic programming over the cuts inside `start:stop`."""
    if tape.param_bytes(start, stop) <= max_bytes:
        return []
    best = {start: 0}
    previous: dict[int, int] = {}
    for end in range(start + 1, stop + 1):
        read: dict[Var, int] = {}
        total = 0
        for begin in range(end - 1, start - 1, -1):
            for v in tape.params[begin]:
                if v not in read:
                    read[v] = variable_bytes(v)
                    total += read[v]
            # One equation may exceed the limit alone: it cannot be cut (only tiled).
            if total > max_bytes and begin < end - 1:
                break
            crossing = tape.live_bytes[end] if end < stop else 0
            cost = best[begin] + crossing + SEGMENT_COST_BYTES
            if end not in best or cost < best[end]:
                best[end], previous[end] = cost, begin
    cuts = []
    position = previous[stop]
    while position > start:
        cuts.append(position)
        position = previous[position]
    return cuts[::-1]
