"""The plan: every byte that moves in a step, in order."""

from dataclasses import dataclass, field
from functools import cached_property

from zinf.plan.cost import Rates, Timeline, predict
from zinf.plan.instruction import FusedStep, Instruction, Link
from zinf.plan.show import show_instructions, show_summary
from zinf.program import ArrayId, Tier


@dataclass(frozen=True)
class Plan:
    """Immutable; printed, it is one line an instruction below a summary.

    Attributes:
        homes: where each persistent array rests between steps.
        home_bytes, peak_bytes, capacity_bytes: per tier, at rest, at most, and allowed.
        rates: what the links are taken to do in `timeline`.
    """

    instructions: tuple[Instruction, ...] = field(repr=False)
    homes: dict[ArrayId, Tier] = field(repr=False)
    home_bytes: dict[Tier, int]
    peak_bytes: dict[Tier, int]
    capacity_bytes: dict[Tier, int]
    rates: Rates = field(default_factory=Rates)

    @property
    def is_fused(self) -> bool:
        return isinstance(self.instructions[0].operation, FusedStep)

    @property
    def tiers(self) -> set[Tier]:
        """The tiers that hold anything at any time."""
        return {tier for tier, nbytes in self.peak_bytes.items() if nbytes}

    def link_bytes(self, link: Link) -> int:
        """Bytes that a step moves over a link."""
        return sum(i.nbytes for i in self.instructions if i.link == link)

    @cached_property
    def timeline(self) -> Timeline:
        """When each instruction is predicted to start and end."""
        return predict(self.instructions, self.rates)

    def summary(self) -> str:
        """What rests where, what moves, and what binds."""
        return show_summary(
            self.instructions,
            self.timeline,
            home_bytes=self.home_bytes,
            peak_bytes=self.peak_bytes,
            capacity_bytes=self.capacity_bytes,
        )

    def __str__(self) -> str:
        table = show_instructions(self.instructions, self.timeline)
        return f"{self.summary()}\n\n{table}"
