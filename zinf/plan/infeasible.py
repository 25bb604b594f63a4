"""What is said when no plan keeps within the budgets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zinf.program import Tier

BUDGETS = {
    Tier.DEVICE: "memory.device",
    Tier.HOST: "memory.host",
    Tier.NVME: "memory.nvme_capacity",
}


@dataclass(frozen=True, slots=True)
class Shortage:
    """A budget that is too small: what needs the most at once, and how much that is."""

    capacity_bytes: int
    needed_bytes: int
    what: str

    @property
    def missing_bytes(self) -> int:
        return self.needed_bytes - self.capacity_bytes


class InfeasibleError(ValueError):
    """No plan keeps within the budgets.

    Attributes:
        shortages: by tier, the fastest first, what is missing; the tiers that are
            large enough are not in it.
        capacity_bytes: the budgets, by tier.
        missing_bytes: of each tier, the fastest first.

    Args:
        reasons: sentences that say why nothing could be made smaller.
    """

    def __init__(
        self,
        shortages: Mapping[Tier, Shortage],
        capacity_bytes: Mapping[Tier, int],
        reasons: Sequence[str] = (),
    ):
        self.capacity_bytes = dict(capacity_bytes)
        self.shortages = {t: shortages[t] for t in Tier if t in shortages}
        found = [
            f"The {tier} budget is {short.capacity_bytes:,} bytes, but {short.what} "
            f"needs {short.needed_bytes:,} bytes at once."
            for tier, short in self.shortages.items()
        ]
        budgets = " and ".join(
            f"{BUDGETS[tier]} to at least {short.needed_bytes:,}"
            for tier, short in self.shortages.items()
        )
        self.missing_bytes = tuple(
            shortages[tier].missing_bytes if tier in shortages else 0 for tier in Tier
        )
        advice = f"Raise {budgets}, or lower the microbatch size or segment.max_bytes."
        super().__init__(" ".join((*found, *reasons, advice)))

    def because(self, reasons: Sequence[str]) -> "InfeasibleError":
        """The same error that also says why nothing could be made smaller."""
        return InfeasibleError(self.shortages, self.capacity_bytes, reasons)
