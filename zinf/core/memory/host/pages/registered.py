"""Host arrays in memory of NumPy's that is pinned in place, by the CUDA driver.

An accelerator copies pinned memory by itself. XLA does not know that memory which
others pinned is pinned, and would copy it into buffers of its own first. DLPack says
it: an array of the type kDLCUDAHost becomes a jax array of the kind `pinned_host`, over
the same memory. The other way the driver copies, since jax has no call that copies into
memory that is given.
"""

import ctypes
import logging
import re
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from numpy.typing import DTypeLike

from zinf.core.memory.host.aligned import ALIGNMENT, address
from zinf.core.memory.host.pages import cuda
from zinf.core.memory.host.pages.abstract import (
    PAGEABLE,
    CountingPages,
    is_worth_pinning,
)
from zinf.core.memory.host.pages.arena import Arena, RegisteredMemory
from zinf.core.memory.host.pages.cuda import CudaError, Driver
from zinf.core.memory.host.pages.limit import PINNED
from zinf.core.memory.ledger import Ledger

logger = logging.getLogger(__name__)

ASKED = "memory.pinned: registered"
# DLPack's DLDeviceType by platform. On the CPU backend memory is only that of a test.
DEVICE_TYPES = {"gpu": 3, "cuda": 3, "cpu": 1}
# DLPack's DLDataTypeCode by kind of dtype; bfloat16 is of the kind V to NumPy.
TYPE_CODES = {"i": 0, "u": 1, "f": 2}
BFLOAT = 4
# Offsets in struct DLTensor {void* data; int32 device_type, device_id; int32 ndim;
# uint8 code, bits; ...}.
DEVICE_OFFSET, CODE_OFFSET = 8, 20
CHECKED_BYTES = 2**20
LIMITS = Path("/proc/self/limits")


