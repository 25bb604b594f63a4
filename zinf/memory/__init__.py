"""Where arrays rest: one store a tier, behind the same three verbs."""

from zinf.memory.alias import device_alias, host_alias
from zinf.memory.aligned import aligned_empty
from zinf.memory.closing import close_when_dropped, wait_for_closing
from zinf.memory.device import DeviceStore, to_device, to_host
from zinf.memory.host import HostStore
from zinf.memory.ledger import BudgetExceeded, Ledger
from zinf.memory.nvme import NvmeStore
from zinf.memory.residents import Residents
from zinf.memory.shares import gathered, in_device_form, to_devices, to_shares
from zinf.memory.storage_error import StorageError
from zinf.memory.store import AbstractStore
from zinf.memory.stores import Stores, open_stores

__all__ = [
    "AbstractStore",
    "BudgetExceeded",
    "DeviceStore",
    "HostStore",
    "Ledger",
    "NvmeStore",
    "Residents",
    "StorageError",
    "Stores",
    "aligned_empty",
    "close_when_dropped",
    "device_alias",
    "gathered",
    "host_alias",
    "in_device_form",
    "open_stores",
    "to_device",
    "to_devices",
    "to_host",
    "to_shares",
    "wait_for_closing",
]
