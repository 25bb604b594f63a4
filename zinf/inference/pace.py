"""How long the executables of generation take: measured here, or by a chip's rates.

A token reads all weights of a segment and computes little with them, so its time is
often that of the device's memory, which a plan's rate of computing says nothing about.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp

from zinf.core.plan import Plan, Rates, Run, Timeline, predict
from zinf.core.segment import Segment
from zinf.core.step.forward import Forward

# Equal segments are timed with weights of their own, up to so many bytes: a processor's
# cache has no room for these, as it has none for the weights of a model.
COLD_BYTES = 256 << 20
# Each executable runs for about so long, at least so often.
SECONDS, TIMES = 0.3, 3


@dataclass(frozen=True)
class Pace:
    """Where predicted times of generation come from.

    Attributes:
        rates: of links and computing; None: those of the plans.
        is_measured: whether executables are timed on this machine.
        memory_bytes_per_second: speed at which the device reads its memory; None leaves
            such reading out, where nothing is timed.
    """

    rates: Rates | None = None
    is_measured: bool = False
    memory_bytes_per_second: float | None = None
    _timed: dict[int, tuple[Any, float]] = field(default_factory=dict, repr=False)

    def timeline(self, forward: Forward) -> Timeline:
        """When each instruction of a program runs."""
        rates, instructions = self.rates_of(forward.plan), []
        if not self.is_measured and self.memory_bytes_per_second is None:
            return predict(forward.plan.instructions, rates)
        seconds = self.by_segment(forward)
        for each in forward.plan.instructions:
            if isinstance(each.operation, Run):
                taken = seconds[each.operation.segment]
                each = replace(each, flops=round(taken * rates.flops_per_second))
            instructions.append(each)
        return predict(instructions, rates)

    def by_segment(self, forward: Forward) -> list[float]:
        """Seconds of the executable of each segment, for a microbatch."""
        flops = {
            each.operation.segment: each.flops
            for each in forward.plan.instructions
            if isinstance(each.operation, Run)
        }
        counts = Counter(id(s.executables) for s in forward.segments)
        found = []
        for number, segment in enumerate(forward.segments):
            key = id(segment.executables)
            if key not in self._timed:
                if self.is_measured:
                    seconds = measured_seconds(segment, counts[key])
                else:
                    arguments = segment.executables.abstract
                    nbytes = sum(x.size * x.dtype.itemsize for x in arguments)
                    seconds = self.seconds(forward.plan, flops[number], nbytes)
                # The executables stay, so that no others get their id.
                self._timed[key] = segment.executables, seconds
            found.append(self._timed[key][1])
        return found

    def seconds(self, plan: Plan, flops: float, nbytes: int) -> float:
        """Seconds of an executable by rates: computing, or reading its arguments."""
        computing = flops / self.rates_of(plan).flops_per_second
        rate = self.memory_bytes_per_second
        return computing if rate is None else max(computing, nbytes / rate)

    def rates_of(self, plan: Plan) -> Rates:
        """The rates of links and computing for a plan."""
        return plan.rates if self.rates is None else self.rates


def measured_seconds(segment: Segment, count: int) -> float:
    """Seconds of the forward pass of one of `count` equal segments, on this machine.

    Weights and inputs are made for it, and freed.
    """
    spec, abstract = segment.spec, segment.executables.abstract
    ends = len(spec.params), len(spec.params) + len(spec.inputs)
    kinds = abstract[: ends[0]], abstract[ends[0] : ends[1]]
    caches_of = abstract[ends[1] : ends[1] + len(spec.caches)]
    nbytes = sum(x.size * x.dtype.itemsize for x in (*kinds[0], *caches_of))
    num_sets = max(1, min(count, COLD_BYTES // max(nbytes, 1)))
    inputs = [_made(x) for x in kinds[1]]
    params = [[_made(x) for x in kinds[0]] for _ in range(num_sets)]
    caches = [[_made(x) for x in caches_of] for _ in range(num_sets)]

    def seconds() -> Iterator[float]:
        for number in range(num_sets):
            began = perf_counter()
            results = segment.forward(params[number], inputs, caches[number])
            jax.block_until_ready(results)
            taken = perf_counter() - began
            if spec.caches:
                # The old ones were donated.
                caches[number] = results[-len(spec.caches) :]
            yield taken

    list(seconds())
    found, began = [], perf_counter()
    while len(found) < TIMES * num_sets or perf_counter() - began < SECONDS:
        found += seconds()
    return median(found)


def _made(kind: jax.ShapeDtypeStruct) -> jax.Array:
    """An array for timing: of small numbers, or of zeros if its dtype is integer."""
    is_whole = not jnp.issubdtype(kind.dtype, jnp.floating)
    value = 0 if is_whole else 0.01
    return jax.device_put(jnp.full(kind.shape, value, kind.dtype), kind.sharding)
