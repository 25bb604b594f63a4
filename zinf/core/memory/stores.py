"""The stores of one process, by tier."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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

    `nvme` is None if no folder was named. `heap` watches the memory that this process
    takes for the tiers that are in its memory. `stacks` is `host` if arrays rest in
    stacks for an offloaded step, or else None.
    """

    device: DeviceStore
    host: HostStore
    nvme: NvmeStore | None
    heap: Heap
    stacks: PinnedStore | None

    def __getitem__(self, tier: Tier) -> AbstractStore:
        if tier == Tier.NVME:
            return self.drives
        return {Tier.DEVICE: self.device, Tier.HOST: self.host}[tier]

    @property
    def drives(self) -> NvmeStore:
        """The store of the NVMe tier.

        Raises:
            KeyError: there is none.
        """
        if self.nvme is None:
            raise KeyError(
                "There is no NVMe tier: no folder was named. Set memory.nvme."
            )
        return self.nvme

    @property
    def tiers(self) -> tuple[Tier, ...]:
        return tuple(t for t in Tier if t != Tier.NVME or self.nvme is not None)

    def peak_bytes(self, tier: Tier) -> int:
        """The most bytes that a tier has held since its peak was last reset."""
        return self[tier].ledger.peak_bytes if tier in self.tiers else 0

    def reset_peaks(self) -> None:
        """Begin new peaks; call this before a step, while nothing is in flight."""
        for tier in self.tiers:
            self[tier].ledger.reset_peak()
        self.heap.settle()

    def close(self) -> None:
        """Close the stores; what is on the NVMe tier stays in its files."""
        if self.nvme is not None:
            self.nvme.close()
        self.host.close()
        self.device.close()
        self.heap.close()


def open_stores(
    device: jax.Device | Sequence[jax.Device],
    *,
    device_bytes: int | None = None,
    host_bytes: int | None = None,
    nvme_bytes: int | None = None,
    nvme_paths: Sequence[Path] = (),
    stall_seconds: float = STALL_SECONDS,
    checksums: Coverage = "sampled",
    stacks: Sequence[Stack] = (),
    pages: AbstractPages = PAGEABLE,
) -> Stores:
    """Open the stores of devices, of this process's memory and of `nvme_paths`.

    Args:
        device: one device, or all devices of all processes that arrays lie on.
        device_bytes: budget of each device. None means no limit, on every tier.
        nvme_paths: folders for arrays, empty, new, or left by an earlier run.
        stall_seconds, checksums: see `NvmeStore`.
        stacks: what rests in pinned host memory (`PinnedStore`).
        pages: where all other arrays on the host get memory from, those that come from
            a drive too. The host store closes it.

    Raises:
        StorageError: a folder is in use, foreign or cannot be written.
    """
    on_device = DeviceStore(device, device_bytes)
    in_stacks = PinnedStore(stacks, host_bytes) if stacks else None
    on_host = in_stacks or HostStore(host_bytes, pages)
    # The device ledger counts one device: the heap counts it once for each CPU device.
    in_memory = [d for d in on_device.local if d.platform == "cpu"]
    ledgers = [on_device.ledger] * len(in_memory)
    # Memory taken at once is part of what the process has when the heap is made.
    if not on_host.pages.is_taken_at_once:
        ledgers.insert(0, on_host.ledger)
    on_nvme = None
    if nvme_paths:
        try:
            on_nvme = NvmeStore(
                nvme_paths,
                nvme_bytes,
                stall_seconds=stall_seconds,
                checksums=checksums,
                empty=on_host.pages.empty,
            )
        except BaseException:
            on_host.close()
            raise
    return Stores(on_device, on_host, on_nvme, Heap(ledgers), in_stacks)
