"""Experts that are read on demand, and how many reads that is expected to take.

A plan cannot know which experts tokens choose. It assumes that all are equally likely,
that a token chooses different ones, and that slots have been in use for long: then each
expert is in a slot with the same probability.
"""

from dataclasses import dataclass

from zinf.core.program.array import ArrayId

# Reading on demand cannot begin before the choice is known, so it cannot hide behind
# computing. It is not worth that if tokens choose about all experts anyway.
WORTHWHILE_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class Chosen:
    """Experts of a segment of which only those are read that tokens chose.

    They are brought to slots on the device once their choice is known. Slots belong to
    a layer no more than to another, and keep what they have from run to run.

    Attributes:
        segment: number of the segment that reads them.
        arrays: parameter arrays whose rows are experts.
        slots: names of the constants of the program whose rows are the slots of each of
            `arrays`; alike layers share them.
        choice: name of the value, int (tokens, k), with the experts of each token.
        table: name of the value, int32 (experts,), with the slot of each chosen expert.
        num_tokens, k: the shape of the choice.
        num_experts, num_slots: rows of each of `arrays`, and of each of `slots`.
        num_sharing: all experts that share the slots.
    """

    segment: int
    arrays: tuple[ArrayId, ...]
    slots: tuple[str, ...]
    choice: str
    table: str
    num_tokens: int
    k: int
    num_experts: int
    num_slots: int
    num_sharing: int

    @property
    def most(self) -> int:
        """The most experts that a microbatch chooses."""
        return min(self.num_experts, self.num_tokens * self.k)

    def is_worthwhile(self, num_microbatches: int) -> bool:
        """Whether they are worth reading on demand for so many microbatches."""
        return is_worthwhile(
            *(self.num_experts, self.k, self.num_tokens),
            num_slots=self.num_slots,
            num_microbatches=num_microbatches,
        )

    def expected(self, num_microbatches: int) -> float:
        """Different experts that the tokens of some microbatches choose."""
        num_tokens = self.num_tokens * num_microbatches
        return expected_experts(self.num_experts, self.k, num_tokens)

    def expected_reads(self, microbatch: int) -> float:
        """Experts that one microbatch of a pass chooses and that are in no slot yet."""
        new = self.expected(1)
        if self.num_slots >= self.expected(microbatch + 1):
            new = self.expected(microbatch + 1) - self.expected(microbatch)
        return new * (1 - min(1.0, self.num_slots / self.num_sharing))


def expected_experts(num_experts: int, k: int, num_tokens: int) -> float:
    """Different experts of a layer that tokens choose.

    Args:
        k: different experts that each token chooses.
    """
    return num_experts * (1 - (1 - min(k, num_experts) / num_experts) ** num_tokens)


def is_worthwhile(
    num_experts: int,
    k: int,
    num_tokens: int,
    *,
    num_slots: int | None = None,
    num_microbatches: int = 1,
) -> bool:
    """Whether a layer's experts are worth reading on demand.

    Args:
        num_tokens: tokens of a microbatch.
        num_slots: slots for experts; None: as many as are chosen.
    """
    found = expected_experts(num_experts, k, num_tokens * num_microbatches)
    if num_slots is not None and num_slots < found:
        # Each microbatch finds only what fits, so it may read all that it chooses.
        found = num_microbatches * expected_experts(num_experts, k, num_tokens)
    return found < WORTHWHILE_SHARE * num_experts
