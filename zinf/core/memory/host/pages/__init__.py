"""Whether the host tier's memory is pageable or pinned, and which is faster."""

from zinf.core.memory.host.pages.abstract import PAGEABLE, AbstractPages, Pageable
from zinf.core.memory.host.pages.arrays import PinnedArrays
from zinf.core.memory.host.pages.choose import KINDS, open_pages
from zinf.core.memory.host.pages.limit import PINNED, check_pinned
from zinf.core.memory.host.pages.registered import RegisteredPages

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
