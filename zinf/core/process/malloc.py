"""The malloc of this process: what zinf may set, and giving freed memory back.

glibc keeps much of what is freed. Each thread has a heap of its own; freed blocks of up
to 32 MiB stay in it, and the heaps of XLA, of TensorStore and of zinf's links peak at
different times. Larger blocks are mapped one by one and given back at once, so each is
faulted in anew: a fifth of a step of 124M parameters in memory.

Settings of malloc hold for the whole process, so zinf changes none unless the process
is its own (the command `zinf`) or `tune_malloc` is called.
"""

import ctypes
import mmap
import platform
from threading import Event

# Constants of <malloc.h>.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -3, -4, -8
MANY = 65536
# Blocks from this size are mapped one by one unless `keep_large_blocks`: kept where
# memory is short, they are given back and then faulted in anew.
LARGE_BYTES = 32 * 2**20
PAGE_BYTES = mmap.PAGESIZE
MADV_DONTNEED = 4  # of Linux's <sys/mman.h>; other systems lack the name
# Free memory is given back in pieces of this size.
PIECE_BYTES = 8 * 2**20

_tuned = Event()


def tune_malloc() -> None:
    """Lets zinf manage the freed memory of this process, where malloc is glibc's.

    A streamed step then needs less memory, and a step in memory less time
    (`zinf/core/memory/README.md` has figures). The command `zinf` does this for itself.
    In a program of your own call it first, before jax makes an array: threads that
    allocated before keep heaps of their own. The whole process is affected, until it
    ends:

    * All threads share one heap, which keeps what is freed. Many threads that allocate
      at once wait for each other.
    * Engines that are made from now on give back what lies free in the heap beyond the
      bytes that a step needs, and decide before each step whether malloc maps large
      blocks one by one.

    Elsewhere than on glibc this does nothing.
    """
    if platform.libc_ver()[0] == "glibc":
        _set(M_ARENA_MAX, 1)
        _set(M_TRIM_THRESHOLD, -1)  # never
        _set(M_MMAP_THRESHOLD, LARGE_BYTES)
        _tuned.set()


def is_tuned() -> bool:
    """Whether `tune_malloc` has changed the settings of this process."""
    return _tuned.is_set()


def keep_large_blocks(is_wanted: bool) -> None:
    """Whether freed blocks from `LARGE_BYTES` on stay in the heap."""
    _set(M_MMAP_MAX, 0 if is_wanted else MANY)


def trim() -> None:
    """Give all free memory of the heap back to the system."""
    ctypes.CDLL(None).malloc_trim(0)


def give_back(nbytes: int) -> None:
    """Give about `nbytes` of free memory back to the system.

    `trim` gives back all, which is then faulted in anew. This takes pieces of the heap,
    drops their pages and frees them. A piece may be memory that the system has back
    already; when the heap has no other, it stops.
    """
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    pieces, wanted, end = [], anonymous_bytes() - nbytes, libc.sbrk(0)
    while True:
        piece = ctypes.c_void_p()
        if libc.posix_memalign(ctypes.byref(piece), PAGE_BYTES, PIECE_BYTES):
            break
        pieces.append(piece)
        if (piece.value or 0) + PIECE_BYTES > end:
            break
        libc.madvise(piece, ctypes.c_size_t(PIECE_BYTES), MADV_DONTNEED)
        if anonymous_bytes() <= wanted:
            break
    for piece in pieces:
        libc.free(piece)


def anonymous_bytes(process: int | str = "self") -> int:
    """Resident memory of a process that is no page of a file (Linux: RssAnon, proc(5)).

    Pages of files, such as the code of libraries, are the kernel's to take back.
    """
    with open(f"/proc/{process}/statm", "rb", buffering=0) as statm:
        _, resident, of_files, *_ = map(int, statm.read().split())
    return (resident - of_files) * PAGE_BYTES


def _set(parameter: int, setting: int) -> None:
    ctypes.CDLL(None).mallopt(parameter, setting)
