"""The stores of one process, by tier."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import jax

from zinf.core.memory.device import DeviceStore
from zinf.core.memory.host.heap import Heap
from zinf.core.memory.host.pages import PAGEABLE, AbstractPages
from zinf.core.memory.host.pinned import PinnedStore, Stack
from zinf.core.memory.host.store import HostStore
from zinf.core.memory.nvme import STALL_SECONDS, Coverage, NvmeStore
from zinf.core.memory.store import AbstractStore
from zinf.core.program import Tier


@dataclass(frozen=True)
class Stores:
    """One store a tier: `stores[Tier.HOST]` is `stores.host`.

    Attributes:
        by_tier: the stores of the tiers that exist.
        heap: watches the memory that this process takes for the tiers in its memory.
        stacks: `host` if arrays rest in stacks for an offloaded step, or else None.
    """

    device: DeviceStore
    host: HostStore
    by_tier: Mapping[Tier, AbstractStore]
    heap: Heap
    stacks: PinnedStore | None

    def __getitem__(self, tier: Tier) -> AbstractStore:
        """The store of a tier; KeyError if the tier does not exist."""
        if tier not in self.by_tier:
            raise KeyError(
                f"There is no {tier} tier: no folder was named. Set memory.{tier}."
            )
        return self.by_tier[tier]

    @property
    def nvme(self) -> NvmeStore | None:
        """The store of the NVMe tier; None if no folder was named."""
        return self.drives if Tier.NVME in self.by_tier else None

    @property
    def drives(self) -> NvmeStore:
        """The store of the NVMe tier; KeyError if no folder was named."""
        store = self[Tier.NVME]
        assert isinstance(store, NvmeStore)
        return store

    @property
    def tiers(self) -> tuple[Tier, ...]:
        return tuple(self.by_tier)

    def peak_bytes(self, tier: Tier) -> int:
        """The most bytes that a tier has held since its peak was last reset."""
        return self[tier].ledger.peak_bytes if tier in self.by_tier else 0

    def reset_peaks(self) -> None:
        """Begin new peaks; call this before a step, while nothing is in flight.

        Spare slots go: the step may change what they hold, and its peak is without
        them.
        """
        self.device.free_spare()
        for store in self.by_tier.values():
            store.ledger.reset_peak()
        self.heap.settle()

    def close(self) -> None:
        """Close the stores, slowest first; what is in files stays there."""
        for store in reversed(list(self.by_tier.values())):
            store.close()
        self.heap.close()


def open_stores(
    device: jax.Device | Sequence[jax.Device],
    *,
    capacity_bytes: Mapping[Tier, int | None] = MappingProxyType({}),
    nvme_paths: Sequence[Path] = (),
    stall_seconds: float = STALL_SECONDS,
    checksums: Coverage = "sampled",
    stacks: Sequence[Stack] = (),
    pages: AbstractPages = PAGEABLE,
) -> Stores:
    """Open the stores of devices, of this process's memory and of `nvme_paths`.

    Args:
        device: one device, or all devices of all processes that arrays lie on.
        capacity_bytes: budgets; that of the device tier is of each device. A tier
            without one has no limit.
        nvme_paths: folders for arrays, empty, new, or left by an earlier run.
        stall_seconds, checksums: see `NvmeStore`.
        stacks: what rests in pinned host memory (`PinnedStore`).
        pages: where all other arrays on the host get memory from, those that come from
            a drive too. The host store closes it.

    Raises:
        StorageError: a folder is in use, foreign or cannot be written.
    """
    budget = capacity_bytes.get
    on_device = DeviceStore(device, budget(Tier.DEVICE))
    in_stacks = PinnedStore(stacks, budget(Tier.HOST)) if stacks else None
    on_host = in_stacks or HostStore(budget(Tier.HOST), pages)
    # The device ledger counts one device: the heap counts it once for each CPU device.
    in_memory = [d for d in on_device.local if d.platform == "cpu"]
    ledgers = [on_device.ledger] * len(in_memory)
    # Memory taken at once is part of what the process has when the heap is made.
    if not on_host.pages.is_taken_at_once:
        ledgers.insert(0, on_host.ledger)
    by_tier: dict[Tier, AbstractStore] = {Tier.DEVICE: on_device, Tier.HOST: on_host}
    if nvme_paths:
        try:
            by_tier[Tier.NVME] = NvmeStore(
                nvme_paths,
                budget(Tier.NVME),
                stall_seconds=stall_seconds,
                checksums=checksums,
                empty=on_host.pages.empty,
            )
        except BaseException:
            on_host.close()
            raise
    return Stores(on_device, on_host, by_tier, Heap(ledgers), in_stacks)
