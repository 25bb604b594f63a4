"""Predicts when each instruction of a plan runs.

The prediction follows the executor's rule: a link runs its instructions in order, each
as soon as the instructions that it waits for are done. The times are only as good as
the rates.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter

from zinf.core.plan.instruction import Instruction, OffloadedStep, Update
from zinf.core.program import HOPS, Hop, Link, Tier

GB = 1e9


def _link_rates(of: Callable[[Hop], tuple[float, float]]) -> dict[Link, float]:
    """Bytes per second of every transfer link, from the table of tiers."""
    pairs = (zip(hop.links, of(hop), strict=True) for hop in HOPS.values())
    return dict(chain.from_iterable(pairs))


@dataclass(frozen=True, slots=True)
class Rates:
    """The assumed speeds of links, devices and updates.

    Attributes:
        link_bytes_per_second: speed of each transfer link.
        flops_per_second: speed of the device.
        update_bytes_per_second: optimizer results written per second, by the tier where
            updates run.
        overhead_seconds: fixed time of every instruction but frees.
        exchange_bytes_per_second: bytes that one device sends to others.
    """

    link_bytes_per_second: dict[Link, float] = field(
        default_factory=lambda: _link_rates(attrgetter("rates"))
    )
    flops_per_second: float = 60 * GB
    update_bytes_per_second: dict[Tier, float] = field(
        default_factory=lambda: {Tier.HOST: 8 * GB, Tier.DEVICE: 3 * GB}
    )
    overhead_seconds: float = 2e-4
    exchange_bytes_per_second: float = 2 * GB

    def on_drive(
        self, read_bytes_per_second: float, write_bytes_per_second: float
    ) -> "Rates":
        """These rates with the measured speeds of a drive."""
        drive = {
            Link.NVME_READ: read_bytes_per_second,
            Link.NVME_WRITE: write_bytes_per_second,
        }
        return replace(self, link_bytes_per_second=self.link_bytes_per_second | drive)


def accelerator_rates() -> Rates:
    """One accelerator of the H100 class on PCIe 5 with a fast drive.

    The rates are about half of the peaks: 25 GB/s each way of 64, 5 GB/s of a drive's
    7 to 14, and 400 TFLOP/s of 989 in bfloat16. Accelerators exchange bytes over PCIe.
    These rates are for planning; measure your machine for predictions.
    """
    return Rates(
        link_bytes_per_second=_link_rates(attrgetter("accelerator_rates")),
        flops_per_second=4e14,
        update_bytes_per_second={Tier.HOST: 30 * GB, Tier.DEVICE: 800 * GB},
        overhead_seconds=5e-5,
        exchange_bytes_per_second=25 * GB,
    )


@dataclass(frozen=True, slots=True)
class Timeline:
    """Start and end of each instruction, in seconds from the step's start.

    `predict` predicts timelines; the executor measures them.
    """

    start: tuple[float, ...]
    end: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return max(self.end, default=0.0)

    def busy_seconds(self, instructions: Sequence[Instruction]) -> dict[Link, float]:
        """The total seconds that each link with instructions is busy."""
        busy: dict[Link, float] = {}
        spans = zip(instructions, self.start, self.end, strict=True)
        for instruction, start, end in spans:
            link = instruction.link
            busy[link] = busy.get(link, 0.0) + end - start
        return busy


def duration(instruction: Instruction, rates: Rates) -> float:
    """Predicted seconds of one instruction on its link."""
    seconds = 0.0 if instruction.link.only_frees else rates.overhead_seconds
    if instruction.link in rates.link_bytes_per_second:
        seconds += instruction.nbytes / rates.link_bytes_per_second[instruction.link]
    if isinstance(instruction.operation, Update):
        tier = instruction.operation.tier
        seconds += instruction.nbytes / rates.update_bytes_per_second[tier]
    computing = instruction.flops / rates.flops_per_second
    if isinstance(instruction.operation, OffloadedStep):
        # Passes overlap with the transfers of their parameters and gradients. Updates
        # after them compute next to nothing.
        speeds = rates.link_bytes_per_second
        late = instruction.operation.moved_late
        moved = instruction.operation.moved.items()
        moving = [(n - late[x]) / speeds[x] for x, n in moved]
        computing = max(computing, *moving)
        seconds += max(n / speeds[x] for x, n in late.items())
    rate = rates.exchange_bytes_per_second
    hidden = instruction.exchange.hidden_bytes / rate
    return seconds + max(computing, hidden) + instruction.exchange.exposed_bytes / rate


def predict(instructions: Sequence[Instruction], rates: Rates) -> Timeline:
    """Predicted start and end of each instruction."""
    clock = Clock(rates)
    for instruction in instructions:
        clock.run(instruction)
    return Timeline(tuple(clock.starts), tuple(clock.ends))


class Clock:
    """Predicts instructions one at a time, in plan order.

    Attributes:
        starts, ends: predicted seconds of the instructions so far.
    """

    def __init__(self, rates: Rates):
        self.starts: list[float] = []
        self.ends: list[float] = []
        self._rates = rates
        self._free_at: dict[Link, float] = {}

    def run(self, instruction: Instruction) -> float:
        """Adds the next instruction; returns when it ends."""
        begin = self._free_at.get(instruction.link, 0.0)
        begin = max([begin, *(self.ends[i] for i in instruction.after)])
        end = begin + duration(instruction, self._rates)
        self._free_at[instruction.link] = end
        self.starts.append(begin)
        self.ends.append(end)
        return end
