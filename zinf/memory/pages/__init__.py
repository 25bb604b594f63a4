"""Whether the host tier's memory is pageable or pinned, and which is faster."""

from zinf.memory.pages.abstract import PAGEABLE, AbstractPages, Pageable
from zinf.memory.pages.arrays import PinnedArrays
from zinf.memory.pages.choose import KINDS, open_pages
from zinf.memory.pages.limit import PINNED, check_pinned
from zinf.memory.pages.registered import RegisteredPages

__all__ = [
    "KINDS",
    "PAGEABLE",
    "PINNED",
    "AbstractPages",
    "Pageable",
    "PinnedArrays",
    "RegisteredPages",
    "check_pinned",
    "open_pages",
]
