"""The plan: every byte that moves in a step, in order."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape

from zinf.core.plan.cost import Rates, Timeline, predict
from zinf.core.plan.instruction import (
    FusedStep,
    Group,
    Instruction,
    OffloadedStep,
    Pass,
    Run,
    Update,
)
from zinf.core.plan.shared import Shared, shared_arrays
from zinf.core.plan.show import Summary, show_bytes, show_instructions, summarize
from zinf.core.program import ArrayId, Link, Role, Tier

# A large model has thousands of instructions: the first and the last are printed.
PRINTED_FIRST, PRINTED_LAST = 30, 10
# A notebook file stores what it shows, folded.
FOLDED_INSTRUCTIONS = 200


@dataclass(frozen=True, repr=False)
class Plan:
    """An immutable plan; `str(plan)` is its summary, and its listing where it is short.

    Attributes:
        homes: the tier where each persistent array rests between steps.
        home_bytes: bytes at rest on each tier.
        peak_bytes: the most bytes that any execution holds on each tier.
        capacity_bytes: the budget of each tier.
        rates: the speeds assumed in `timeline`.
        why: why the step runs this way, where there was a choice: a sentence.
    """

    instructions: tuple[Instruction, ...]
    homes: dict[ArrayId, Tier]
    home_bytes: dict[Tier, int]
    peak_bytes: dict[Tier, int]
    capacity_bytes: dict[Tier, int]
    rates: Rates = field(default_factory=Rates)
    why: str = ""

    @property
    def is_fused(self) -> bool:
        return isinstance(self.instructions[0].operation, FusedStep)

    @property
    def is_offloaded(self) -> bool:
        """Whether the step is one executable that moves host arrays by itself."""
        return isinstance(self.instructions[0].operation, OffloadedStep)

    @property
    def is_one_program(self) -> bool:
        """Whether the whole step is one executable."""
        return self.is_fused or self.is_offloaded

    @property
    def tiers(self) -> set[Tier]:
        """The tiers that ever hold bytes."""
        return {tier for tier, nbytes in self.peak_bytes.items() if nbytes}

    @cached_property
    def pending_changes(self) -> tuple[int, ...]:
        """Instructions that run pending updates or bring their results home."""
        return tuple(i for i in self._changes if i < self._end_of_forward)

    @cached_property
    def own_changes(self) -> tuple[int, ...]:
        """Instructions that run updates of this step or bring their results home."""
        return tuple(i for i in self._changes if i > self._end_of_forward)

    @cached_property
    def _changes(self) -> list[int]:
        return [
            i
            for i, instruction in enumerate(self.instructions)
            if isinstance(instruction.operation, Update)
            or any(
                tier in (self.homes.get(a), self.homes.get(a.whole))
                for a, tier in instruction.writes
                if a.role != Role.CONST
            )
        ]

    @cached_property
    def _end_of_forward(self) -> int:
        """Index of the first run of the last segment, after all pending updates."""
        for i, instruction in enumerate(self.instructions):
            operation = instruction.operation
            if isinstance(operation, Run) and operation.kind == Pass.LOSS:
                return i
        return len(self.instructions)

    @cached_property
    def shared(self) -> Shared:
        """Arrays whose host and device copies may share memory (see `shared`)."""
        return shared_arrays(self.instructions, self.homes)

    def grouped(self, groups: Sequence[tuple[Group, ...]]) -> "Plan":
        """The plan in which updates run together, by the number of their unit."""

        def with_groups(instruction: Instruction) -> Instruction:
            operation = instruction.operation
            if not isinstance(operation, Update) or not groups[operation.unit]:
                return instruction
            operation = replace(operation, groups=groups[operation.unit])
            return replace(instruction, operation=operation)

        instructions = tuple(map(with_groups, self.instructions))
        return replace(self, instructions=instructions)

    def link_bytes(self, link: Link) -> int:
        """Bytes that a step moves over a link."""
        operation = self.instructions[0].operation
        if isinstance(operation, OffloadedStep):
            return operation.moved.get(link, 0)
        return sum(i.nbytes for i in self.instructions if i.link == link)

    @cached_property
    def timeline(self) -> Timeline:
        """When each instruction is predicted to start and end."""
        return predict(self.instructions, self.rates)

    def summary(self) -> str:
        """Bytes on each tier, traffic of each link, and the link that binds."""
        return str(self._summary)

    @cached_property
    def _summary(self) -> Summary:
        return summarize(
            self.instructions,
            self.timeline,
            home_bytes=self.home_bytes,
            peak_bytes=self.peak_bytes,
            capacity_bytes=self.capacity_bytes,
            why=self.why,
        )

    def listing(self) -> str:
        """A head, and one line for each instruction."""
        return show_instructions(self.instructions, self.timeline)

    def excerpt(self, hint: str) -> str:
        """The listing, without the middle of a long one.

        In its place is the number of instructions left out, and `hint`.
        """
        lines = self.listing().splitlines()
        first, last = lines[: 1 + PRINTED_FIRST], lines[-PRINTED_LAST:]
        left = len(lines) - len(first) - len(last)
        if left <= 0:
            return "\n".join(lines)
        return "\n".join([*first, f"... {left:,} more instructions ({hint})", *last])

    def __str__(self) -> str:
        return f"{self.summary()}\n\n{self.excerpt('print(plan.listing()) has all')}"

    def __repr__(self) -> str:
        peaks = self.peak_bytes.items()
        held = ", ".join(f"{tier} {show_bytes(n)}" for tier, n in peaks if n)
        return f"<Plan: {self._summary.sentence}; at most {held}>"

    def _repr_html_(self) -> str:
        """The summary as tables, and the first instructions folded, for a notebook."""
        shown = self.instructions[:FOLDED_INSTRUCTIONS]
        listing = escape(show_instructions(shown, self.timeline))
        first = "The first" if len(shown) < len(self.instructions) else "All"
        return (
            f"{self._summary.html()}<details><summary>{first} {len(shown)} "
            f"instructions</summary>"
            f'<pre style="font-family:monospace">{listing}</pre></details>'
        )
