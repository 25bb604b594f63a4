"""How much memory the machine has."""

import ctypes
import os
import sys


class MemoryStatus(ctypes.Structure):
    """`MEMORYSTATUSEX` of the Windows API."""

    _fields_ = [
        ("length", ctypes.c_uint32),
        ("load_percent", ctypes.c_uint32),
        ("total_physical", ctypes.c_uint64),
        ("available_physical", ctypes.c_uint64),
        ("total_page_file", ctypes.c_uint64),
        ("available_page_file", ctypes.c_uint64),
        ("total_virtual", ctypes.c_uint64),
        ("available_virtual", ctypes.c_uint64),
        ("available_extended_virtual", ctypes.c_uint64),
    ]


def physical_bytes() -> int:
    """Bytes of the machine's memory, used or not."""
    if sys.platform == "win32":
        status = MemoryStatus(length=ctypes.sizeof(MemoryStatus))
        if not ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
            raise ctypes.WinError()
        return status.total_physical
    else:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
