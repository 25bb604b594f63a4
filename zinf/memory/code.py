"""Takes the code of libraries out of what is resident, after it has compiled.

Compiling touches most of XLA and LLVM: of GPT-2 124M, 216 MiB of libraries are resident
after the first step, and 39 are touched again by the next ones. What they are pages of
are files, which the system keeps as it keeps others; it takes them from a process only
when memory is short, so until then they count as that process's.
"""

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

MADV_DONTNEED = 4  # Of <sys/mman.h>, on Linux, which alone has the list of mappings.
# Of smaller mappings there is little to be had for the time that it takes.
LEAST_BYTES = 2**20
HEADER = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ (\d+) +(.*)")
LIBRARY = re.compile(r"\.so(\.[0-9.]+)?$")


def drop_code() -> int:
    """Takes pages of libraries that are as in their files out of what is resident.

    They come back as they are used, without being read again while the system keeps
    them. Pages that were changed, as a loader or a debugger does, stay.

    Returns:
        how many bytes were resident of what was dropped; 0 where the system does not
        list mappings as Linux does.
    """
    try:
        smaps = Path("/proc/self/smaps").read_text()
    except OSError:
        return 0
    # Held, the interpreter's lock keeps threads from unloading a library meanwhile.
    libc = ctypes.PyDLL(None)
    dropped = 0
    for start, nbytes, resident in _unchanged(smaps):
        address, size = ctypes.c_void_p(start), ctypes.c_size_t(nbytes)
        if libc.madvise(address, size, MADV_DONTNEED) == 0:
            dropped += resident
    return dropped


def _unchanged(smaps: str) -> Iterator[tuple[int, int, int]]:
    """Start, size and resident bytes of the mappings of libraries to be dropped.

    Those that nobody may write, and of which no page is the process's own.
    """
    start = size = resident = 0
    is_ours = False
    for line in smaps.splitlines():
        if header := HEADER.match(line):
            low, high, permissions, inode, name = header.groups()
            is_library = int(inode) > 0 and LIBRARY.search(name) is not None
            is_ours = is_library and permissions in ("r--p", "r-xp")
            start, size = int(low, 16), int(high, 16) - int(low, 16)
            resident = 0
        elif is_ours and line.startswith("Rss:"):
            resident = _kib(line)
        elif is_ours and line.startswith("Anonymous:"):
            if _kib(line) == 0 and resident >= LEAST_BYTES:
                yield start, size, resident


def _kib(line: str) -> int:
    return int(line.split()[1]) * 1024
