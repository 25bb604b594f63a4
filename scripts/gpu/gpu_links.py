"""Section of gpu_check.py: bandwidth between host and device, by path.

A transfer is timed until its bytes have arrived. The path "zinf" is what zinf does now;
the others are alternatives. Here pinned arrays belong to jax and are reused;
gpu_registered.py pins NumPy memory.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_rows import GIB, MIB, Rows, Setting, imported, timed
from jax.sharding import SingleDeviceSharding

SIZES = (MIB, 16 * MIB, 128 * MIB, GIB)
DRY_SIZES = (64 * 1024, MIB)
PATH_SECONDS = 0.15


@dataclass(frozen=True)
class Path:
    """One way to transfer an array. `prepare` makes the argument of each `call`."""

    call: Callable[[Any], object]
    prepare: Callable[[], Any]

    def times(self, seconds: float) -> list[float]:
        return timed(self.call, self.prepare, seconds=seconds)


# Makes the path for an array of this many bytes and a device.
Make = Callable[[int, Any], Path]


def run(setting: Setting, rows: Rows) -> None:
    device = setting.device()
    seconds = 0.01 if setting.is_dry else PATH_SECONDS
    sizes = DRY_SIZES if setting.is_dry else SIZES

    def one(direction: str, name: str, make: Make, nbytes: int) -> None:
        times = make(nbytes, device).times(seconds)
        of = {"path": name, "MiB": nbytes / MIB}
        rows.add_rate(direction, nbytes / 1e9, times, "GB/s", **of)

    def both(there: str, back: str, nbytes: int) -> None:
        paths = TO_DEVICE[there](nbytes, device), TO_HOST[back](nbytes, device)
        rate = 2 * nbytes / seconds_of_both(*paths, seconds) / 1e9
        of = {"path": f"{there} / {back}", "MiB": nbytes / MIB}
        rows.add("both at once", rate, "GB/s", "sum of the two directions", **of)

    def measure(direction: str, paths: Mapping[str, Make]) -> None:
        for (name, make), nbytes in product(paths.items(), sizes):
            work = partial(one, direction, name, make, nbytes)
            rows.attempt(direction, work, path=name, MiB=nbytes / MIB)

    measure("h2d", TO_DEVICE)
    measure("d2h", TO_HOST)
    for there, back in (("NumPy", "np.asarray"), ("pinned", "pinned"), ("zinf",) * 2):
        work = partial(both, there, back, sizes[-2])
        rows.attempt("both at once", work, path=f"{there} / {back}")
    # Last, because memory kinds inside jit have crashed the process before.
    measure("h2d", TO_DEVICE_JITTED)
    measure("d2h", TO_HOST_JITTED)


def seconds_of_both(there: Path, back: Path, seconds: float) -> float:
    """Seconds per pair of transfers when two threads run both directions at once."""
    alone = min(there.times(0) + back.times(0))
    count = max(3, min(50, int(seconds / alone)))
    given = [[path.prepare() for _ in range(count)] for path in (there, back)]
    start = threading.Barrier(3)

    def work(path: Path, arguments: list[Any]) -> None:
        start.wait()
        for argument in arguments:
            path.call(argument)

    threads = [
        threading.Thread(target=work, args=pair, daemon=True)
        for pair in zip((there, back), given, strict=True)
    ]
    for thread in threads:
        thread.start()
    start.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    return (time.perf_counter() - began) / count


def host_array(nbytes: int) -> np.ndarray:
    """A page-aligned array of ones, so that all its pages are in memory."""
    memory = np.ones(nbytes + 4096, np.uint8)
    offset = -memory.ctypes.data % 4096
    return memory[offset : offset + nbytes].view(np.float32)


def pinned_kind(device: Any) -> Any:
    return SingleDeviceSharding(device, memory_kind="pinned_host")


def device_kind(device: Any) -> Any:
    return SingleDeviceSharding(device, memory_kind="device")


def on_device(nbytes: int, device: Any) -> jax.Array:
    return jax.device_put(jnp.ones(nbytes // 4, jnp.float32), device)


# To the device.


def numpy_put(nbytes: int, device: Any) -> Path:
    source = host_array(nbytes)
    return put_path(lambda: source, device)


def fresh_put(nbytes: int, device: Any) -> Path:
    """From memory that was not transferred before, as after a read from a drive."""
    return put_path(lambda: host_array(nbytes), device)


def pinned_put(nbytes: int, device: Any) -> Path:
    source = jax.device_put(host_array(nbytes), pinned_kind(device))
    return put_path(lambda: source, device)


def pinned_jit(nbytes: int, device: Any) -> Path:
    source = jax.device_put(host_array(nbytes), pinned_kind(device))
    place = device_kind(device)
    move = jax.jit(lambda x: jax.device_put(x, place), out_shardings=place)
    return Path(lambda x: move(x).block_until_ready(), lambda: source)


def staged_put(nbytes: int, device: Any) -> Path:
    """From NumPy memory to pinned memory by a copy on the host, then to the device."""
    source, pinned, place = host_array(nbytes), pinned_kind(device), device_kind(device)

    def move(x: np.ndarray) -> None:
        jax.device_put(jax.device_put(x, pinned), place).block_until_ready()

    return Path(move, lambda: source)


def zinf_put(nbytes: int, device: Any) -> Path:
    memory, program = imported("zinf.core.memory"), imported("zinf.core.program")
    store, array = memory.DeviceStore(device), program.ArrayId(program.Role.PARAM, "x")
    source = memory.aligned_empty((nbytes // 4,), np.float32)
    source[:] = 1

    def free() -> np.ndarray:
        if store.contains(array):
            store.free(array)
        return source

    return Path(lambda x: store.write(array, x).result(), free)


def put_path(prepare: Callable[[], Any], device: Any) -> Path:
    place = device_kind(device)
    return Path(lambda x: jax.device_put(x, place).block_until_ready(), prepare)


# To the host. A jax array caches its host copy, so each call reads a new array.


def made(nbytes: int, device: Any) -> Callable[[], jax.Array]:
    source = on_device(nbytes, device)
    return lambda: (source + 1).block_until_ready()


def numpy_get(nbytes: int, device: Any) -> Path:
    return Path(np.asarray, made(nbytes, device))


def begun_get(nbytes: int, device: Any) -> Path:
    def move(x: jax.Array) -> None:
        x.copy_to_host_async()
        np.asarray(x)

    return Path(move, made(nbytes, device))


def pinned_get(nbytes: int, device: Any) -> Path:
    kind = pinned_kind(device)
    prepare = made(nbytes, device)
    return Path(lambda x: jax.device_put(x, kind).block_until_ready(), prepare)


def pinned_numpy_get(nbytes: int, device: Any) -> Path:
    """To pinned memory, then by a copy into NumPy memory that exists already."""
    kind, target = pinned_kind(device), host_array(nbytes)

    def move(x: jax.Array) -> None:
        np.copyto(target, np.asarray(jax.device_put(x, kind)))

    return Path(move, made(nbytes, device))


def donated_get(nbytes: int, device: Any) -> Path:
    """Into the memory of a donated pinned array."""
    kind = pinned_kind(device)
    last = [jax.device_put(host_array(nbytes), kind)]
    move = jax.jit(
        lambda old, x: jax.device_put(x, kind),
        donate_argnums=0,
        keep_unused=True,
        out_shardings=kind,
    )

    def call(x: jax.Array) -> None:
        last[0] = move(last[0], x).block_until_ready()

    return Path(call, made(nbytes, device))


def zinf_get(nbytes: int, device: Any) -> Path:
    return Path(imported("zinf.core.memory").to_host, made(nbytes, device))


TO_DEVICE = {
    "NumPy": numpy_put,
    "NumPy, new memory": fresh_put,
    "zinf": zinf_put,
    "pinned": pinned_put,
    "NumPy to pinned to device": staged_put,
}
TO_HOST = {
    "np.asarray": numpy_get,
    "copy_to_host_async": begun_get,
    "zinf": zinf_get,
    "pinned": pinned_get,
    "pinned to NumPy": pinned_numpy_get,
}
TO_DEVICE_JITTED = {"pinned, jit": pinned_jit}
TO_HOST_JITTED = {"pinned, donated": donated_get}
