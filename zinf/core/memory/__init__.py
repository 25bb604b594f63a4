"""Where arrays rest: one store a tier, behind the same three verbs."""

from zinf.core.memory.closing import close_when_dropped, wait_for_closing
from zinf.core.memory.device import DeviceStore, to_device, to_host
from zinf.core.memory.host.alias import device_alias, has_host_memory, host_alias
from zinf.core.memory.host.aligned import aligned_empty
from zinf.core.memory.host.store import HostStore
from zinf.core.memory.ledger import BudgetExceeded, Ledger
from zinf.core.memory.nvme import NvmeStore
from zinf.core.memory.residents import Residents, as_rows_rest
from zinf.core.memory.shares import (
    all_gathered,
    gathered,
    in_device_form,
    to_devices,
    to_shares,
)
from zinf.core.memory.slots import Key, Slots
from zinf.core.memory.storage_error import StorageError
from zinf.core.memory.store import AbstractStore
from zinf.core.memory.stores import Stores, open_stores

__all__ = [
    "AbstractStore",
    "BudgetExceeded",
    "DeviceStore",
    "HostStore",
    "Key",
    "Ledger",
    "NvmeStore",
    "Residents",
    "Slots",
    "StorageError",
    "Stores",
    "aligned_empty",
    "all_gathered",
    "as_rows_rest",
    "close_when_dropped",
    "device_alias",
    "gathered",
    "has_host_memory",
    "host_alias",
    "in_device_form",
    "open_stores",
    "to_device",
    "to_devices",
    "to_host",
    "to_shares",
    "wait_for_closing",
]