class RegisteredPages(CountingPages):
    """Arrays of the host tier lie in an arena that is registered with the GPUs once.

    NumPy, the updates on the host and the drives use the memory in place, and every
    contiguous part of an array crosses as pinned memory. What has no room in the arena,
    is small (`PINNED_FROM_BYTES`), not contiguous or of a dtype that DLPack does not
    have crosses as pageable memory, which `pageable_bytes` counts.
    """

    name = "registered"
    may_alias = False
    is_taken_at_once = True

    def __init__(self, devices: Sequence[jax.Device], needed_bytes: int = 0) -> None:
        """Pins memory for all arrays, and checks that a GPU reads and writes it.

        Args:
            devices: the devices of this process.
            needed_bytes: the most bytes that the arrays will have at once.

        Raises:
            NotImplementedError: there is no CUDA, or this jax does not take memory of
                others as pinned.
            ValueError: CUDA refuses to pin so much.
        """
        super().__init__()
        self._has_warned = False
        nbytes = max(needed_bytes, CHECKED_BYTES)
        try:
            self._driver = Driver(cuda.load(), [d.local_hardware_id for d in devices])
        except (OSError, CudaError) as error:
            raise NotImplementedError(
                f"{ASKED} needs the CUDA driver, and jax runs on "
                f"{devices[0].platform}: {error}. Use memory.pinned: arrays or off."
            ) from error
        try:
            self._arena = Arena(self._driver, nbytes)
        except CudaError as error:
            raise ValueError(refusal(nbytes, error)) from error
        try:
            for device in devices:
                self._check(device)
        except BaseException:
            self.close()
            raise

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        dtype = np.dtype(dtype)
        nbytes = prod(shape) * dtype.itemsize
        if not self._pins(nbytes, dtype):
            return PAGEABLE.empty(shape, dtype)
        try:
            memory, why = self._arena.take(nbytes), "memory.host has no room for more"
        except CudaError as error:
            memory, why = None, str(error)
        if memory is None:
            self._warn(nbytes, why)
            return PAGEABLE.empty(shape, dtype)
        return np.ndarray(shape, dtype, buffer=memory)

    def has_made(self, value: np.ndarray, owner: object) -> bool:
        if self._pins(value.nbytes, value.dtype):
            return isinstance(owner, RegisteredMemory) and owner.arena is self._arena
        return PAGEABLE.has_made(value, owner)

    def to_device(
        self,
        values: Sequence[np.ndarray],
        devices: jax.Device | Sequence[jax.Device],
    ) -> list[jax.Array]:
        each = [devices] * len(values) if isinstance(devices, jax.Device) else devices
        pinned = [n for n, value in enumerate(values) if self._is_pinned(value)]
        rest = [n for n in range(len(values)) if n not in set(pinned)]
        shared = [_imported(values[n], each[n]) for n in pinned]
        kinds = [SingleDeviceSharding(each[n], memory_kind="device") for n in pinned]
        # On the CPU backend it is a copy only if it may not alias.
        moved = jax.device_put(shared, kinds, may_alias=False)
        copied = PAGEABLE.to_device([values[n] for n in rest], [each[n] for n in rest])
        self._count(values, rest)
        # The arena may give a block to another array as soon as nothing refers to it.
        jax.block_until_ready(moved)
        found = dict(zip([*pinned, *rest], [*moved, *copied], strict=True))
        return [found[n] for n in range(len(values))]

    def to_host(self, *values: jax.Array) -> list[np.ndarray]:
        single = [x.addressable_data(0) for x in values]
        made = [self._pinned_like(x) for x in single]
        rest = [n for n, target in enumerate(made) if target is None]
        jax.block_until_ready(single)
        begun = set()
        try:
            for source, target in zip(single, made, strict=True):
                if target is None:
                    continue
                ordinal = next(iter(source.devices())).local_hardware_id
                begun.add(ordinal)
                ends = address(target), source.unsafe_buffer_pointer()
                self._driver.copy_to_host(*ends, target.nbytes, ordinal)
            copied = iter(PAGEABLE.to_host(*[single[n] for n in rest]))
        finally:
            # On failure too: the arena may give these blocks to others.
            for ordinal in begun:
                self._driver.wait(ordinal)
        self._count(single, rest)
        return [next(copied) if target is None else target for target in made]

    def count_in(self, ledger: Ledger) -> None:
        """The arena may grow up to the budget, where holes leave no room."""
        self._arena.limit_bytes = ledger.capacity_bytes

    def close(self) -> None:
        """Unregister the memory. Arrays that are still used keep theirs."""
        self._arena.close()

    def _pins(self, nbytes: int, dtype: np.dtype) -> bool:
        return is_worth_pinning(nbytes, dtype) and _type_code(dtype) is not None

    def _is_pinned(self, value: np.ndarray) -> bool:
        """Whether an array can cross as it is: all of a block, or a part."""
        owner = _owner(value)
        return (
            self._pins(value.nbytes, value.dtype)
            and owner is not None
            and owner.arena is self._arena
            and value.flags.c_contiguous
            and address(value) % ALIGNMENT == 0
        )

    def _pinned_like(self, source: Any) -> np.ndarray | None:
        """Pinned memory for the content of a device array as it lies there."""
        layout = source.format.layout
        in_order = layout is None or tuple(layout.major_to_minor) == tuple(
            range(source.ndim)
        )
        if not in_order or not self._pins(source.nbytes, source.dtype):
            return None
        target = self.empty(source.shape, source.dtype)
        return target if self._is_pinned(target) else None

    def _warn(self, nbytes: int, why: str) -> None:
        """Say once that not all arrays are pinned."""
        with self._lock:
            has_warned, self._has_warned = self._has_warned, True
        if not has_warned:
            logger.warning(
                "%s has %s bytes pinned, and no room in one piece for an array of %s "
                "bytes: %s. It crosses as pageable memory, and so do others for which "
                "there is no room. Raise memory.host.",
                *(ASKED, f"{self._arena.pinned_bytes:,}", f"{nbytes:,}", why),
            )

    def _check(self, device: jax.Device) -> None:
        """Raise unless a GPU gets what NumPy wrote, and NumPy what the GPU has."""
        source = self.empty((CHECKED_BYTES // 4,), np.float32)
        source[:] = np.arange(source.size)
        try:
            (moved,) = self.to_device([source], device)
            (back,) = self.to_host(moved)
        except (TypeError, ValueError, RuntimeError) as error:
            raise NotImplementedError(
                f"{ASKED} needs a jax that takes pinned memory of others by DLPack, "
                f"and this one failed: {error}. Use memory.pinned: arrays or off."
            ) from error
        if not np.array_equal(np.asarray(moved), back) or not np.array_equal(
            source, back
        ):
            raise NotImplementedError(
                f"{ASKED} moved {CHECKED_BYTES:,} bytes to {device} and back, and they "
                "came back changed. Use memory.pinned: arrays or off."
            )
        self.pinned_bytes = self.pageable_bytes = 0


class _Labelled:
    """A part of the arena, as DLPack presents pinned memory."""

    def __init__(self, value: np.ndarray, device: jax.Device) -> None:
        # NumPy exports writeable arrays of its own dtypes only.
        owner = _owner(value)
        assert owner is not None
        self._content = np.ndarray(
            value.shape,
            f"u{value.dtype.itemsize}",
            buffer=owner,
            offset=address(value) - address(owner),
        )
        code = _type_code(value.dtype)
        assert code is not None
        self._code = code
        self._device = DEVICE_TYPES[device.platform], device.local_hardware_id

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self._content.__dlpack__()
        tensor = _pointer(capsule, b"dltensor")
        fields = (ctypes.c_int32 * 2).from_address(tensor + DEVICE_OFFSET)
        fields[:] = self._device
        ctypes.c_uint8.from_address(tensor + CODE_OFFSET).value = self._code
        return capsule


def _imported(value: np.ndarray, device: jax.Device) -> jax.Array:
    """A part of the arena as a jax array over the same memory.

    Raises:
        TypeError: jax takes it as memory of another kind.
    """
    shared = jax.dlpack.from_dlpack(_Labelled(value, device))
    kind = shared.sharding.memory_kind
    if device.platform != "cpu" and kind != PINNED:
        raise TypeError(f"the memory is of the kind {kind} to jax, not {PINNED}")
    return shared


def _owner(value: np.ndarray) -> RegisteredMemory | None:
    owner: Any = value
    while owner is not None and not isinstance(owner, RegisteredMemory):
        owner = getattr(owner, "base", None)
    return owner


def _type_code(dtype: np.dtype) -> int | None:
    """DLPack's code of a dtype; None for those that cross as pageable memory."""
    return BFLOAT if dtype.name == "bfloat16" else TYPE_CODES.get(dtype.kind)


def _pointer(capsule: Any, name: bytes) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return get(capsule, name)


def refusal(nbytes: int, error: CudaError) -> str:
    """The message to the user when CUDA refuses to pin memory."""
    return (
        f"{ASKED} asked CUDA to pin {nbytes:,} bytes of host memory, and "
        f"{error.found}. This process may lock {_lockable()} (ulimit -l). Raise that, "
        "lower memory.host, or use memory.pinned: arrays or off."
    )


def _lockable() -> str:
    try:
        limits = LIMITS.read_text()
    except OSError:
        return "an unknown number of bytes"
    found = re.search(r"Max locked memory +(\S+)", limits)
    limit = found[1] if found else "unlimited"
    return f"{int(limit):,} bytes" if limit.isdigit() else "any number of bytes"
