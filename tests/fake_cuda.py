"""A CUDA driver that is not there, for memory that is registered with a GPU.

It has the functions of libcuda that `zinf.core.memory.host.pages.cuda` calls, with
ctypes arguments. Memory of the GPU is memory of the CPU backend.
"""

import ctypes
import mmap
from typing import Any

NAMES = {
    1: b"CUDA_ERROR_INVALID_VALUE",
    2: b"CUDA_ERROR_OUT_OF_MEMORY",
    712: b"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
    713: b"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
}


class FakeCuda:
    """Counts what is registered, and refuses what the driver refuses.

    Attributes:
        limit_bytes: more cannot be registered at once (code 2).
        registered: bytes by address.
        calls: registrations that succeeded, so far.
        copied_bytes: what was copied to the host.
        contexts, streams: how many are open.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.registered: dict[int, int] = {}
        self.calls = self.copied_bytes = self.contexts = self.streams = 0
        self._waiting: list[tuple[int, int, int]] = []

    @property
    def registered_bytes(self) -> int:
        return sum(self.registered.values())

    def cuInit(self, flags: Any) -> int:
        return 0

    def cuDeviceGet(self, device: Any, ordinal: Any) -> int:
        device._obj.value = ordinal.value
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        context._obj.value = 1000 + device.value
        self.contexts += 1
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device: Any) -> int:
        self.contexts -= 1
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        return 0 if context.value >= 1000 else 1

    def cuStreamCreate(self, stream: Any, flags: Any) -> int:
        self.streams += 1
        stream._obj.value = self.streams
        return 0

    def cuStreamDestroy_v2(self, stream: Any) -> int:
        self.streams -= 1
        return 0

    def cuMemHostRegister_v2(self, address: Any, nbytes: Any, flags: Any) -> int:
        start, size = address.value, nbytes.value
        if start % mmap.PAGESIZE or size % mmap.PAGESIZE or flags.value != 1:
            return 1
        if any(start < a + n and a < start + size for a, n in self.registered.items()):
            return 712
        total = self.registered_bytes + size
        if self.limit_bytes is not None and total > self.limit_bytes:
            return 2
        self.registered[start] = size
        self.calls += 1
        return 0

    def cuMemHostUnregister(self, address: Any) -> int:
        return 713 if self.registered.pop(address.value, None) is None else 0

    def cuMemcpyDtoHAsync_v2(
        self, target: Any, source: Any, nbytes: Any, stream: Any
    ) -> int:
        start, stop = target.value, target.value + nbytes.value
        if not any(a <= start and stop <= a + n for a, n in self.registered.items()):
            return 1
        self._waiting.append((start, source.value, nbytes.value))
        return 0

    def cuStreamSynchronize(self, stream: Any) -> int:
        """Copies only now: who does not wait finds other content."""
        waiting, self._waiting = self._waiting, []
        for target, source, nbytes in waiting:
            ctypes.memmove(target, source, nbytes)
            self.copied_bytes += nbytes
        return 0

    def cuGetErrorName(self, code: Any, text: Any) -> int:
        text._obj.value = NAMES[code.value]
        return 0

    def cuGetErrorString(self, code: Any, text: Any) -> int:
        text._obj.value = NAMES[code.value].lower().replace(b"cuda_error_", b"")
        return 0
