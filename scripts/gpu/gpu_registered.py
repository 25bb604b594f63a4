"""Section of gpu_check.py: bandwidth from and to NumPy memory that is pinned in place.

There are three ways to pin it: the CUDA driver (cuMemHostRegister; XLA does not know of
it, so the question is how XLA treats such memory); `dma_map` of jax's client (XLA knows
of it); and an import by DLPack as pinned memory (the result is a jax array). Copies by
the driver itself show the limit of the link.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_int, c_size_t, c_uint, c_void_p
from functools import cache, partial
from itertools import product
from typing import Any

import jax
import numpy as np
from gpu_links import (
    DRY_SIZES,
    PATH_SECONDS,
    SIZES,
    Path,
    device_kind,
    host_array,
    made,
    on_device,
    put_path,
    seconds_of_both,
)
from gpu_rows import MIB, Rows, Setting, Skipped

NON_BLOCKING = 1  # flag of cuStreamCreate: does not wait for the default stream
PORTABLE = 1  # flag of cuMemHostRegister: pinned for all contexts
CPU, CUDA_HOST = 1, 3  # DLDeviceType
DLTENSOR_DEVICE_OFFSET = 8  # struct DLTensor {void* data; DLDevice {int32, int32}; ...}

# Takes an array and a device; returns a context in which the array is pinned.
Pin = Callable[[np.ndarray, Any], Any]
# Takes bytes, device and seconds to spend; returns the times of single transfers.
Measure = Callable[[int, Any, float], list[float]]


def run(setting: Setting, rows: Rows) -> None:
    device = setting.device()
    seconds = 0.01 if setting.is_dry else PATH_SECONDS
    sizes = DRY_SIZES if setting.is_dry else SIZES

    def one(row: str, path: str, measure: Measure, nbytes: int) -> None:
        times = measure(nbytes, device, seconds)
        of = {"path": path, "MiB": nbytes / MIB}
        rows.add_rate(row, nbytes / 1e9, times, "GB/s", **of)

    def both(path: str, nbytes: int) -> None:
        rate = 2 * nbytes / driver_both(nbytes, device, seconds) / 1e9
        of = {"path": path, "MiB": nbytes / MIB}
        rows.add("both at once", rate, "GB/s", "sum of the two directions", **of)

    path = "driver, registered"
    rows.attempt("both at once", partial(both, path, sizes[-2]), path=path)
    for (row, path, measure), nbytes in product(MEASURES, sizes):
        work = partial(one, row, path, measure, nbytes)
        rows.attempt(row, work, path=path, MiB=nbytes / MIB)
    rows.attempt("imported memory is shared", partial(_shows_writes, device, rows))


# Ways to pin.


@contextmanager
def registered(array: np.ndarray, device: Any) -> Iterator[np.ndarray]:
    cuda = driver(device)
    address = c_void_p(array.ctypes.data)
    cuda("cuMemHostRegister_v2", address, c_size_t(array.nbytes), c_uint(PORTABLE))
    try:
        yield array
    finally:
        cuda("cuMemHostUnregister", address)


@contextmanager
def dma_mapped(array: np.ndarray, device: Any) -> Iterator[np.ndarray]:
    device.client.dma_map(array.ctypes.data, array.nbytes)
    try:
        yield array
    finally:
        device.client.dma_unmap(array.ctypes.data)


@contextmanager
def imported_by_dlpack(array: np.ndarray, device: Any) -> Iterator[jax.Array]:
    """The array as a jax array in pinned memory, without a copy."""
    if device.platform == "cpu":
        yield jax.dlpack.from_dlpack(Labelled(array, CPU))
        return
    with registered(array, device):
        shared = jax.dlpack.from_dlpack(Labelled(array, CUDA_HOST))
        if shared.sharding.memory_kind != "pinned_host":
            kind = shared.sharding.memory_kind
            raise Skipped(f"the import is of the kind {kind}, not pinned_host")
        yield shared


class Labelled:
    """A NumPy array that DLPack presents as memory of another device type."""

    def __init__(self, array: np.ndarray, device_type: int):
        self.array, self.device_type = array, device_type

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device_type, 0

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self.array.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = (
            c_void_p,
            (ctypes.py_object, ctypes.c_char_p),
        )
        tensor = pointer(capsule, b"dltensor")
        c_int.from_address(tensor + DLTENSOR_DEVICE_OFFSET).value = self.device_type
        return capsule


def _shows_writes(device: Any, rows: Rows) -> None:
    """Reports whether a jax array made by DLPack sees later writes by NumPy."""
    source = host_array(MIB)
    with imported_by_dlpack(source, device) as shared:
        source[:] = 2
        first = float(jax.device_put(shared, device_kind(device))[0])
    rows.add("imported memory is shared", first == 2, note="NumPy wrote, jax read")


# Paths.


def put_pinned(pin: Pin, nbytes: int, device: Any, seconds: float) -> list[float]:
    with pin(host_array(nbytes), device) as source:
        return put_path(lambda: source, device).times(seconds)


def pin_itself(pin: Pin, nbytes: int, device: Any, seconds: float) -> list[float]:
    """Times of pinning and unpinning."""

    def both(array: np.ndarray) -> None:
        with pin(array, device):
            pass

    array = host_array(nbytes)
    return Path(both, lambda: array).times(seconds)


def driver_put(nbytes: int, device: Any, seconds: float) -> list[float]:
    with registered(host_array(nbytes), device) as array:
        return driver_copy(True, array, on_device(nbytes, device)).times(seconds)


def driver_get(nbytes: int, device: Any, seconds: float) -> list[float]:
    with registered(host_array(nbytes), device) as array:
        return driver_copy(False, array, on_device(nbytes, device)).times(seconds)


def driver_both(nbytes: int, device: Any, seconds: float) -> float:
    arrays = host_array(nbytes), host_array(nbytes)
    with registered(arrays[0], device) as there, registered(arrays[1], device) as back:
        paths = [
            driver_copy(to_device, array, on_device(nbytes, device))
            for to_device, array in ((True, there), (False, back))
        ]
        return seconds_of_both(*paths, seconds)


def mapped_get(pin: Pin, nbytes: int, device: Any, seconds: float) -> list[float]:
    """Times of the driver's copy of a jax array into a reused NumPy array."""
    make = made(nbytes, device)
    with pin(host_array(nbytes), device) as target:

        def move(x: jax.Array) -> None:
            driver_copy(False, target, x).call(None)

        return Path(move, make).times(seconds)


