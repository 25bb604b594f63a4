"""The error that is raised when no plan keeps within the budgets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zinf.core.program import Tier


@dataclass(frozen=True, slots=True)
class Shortage:
    """A budget that is too small.

    Attributes:
        needed_bytes: bytes that `what` needs at once.
        what: the job or state that needs most.
    """

    capacity_bytes: int
    needed_bytes: int
    what: str

    @property
    def missing_bytes(self) -> int:
        return self.needed_bytes - self.capacity_bytes


class InfeasibleError(ValueError):
    """No plan keeps within the budgets.

    Attributes:
        shortages: the tiers whose budgets are too small, fastest first.
        capacity_bytes: the budgets, by tier.
        missing_bytes: missing bytes of every tier, fastest first.
        reasons: sentences that say why no array or segment could be made smaller, or
            what to make smaller.
        is_least: false if smaller budgets may do too, because not all was tried.
        may_rest: false if all tiers together are too small for what rests between
            steps, so that smaller segments would not fit either.
    """

    may_rest = True

    def __init__(
        self,
        shortages: Mapping[Tier, Shortage],
        capacity_bytes: Mapping[Tier, int],
        reasons: Sequence[str] = (),
        *,
        is_least: bool = True,
    ):
        self.is_least = is_least
        self.capacity_bytes, self.reasons = dict(capacity_bytes), tuple(reasons)
        self.shortages = {t: shortages[t] for t in Tier if t in shortages}
        found = [
            f"The {tier} budget is {short.capacity_bytes:,} bytes, but {short.what} "
            f"needs {short.needed_bytes:,} bytes at once."
            for tier, short in self.shortages.items()
        ]
        budgets = " and ".join(
            f"{tier.row.budget} to {'at least ' * is_least}{short.needed_bytes:,}"
            for tier, short in self.shortages.items()
        )
        self.missing_bytes = tuple(
            shortages[tier].missing_bytes if tier in shortages else 0 for tier in Tier
        )
        enough = "" if is_least else " (this suffices; less may)"
        advice = (
            f"Raise {budgets}{enough}, or lower the microbatch size or "
            "segment.max_bytes."
        )
        super().__init__(" ".join((*found, *reasons, advice)))

    def because(
        self, reasons: Sequence[str], *, is_least: bool = True
    ) -> "InfeasibleError":
        """This error with further `reasons` in its message.

        Args:
            is_least: whether nothing is known that may need less.
        """
        given, is_least = (*self.reasons, *reasons), self.is_least and is_least
        rest = self.shortages, self.capacity_bytes, given
        found = InfeasibleError(*rest, is_least=is_least)
        found.may_rest = self.may_rest
        return found
