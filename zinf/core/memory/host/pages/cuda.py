"""Calls of the CUDA driver that jax has loaded: pin host memory, and copy to it.

The driver (`libcuda`) is one for the process, whichever CUDA runtime jax came with, and
its primary contexts are those that XLA uses. Memory is pinned for all of them.
"""

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import Any

LIBRARY = "libcuda.so.1"
PORTABLE = 1  # Flag of cuMemHostRegister: pinned for all contexts.
NON_BLOCKING = 1  # Flag of cuStreamCreate: does not wait for the default stream.


class CudaError(RuntimeError):
    """A function of the driver refused.

    Attributes:
        found: the function, and code, name and text of the error.
    """

    def __init__(self, function: str, code: int, name: str, text: str) -> None:
        self.code = code
        self.found = f"{function} returned {code}, {name} ({text})"
        super().__init__(self.found)


def load() -> Any:
    """The driver's library, which is loaded already where jax has a GPU.

    Raises:
        OSError: there is none.
    """
    return ctypes.CDLL(LIBRARY)


class Driver:
    """The driver, with a context and a stream for each GPU that is named.

    Safe to call from several threads.

    Args:
        library: has the driver's functions, as `load` returns it.
        ordinals: CUDA's numbers of the GPUs (`jax.Device.local_hardware_id`).

    Raises:
        CudaError: the driver cannot be used.
    """

    def __init__(self, library: Any, ordinals: Sequence[int]) -> None:
        self._library = library
        self._devices: dict[int, c_int] = {}
        self._contexts: dict[int, c_void_p] = {}
        self._streams: dict[int, c_void_p] = {}
        try:
            self._call("cuInit", c_uint(0))
            for ordinal in ordinals:
                self._open(ordinal)
        except BaseException:
            self.close()
            raise

    def register(self, address: int, nbytes: int) -> None:
        """Pin host memory, which begins and ends at a page."""
        self._enter(next(iter(self._contexts)))
        args = c_void_p(address), c_size_t(nbytes), c_uint(PORTABLE)
        self._call("cuMemHostRegister_v2", *args)

    def unregister(self, address: int) -> None:
        """Undo `register`; the memory and its content stay."""
        self._enter(next(iter(self._contexts)))
        self._call("cuMemHostUnregister", c_void_p(address))

    def copy_to_host(self, target: int, source: int, nbytes: int, ordinal: int) -> None:
        """Begin to copy from an address on a GPU to one in registered memory."""
        self._enter(ordinal)
        args = c_void_p(target), c_void_p(source), c_size_t(nbytes)
        self._call("cuMemcpyDtoHAsync_v2", *args, self._streams[ordinal])

    def wait(self, ordinal: int) -> None:
        """Wait for the copies from a GPU that have begun."""
        self._enter(ordinal)
        self._call("cuStreamSynchronize", self._streams[ordinal])

    def close(self) -> None:
        for ordinal, stream in self._streams.items():
            self._enter(ordinal)
            self._call("cuStreamDestroy_v2", stream)
        for ordinal in self._contexts:
            self._call("cuDevicePrimaryCtxRelease_v2", self._devices[ordinal])
        self._streams.clear()
        self._contexts.clear()

    def _open(self, ordinal: int) -> None:
        device, context, stream = c_int(), c_void_p(), c_void_p()
        self._call("cuDeviceGet", byref(device), c_int(ordinal))
        self._devices[ordinal] = device
        self._call("cuDevicePrimaryCtxRetain", byref(context), device)
        self._contexts[ordinal] = context
        self._enter(ordinal)
        self._call("cuStreamCreate", byref(stream), c_uint(NON_BLOCKING))
        self._streams[ordinal] = stream

    def _enter(self, ordinal: int) -> None:
        """Make a GPU's context current in the calling thread."""
        self._call("cuCtxSetCurrent", self._contexts[ordinal])

    def _call(self, function: str, *args: Any) -> None:
        code = getattr(self._library, function)(*args)
        if code:
            known = (
                self._said(x, code) for x in ("cuGetErrorName", "cuGetErrorString")
            )
            raise CudaError(function, code, *known)

    def _said(self, function: str, code: int) -> str:
        text = c_char_p()
        getattr(self._library, function)(c_int(code), byref(text))
        return (text.value or b"unknown").decode()
