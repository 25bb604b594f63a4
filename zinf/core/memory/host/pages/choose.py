"""Which memory the host tier uses: what a config asks for, or the fastest."""

import logging
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import jax
import numpy as np

from zinf.core.memory.host.pages.abstract import PAGEABLE, AbstractPages
from zinf.core.memory.host.pages.arrays import PinnedArrays
from zinf.core.memory.host.pages.registered import RegisteredPages

logger = logging.getLogger(__name__)

AUTO, OFF = "auto", PAGEABLE.name
# By the value of `memory.pinned`: `(devices of this process, bytes needed) -> pages`.
# A kind that cannot be used raises NotImplementedError or ValueError.
KINDS: dict[str, Callable[[Sequence[jax.Device], int], AbstractPages]] = {
    OFF: lambda devices, needed_bytes: PAGEABLE,
    PinnedArrays.name: PinnedArrays,
    RegisteredPages.name: RegisteredPages,
}
# Enough that the rate of the link shows, and little for any host budget.
MEASURED_BYTES = 64 * 2**20
MEASURED_TIMES = 4
# Pinned memory stays allocated, so it must save at least this share of the time.
WORTH = 0.1
# By kind: GB/s to the device and back, or why it cannot be used.
Measured = dict[str, tuple[float, float] | str]
# By devices: what this process measured.
FOUND: dict[tuple[jax.Device, ...], Measured] = {}


def open_pages(
    asked: str,
    devices: Sequence[jax.Device],
    needed_bytes: int,
    gather: Callable[[str, Any], list[Any]],
) -> AbstractPages:
    """The memory for the host tier of this process.

    auto is "off" where devices compute in host memory. Elsewhere each kind moves
    `MEASURED_BYTES` to the device and back a few times, and the fastest over all
    processes is used by all. If one of them is then refused the memory that its arrays
    need, all go on with the next. A log line says what was measured, and refused.

    Args:
        asked: a key of `KINDS`, or auto.
        needed_bytes: the most bytes that the host tier will hold.
        gather: `(name, value) -> the values of all processes` (`AbstractGroup.gather`).

    Raises:
        NotImplementedError, ValueError: the devices cannot use the kind that is asked
            for.
    """
    if asked != AUTO:
        return KINDS[asked](devices, needed_bytes)
    if computes_in_host_memory(devices):
        return KINDS[OFF](devices, needed_bytes)
    key = tuple(devices)
    if key not in FOUND:
        FOUND[key] = measure(devices)
    found = gather("pinned", FOUND[key])
    while True:
        kind, why = fastest(found)
        pages, refused = None, None
        try:
            pages = KINDS[kind](devices, needed_bytes)
        except (NotImplementedError, ValueError) as error:
            refused = str(error)
        refusals = gather("pinned, opened", refused)
        if pages is not None and not any(refusals):
            logger.info("memory.pinned is %s: %s", kind, why)
            return pages
        if pages is not None:
            pages.close()
        found = [
            one if said is None else one | {kind: said}
            for one, said in zip(found, refusals, strict=True)
        ]


def computes_in_host_memory(devices: Sequence[jax.Device]) -> bool:
    """Whether device memory is host memory, so that no kind moves anything faster."""
    return all(device.platform == "cpu" for device in devices)


def measure(devices: Sequence[jax.Device]) -> Measured:
    """Transfer rates of each kind of memory on the first device, or why it has none."""
    found: Measured = {}
    for name, kind in KINDS.items():
        try:
            pages = kind(devices, MEASURED_BYTES)
        except (NotImplementedError, ValueError) as error:
            found[name] = str(error)
            continue
        found[name] = _rates(pages, devices[0])
        pages.close()
    return found


def _rates(pages: AbstractPages, device: jax.Device) -> tuple[float, float]:
    """The best GB/s of some transfers to the device and of some back."""
    content = pages.empty((MEASURED_BYTES // 4,), np.float32)
    content[...] = 0
    there, back = [], []
    for _ in range(MEASURED_TIMES):
        began = perf_counter()
        (moved,) = pages.to_device([content], device)
        there.append(perf_counter() - began)
        began = perf_counter()
        pages.to_host(moved)
        back.append(perf_counter() - began)
    amount = content.nbytes / 1e9
    return amount / min(there), amount / min(back)


def fastest(found: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """The kind that all processes use, and a sentence with what was measured.

    It is the kind with the least time for a byte there and back on the slowest process.

    Args:
        found: what `measure` returned in each process.
    """
    seconds: dict[str, float] = {}
    said = []
    for name in found[0]:
        each = [one[name] for one in found]
        refused = [rates for rates in each if isinstance(rates, str)]
        if refused:
            said.append(f"{name} is refused ({refused[0]})")
            continue
        seconds[name] = max(1 / there + 1 / back for there, back in each)
        there, back = (min(rates[n] for rates in each) for n in range(2))
        said.append(f"{name} moves {there:.1f} GB/s to the device and {back:.1f} back")
    best = min(seconds, key=seconds.__getitem__)
    if seconds[best] > (1 - WORTH) * seconds[OFF]:
        best = OFF
    return best, "; ".join(said)
