"""Carries out the transfers of a plan."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from zinf.core.memory import Stores, device_alias, host_alias, to_devices, to_shares
from zinf.core.plan import Shared, Transfer
from zinf.core.program import ArrayId, Tier
from zinf.core.sharding import Layouts


@dataclass(frozen=True, slots=True)
class Mover:
    """Moves arrays between tiers.

    Attributes:
        shared: the arrays that may be aliased instead of copied if the device computes
            in host memory ([Note: shared memory] in `core/plan/shared.py`).
    """

    stores: Stores
    layouts: Layouts
    shared: Shared

    def move(self, operation: Transfer) -> None:
        match operation.source, operation.target:
            case Tier.HOST, Tier.DEVICE:
                self.across(operation, self.alias_on_device, to_devices)
            case Tier.DEVICE, Tier.HOST:
                self.across(operation, self.alias_on_host, to_shares)
            case _:
                self.on_host(operation)

    def across(
        self,
        operation: Transfer,
        alias_of: Callable[[ArrayId], Any],
        copies_of: Callable[..., Sequence[Any]],
    ) -> None:
        """Move between host and devices: alias arrays where allowed, copy the rest."""
        source, target = self.stores[operation.source], operation.target
        aliases = {array: alias_of(array) for array in operation.arrays}
        copied = [array for array, alias in aliases.items() if alias is None]
        for array, alias in aliases.items():
            if alias is not None:
                stores = self.stores
                keep = stores.host.adopt if target == Tier.HOST else stores.device.write
                keep(array, alias).result()
        contents = [source.read(a).result() for a in copied]
        layouts = [self.layouts.of(a) for a in copied]
        moved = copies_of(contents, layouts, self.stores.host.pages)
        for array, content in zip(copied, moved, strict=True):
            self.stores[target].write(array, content).result()

    def alias_on_device(self, array: ArrayId) -> jax.Array | None:
        share = self.layouts.of(array).share
        if not self.stores.host.pages.may_alias:
            return None
        if array not in self.shared.up or share.num_devices > 1:
            return None
        memory = self.stores.host.memory(array)
        return device_alias(memory, next(iter(share.device_set)))

    def alias_on_host(self, array: ArrayId) -> np.ndarray | None:
        if array not in self.shared.down or not self.stores.host.pages.may_alias:
            return None
        return host_alias(self.stores.device.read(array).result())

    def on_host(self, operation: Transfer) -> None:
        """Move between the host and a slower tier, whose stores take host arrays.

        All requests are in flight together: drives are fastest with several.
        """
        source, target = (self.stores[t] for t in (operation.source, operation.target))
        reads = [(a, source.read(a)) for a in operation.arrays]
        writes: list[Future[None]] = []
        try:
            for array, content in reads:
                writes.append(target.write(array, content.result()))
        finally:
            # On failure, nothing may be in flight when the step ends: what writers
            # still write must not be dropped.
            wait([*writes, *(content for _, content in reads)])
        for written in writes:
            written.result()