def driver_copy(to_device: bool, array: np.ndarray, other: jax.Array) -> Path:
    """The driver's copy between host memory and a jax array, on a separate stream."""
    cuda = driver(list(other.devices())[0])
    other.block_until_ready()
    there, here = c_void_p(other.unsafe_buffer_pointer()), c_void_p(array.ctypes.data)
    stream = cuda.stream(to_device)
    name = "cuMemcpyHtoDAsync_v2" if to_device else "cuMemcpyDtoHAsync_v2"
    ends = (there, here) if to_device else (here, there)

    def call(_: Any) -> None:
        cuda.enter()
        cuda(name, *ends, c_size_t(array.nbytes), stream)
        cuda("cuStreamSynchronize", stream)
        assert other is not None  # Keeps the array alive, as only its address is used.

    return Path(call, lambda: None)


class Driver:
    """Calls functions of libcuda in the primary context, which XLA uses too."""

    def __init__(self) -> None:
        try:
            self.library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise Skipped(error) from error
        self.context = c_void_p()
        number = c_int()
        self("cuInit", c_uint(0))
        self("cuDeviceGet", byref(number), c_int(0))
        self("cuDevicePrimaryCtxRetain", byref(self.context), number)
        self.streams: dict[bool, c_void_p] = {}

    def __call__(self, name: str, *arguments: Any) -> None:
        code = getattr(self.library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self.library.cuGetErrorString(code, byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'').decode()} ({code})")

    def enter(self) -> None:
        """Makes the context current in the calling thread."""
        self("cuCtxSetCurrent", self.context)

    def stream(self, to_device: bool) -> c_void_p:
        if to_device not in self.streams:
            self.enter()
            made = self.streams[to_device] = c_void_p()
            self("cuStreamCreate", byref(made), c_uint(NON_BLOCKING))
        return self.streams[to_device]


@cache
def _driver() -> Driver:
    return Driver()


def driver(device: Any) -> Driver:
    """The driver, with its context current in the calling thread.

    Raises:
        Skipped: there is no GPU.
    """
    if device.platform != "gpu":
        raise Skipped(f"no GPU: jax runs on {device.platform}")
    found = _driver()
    found.enter()
    return found


MEASURES = (
    ("h2d", "driver, registered", driver_put),
    ("d2h", "driver, registered", driver_get),
    ("h2d", "registered", partial(put_pinned, registered)),
    ("h2d", "dma_map", partial(put_pinned, dma_mapped)),
    ("d2h", "driver, dma_map", partial(mapped_get, dma_mapped)),
    ("pin", "registered", partial(pin_itself, registered)),
    ("pin", "dma_map", partial(pin_itself, dma_mapped)),
    # Last, because memory labelled as another kind may crash the process.
    ("h2d", "dlpack", partial(put_pinned, imported_by_dlpack)),
)
