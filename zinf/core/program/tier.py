"""The tiers where bytes rest, and the links between them: one table.

Whoever asks something about a tier reads `TIERS`. A new tier is a member of `Tier`, its
links, a row here, a store (`core/memory/stores.py`) and its keys in the config.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

GB = 1e9


class Tier(StrEnum):
    """Where bytes rest, fastest first."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"

    @property
    def row(self) -> "TierRow":
        """The row of this tier in the table of tiers."""
        return TIERS[self]

    @property
    def order(self) -> int:
        """Number of tiers that are faster."""
        return ALL.index(self)

    @property
    def slower(self) -> tuple["Tier", ...]:
        """The slower tiers, fastest first."""
        return ALL[ALL.index(self) + 1 :]


ALL = tuple(Tier)


class Link(StrEnum):
    """A physical path or a processor; instructions on one link run in plan order."""

    NVME_READ = "nvme read"
    NVME_WRITE = "nvme write"
    H2D = "h2d"
    D2H = "d2h"
    HOST = "host"
    DEVICE = "device"
    # Frees have one queue for each link that they wait for, so that frees after a slow
    # link do not delay the others.
    FREE_AT_ONCE = "free"
    FREE_AFTER_NVME_READ = "free after nvme read"
    FREE_AFTER_NVME_WRITE = "free after nvme write"
    FREE_AFTER_H2D = "free after h2d"
    FREE_AFTER_D2H = "free after d2h"
    FREE_AFTER_HOST = "free after host"
    FREE_AFTER_DEVICE = "free after device"

    @property
    def only_frees(self) -> bool:
        return self.value.startswith("free")

    @property
    def frees_after(self) -> "Link":
        """The link of frees that wait for this link."""
        return Link(f"free after {self}")

    @property
    def metric(self) -> str:
        """The name of the bytes that a step moves over it: "nvme_read_bytes"."""
        return f"{self.value.replace(' ', '_')}_bytes"


@dataclass(frozen=True, slots=True)
class Hop:
    """The way between a tier and the one through which it reaches the device.

    Attributes:
        toward: that tier.
        fetch, offload: its links, to that tier and from it.
        rates: bytes per second of the two on a machine whose devices are CPUs, as long
            as nothing is measured.
        accelerator_rates: the same on a machine of the class of an H100.
    """

    toward: Tier
    fetch: Link
    offload: Link
    rates: tuple[float, float]
    accelerator_rates: tuple[float, float]

    @property
    def links(self) -> tuple[Link, Link]:
        return self.fetch, self.offload


@dataclass(frozen=True, slots=True)
class TierRow:
    """What the rest of zinf needs to know of a tier.

    Attributes:
        budget: the config key that sets its bytes.
        device: its name in DeepSpeed's keys `offload_param.device` and others.
        hop: the way toward the device; None for the device itself.
        is_memory: whether its bytes are memory of a device or of this process. Else
            they are in files: the tier exists only if it has bytes, arrays are created
            before they are written, and small arrays (`persistence_bytes`) do not go
            there, because an operation costs as much as reading many bytes.
    """

    budget: str
    device: str
    hop: Hop | None
    is_memory: bool


TIERS = {
    Tier.DEVICE: TierRow("memory.device", "none", None, True),
    Tier.HOST: TierRow(
        "memory.host",
        "cpu",
        Hop(Tier.DEVICE, Link.H2D, Link.D2H, (6 * GB, 6 * GB), (25 * GB, 25 * GB)),
        True,
    ),
    Tier.NVME: TierRow(
        "memory.nvme_capacity",
        "nvme",
        Hop(
            Tier.HOST,
            Link.NVME_READ,
            Link.NVME_WRITE,
            (3 * GB, 3 * GB),
            (5 * GB, 4 * GB),
        ),
        False,
    ),
}
# All ways, by the tier that is farther from the device; the slowest first.
HOPS = {tier: row.hop for tier, row in reversed(TIERS.items()) if row.hop is not None}
# The links of all transfers between neighbours, `(source, target)`.
TRANSFER_LINKS = {
    (source, target): link
    for tier, hop in HOPS.items()
    for source, target, link in (
        (tier, hop.toward, hop.fetch),
        (hop.toward, tier, hop.offload),
    )
}
# The links of transfers, in the order of metrics and reports.
MOVING = tuple(link for hop in HOPS.values() for link in hop.links)


def _to_device(tier: Tier) -> tuple[Tier, ...]:
    hop = tier.row.hop
    return (tier,) if hop is None else (tier, *_to_device(hop.toward))


def _route(source: Tier, target: Tier) -> tuple[Tier, ...]:
    fetched, offloaded = _to_device(source), _to_device(target)
    meeting = next(tier for tier in fetched if tier in offloaded)
    down = offloaded[: offloaded.index(meeting)]
    return (*fetched[: fetched.index(meeting) + 1], *reversed(down))


# The tiers that bytes pass from one tier to another, both included.
ROUTES = {(source, target): _route(source, target) for source in ALL for target in ALL}


def open_tiers(capacity_bytes: Mapping[Tier, int]) -> tuple[Tier, ...]:
    """The tiers that exist with these budgets, fastest first."""
    return tuple(t for t in Tier if t.row.is_memory or capacity_bytes[t])
