"""Section of gpu_check.py: do transfers go on while the device computes?

A chain of matmuls and a list of transfers are sized to take equally long alone. Then
both run at once. Printed is the time of both over that of the longer one: 1 if they
overlap, about 2 if one waits for the other. The chain is one executable, or many, each
of which starts when the one before it is done, as the executor runs segments. The
difference matters: a copy into new device memory waits for all work that XLA had queued
when it allocated that memory.
"""

import threading
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_links import device_kind, host_array, on_device, pinned_kind
from gpu_rows import MIB, Rows, Setting

WIDTH, DRY_WIDTH = 8192, 256
PIECE_BYTES, DRY_PIECE_BYTES = 64 * MIB, 256 * 1024
SECONDS, DRY_SECONDS = 0.2, 0.02
NUM_PIECES = 16
GROUP = 8
ROUNDS = 3

Work = Callable[[], object]


def run(setting: Setting, rows: Rows) -> None:
    device = setting.device()
    width = DRY_WIDTH if setting.is_dry else WIDTH
    seconds = DRY_SECONDS if setting.is_dry else SECONDS
    nbytes = DRY_PIECE_BYTES if setting.is_dry else PIECE_BYTES
    chain = Chain(width, device)
    count = max(NUM_PIECES, int(seconds / chain.seconds_each))
    flops = 2 * width**3 * count
    times = [_seconds(partial(chain.run, count)) for _ in range(ROUNDS)]
    rows.add_rate("matmul", flops / 1e12, times, "TFLOP/s", width=width)

    def compare(path: str, work: Callable[[int], None]) -> None:
        work(1)
        number = max(2, min(100, int(seconds / _seconds(partial(work, 2)) * 2)))
        for pieces, compute in (
            (1, partial(chain.run, count)),
            (NUM_PIECES, partial(chain.run_pieces, count)),
        ):
            of = {"path": path, "executables": pieces, "MB": nbytes * number / 1e6}
            _measure(rows, compute, partial(work, number), of)

    for path, make in PATHS.items():
        rows.attempt(
            "together / longer",
            lambda path=path, make=make: compare(path, make(nbytes, device)),
            path=path,
        )


class Chain:
    """A chain of matrix products of any length."""

    def __init__(self, width: int, device: Any):
        key = jax.random.key(0)
        x = jax.random.normal(key, (width, width), jnp.bfloat16)
        self.x = jax.device_put(x, device)
        scale = width**-0.5

        @jax.jit
        def chain(x: jax.Array, count: jax.Array) -> jax.Array:
            def product(_: int, y: jax.Array) -> jax.Array:
                return (y @ x) * jnp.bfloat16(scale)

            return jax.lax.fori_loop(0, count, product, x)

        self.chain = chain
        self.run(1)
        self.seconds_each = _seconds(partial(self.run, 8)) / 8

    def run(self, count: int) -> None:
        self.chain(self.x, np.int32(count)).block_until_ready()

    def run_pieces(self, count: int) -> None:
        for _ in range(NUM_PIECES):
            self.run(count // NUM_PIECES)


def _measure(rows: Rows, compute: Work, move: Work, of: dict[str, Any]) -> None:
    ratios, serial = [], []
    for _ in range(ROUNDS):
        alone = _seconds(compute), _seconds(move)
        ratios.append(_seconds(partial(_at_once, compute, move)) / max(alone))
        serial.append(sum(alone) / max(alone))
    note = f"one after the other {median(serial):.2f}"
    rows.add_all("together / longer", ratios, "x", note, **of)


def _at_once(compute: Work, move: Work) -> None:
    threads = [threading.Thread(target=work, daemon=True) for work in (compute, move)]
    for thread in threads:
        thread.start()
        # Gives the device work before the first transfer, as within a step.
        time.sleep(0.001)
    for thread in threads:
        thread.join()


def _seconds(work: Work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# Each returns a function that moves `count` pieces and returns when all have arrived.


def put_one_by_one(source: Any, device: Any) -> Callable[[int], None]:
    """Waits for each piece before it starts the next, as the executor does."""

    def work(count: int) -> None:
        for _ in range(count):
            jax.device_put(source, device).block_until_ready()

    return work


def put_together(source: Any, device: Any) -> Callable[[int], None]:
    def work(count: int) -> None:
        for start in range(0, count, GROUP):
            group = [source] * min(GROUP, count - start)
            jax.block_until_ready([jax.device_put(x, device) for x in group])

    return work


def numpy_one_by_one(nbytes: int, device: Any) -> Callable[[int], None]:
    return put_one_by_one(host_array(nbytes), device)


def numpy_together(nbytes: int, device: Any) -> Callable[[int], None]:
    return put_together(host_array(nbytes), device)


def pinned_one_by_one(nbytes: int, device: Any) -> Callable[[int], None]:
    source = jax.device_put(host_array(nbytes), pinned_kind(device))
    return put_one_by_one(source, device_kind(device))


def pinned_together(nbytes: int, device: Any) -> Callable[[int], None]:
    source = jax.device_put(host_array(nbytes), pinned_kind(device))
    return put_together(source, device_kind(device))


def to_pinned(nbytes: int, device: Any) -> Callable[[int], None]:
    # The array is made before the chain begins, so the transfer waits for no work.
    return put_one_by_one(on_device(nbytes, device), pinned_kind(device))


def to_numpy(nbytes: int, device: Any) -> Callable[[int], None]:
    source = on_device(nbytes, device)

    def work(count: int) -> None:
        for _ in range(count):
            # A new array object each time, because a jax array caches its host copy.
            np.asarray(source.addressable_data(0))

    return work


PATHS = {
    "h2d NumPy, one by one": numpy_one_by_one,
    "h2d NumPy, eight at a time": numpy_together,
    "h2d pinned, one by one": pinned_one_by_one,
    "h2d pinned, eight at a time": pinned_together,
    "d2h pinned": to_pinned,
    "d2h np.asarray": to_numpy,
}
