"""Arrays and byte ranges on drives, at the speed of the drives and with checks.

The counterpart of DeepSpeed's DeepNVMe. It is useful alone:

    with nvme.Drive(Path("/mnt/nvme")) as drive:
        file = nvme.File(drive, Path("/mnt/nvme/weights.bin"), nbytes=value.nbytes)
        done = file.write_async(value)       # a concurrent.futures.Future
        done.add_done_callback(...)
        file.flush()                         # raises what failed
        file.read(zinf.core.memory.aligned_empty(value.shape, value.dtype))

`NvmeStore` is the tier built on these: whole arrays by name, in zarr files with
checksums.
"""

from zinf.core.memory.nvme.checksum import Coverage
from zinf.core.memory.nvme.drive import STALL_SECONDS, Drive
from zinf.core.memory.nvme.file import File
from zinf.core.memory.nvme.measure import Measured, measure_drive
from zinf.core.memory.nvme.profile import (
    Profile,
    find_profile,
    measured_speeds,
    save_profile,
)
from zinf.core.memory.nvme.store import NvmeStore
from zinf.core.memory.nvme.system import System

__all__ = [
    "STALL_SECONDS",
    "Coverage",
    "Drive",
    "File",
    "Measured",
    "NvmeStore",
    "Profile",
    "System",
    "find_profile",
    "measure_drive",
    "measured_speeds",
    "save_profile",
]
