"""The contenders of bench_io.py: ways to overwrite files, to read them, and to do both.

Each contender has its files. `run(operation)` moves `nbytes` in total and returns
seconds and processor seconds. The operation "mixed" reads `nbytes / 2` from one file
while it overwrites another of that size.
"""

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import tensorstore as ts

from zinf.core.memory import aligned_empty
from zinf.core.memory.nvme import Coverage, NvmeStore
from zinf.core.program import ArrayId, Role

MIB = 2**20
OPERATIONS = ("overwrite", "read", "mixed")
Cost = tuple[float, float]
CACHES = Path("/proc/sys/vm/drop_caches")


@cache
def filled(nbytes: int) -> np.ndarray:
    """Memory on huge pages, filled with random bytes. Cached, so do not change it."""
    memory = aligned_empty((nbytes,), np.uint8)
    memory[:] = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    return memory


def timed(function: Callable[[], object]) -> Cost:
    processor, began = time.process_time(), time.perf_counter()
    function()
    return time.perf_counter() - began, time.process_time() - processor


class Tier:
    """zinf's NVMe store."""

    def __init__(self, folder: Path, nbytes: int, checksums: Coverage) -> None:
        self.name = f"zinf tier, checksums {checksums}"
        self.value = filled(nbytes).view(np.int32)
        self.upper = self.value[self.value.size // 2 :]
        self.store = NvmeStore([folder], checksums=checksums)
        for name, content in (
            ("whole", self.value),
            ("l", self.upper),
            ("u", self.upper),
        ):
            self.store.write(ArrayId(Role.VALUE, name), content).result()
        found = self.store.read(ArrayId(Role.VALUE, "whole")).result()
        assert np.array_equal(found, self.value)

    def run(self, operation: str) -> Cost:
        store, whole = self.store, ArrayId(Role.VALUE, "whole")
        match operation:
            case "overwrite":
                return timed(lambda: store.write(whole, self.value).result())
            case "read":
                return timed(lambda: store.read(whole).result() is None)
        return timed(self._mix)

    def _mix(self) -> None:
        written = self.store.write(ArrayId(Role.VALUE, "u"), self.upper)
        self.store.read(ArrayId(Role.VALUE, "l")).result()
        written.result()

    def close(self) -> None:
        self.store.close()


class TensorStore:
    """TensorStore's zarr3 driver. Its default settings sync; reads drop the caches."""

    name = "TensorStore zarr3"

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.value = filled(nbytes).view(np.int32)
        self.upper = self.value[self.value.size // 2 :]
        self.whole = self._open(folder / "whole", self.value)
        self.lower = self._open(folder / "l", self.upper)
        self.other = self._open(folder / "u", self.upper)

    def run(self, operation: str) -> Cost:
        if operation == "overwrite":
            return timed(lambda: self.whole.write(self.value).result())
        drop_caches()
        if operation == "read":
            return timed(lambda: self.whole.read().result() is None)
        return timed(self._mix)

    def _mix(self) -> None:
        written = self.other.write(self.upper)
        self.lower.read().result()
        written.result()

    def close(self) -> None:
        pass

    @staticmethod
    def _open(path: Path, content: np.ndarray) -> ts.TensorStore:
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": str(path)},
            "metadata": {
                "shape": [content.size],
                "data_type": "int32",
                "chunk_grid": {
                    "name": "regular",
                    "configuration": {"chunk_shape": [min(content.size, 4 * MIB)]},
                },
                "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
            },
        }
        context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
        store = ts.open(spec, create=True, context=context).result()
        store.write(content).result()
        return store


class BareLoop:
    """A minimal loop: requests one after another, on huge pages, with few checks.

    It uses the files of `tier`, because the position of a file on the drive changes its
    speed by up to 10%. Its writes do not change their content.
    """

    def __init__(self, tier: Tier, block: int, threads: int) -> None:
        self.name = f"bare O_DIRECT loop, {block // MIB} MiB x {threads}"
        self.tier, self.block, self.threads = tier, block, threads
        self.into = aligned_empty(tier.value.shape, tier.value.dtype)
        self._move("whole", self.into, write=False)
        assert np.array_equal(self.into, tier.value)

    def run(self, operation: str) -> Cost:
        if operation == "mixed":
            return timed(self._mix)
        is_write = operation == "overwrite"
        memory = self.tier.value if is_write else self.into
        return timed(lambda: self._move("whole", memory, write=is_write))

    def _mix(self) -> None:
        arguments = ("u", self.tier.upper)
        writer = threading.Thread(target=self._move, args=arguments)
        writer.start()
        self._move("l", self.into[: self.tier.upper.size], write=False)
        writer.join()

    def _move(self, name: str, array: np.ndarray, *, write: bool = True) -> None:
        files = self.tier.store.chunk_files(ArrayId(Role.VALUE, name))
        memory = memoryview(array).cast("B")
        size = files[0].stat().st_size
        offsets, lock = iter(range(0, len(memory), self.block)), threading.Lock()
        call = os.pwritev if write else os.preadv

        def work() -> None:
            while True:
                with lock:
                    start = next(offsets, None)
                if start is None:
                    return
                part = memory[start : start + self.block]
                file = os.open(files[start // size], os.O_RDWR | os.O_DIRECT)
                assert call(file, [part], start % size) == len(part)
                os.close(file)

        threads = [threading.Thread(target=work) for _ in range(self.threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def close(self) -> None:
        pass


class Fio:
    """fio, the usual benchmark of drives, without the time of its start and checks."""

    def __init__(self, folder: Path, nbytes: int, engine: str, depth: int) -> None:
        self.name = f"fio {engine}, 8 MiB x {depth}"
        folder.mkdir()
        self.options = {
            "name": "bench",
            "filename": folder / "file",
            "size": nbytes,
            "bs": "8M",
            "iodepth": depth,
            "ioengine": engine,
            "direct": 1,
            "output-format": "json",
        }
        self.run("overwrite")

    def run(self, operation: str) -> Cost:
        rw = {"overwrite": "write", "read": "read", "mixed": "rw"}[operation]
        options = self.options | {"rw": rw}
        command = ["fio", *(f"--{key}={value}" for key, value in options.items())]
        found = subprocess.run(command, capture_output=True, check=True, text=True)
        job = json.loads(found.stdout)["jobs"][0]
        seconds = max(job[way]["runtime"] for way in ("read", "write")) / 1000
        processor = (job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds
        rate = sum(job[way]["bw_bytes"] for way in ("read", "write"))
        return self.options["size"] / rate, processor

    def close(self) -> None:
        pass


DEEPNVME = """
import os, sys, time
os.environ.setdefault("DS_ACCELERATOR", "cpu")
import torch
from deepspeed.ops.op_builder import AsyncIOBuilder
handle = AsyncIOBuilder().load(verbose=False).aio_handle(
    block_size=int(sys.argv[3]), queue_depth=int(sys.argv[4]), single_submit=False,
    overlap_events=True, intra_op_parallelism=int(sys.argv[5]))
path, nbytes = sys.argv[1], int(sys.argv[2])
def locked(n):
    x = handle.new_cpu_locked_tensor(n, torch.empty(0, dtype=torch.uint8))
    x.random_(0, 255)
    return x
whole, lower, upper = locked(nbytes), locked(nbytes // 2), locked(nbytes // 2)
def act(operation):
    if operation == "overwrite":
        handle.async_pwrite(whole, path + ".w", 0)
    elif operation == "read":
        handle.async_pread(whole, path + ".w", 0)
    else:
        handle.async_pwrite(upper, path + ".u", 0)
        handle.async_pread(lower, path + ".l", 0)
    handle.wait()
for x, name in ((whole, ".w"), (lower, ".l"), (upper, ".u")):
    handle.async_pwrite(x, path + name, 0)
    handle.wait()
print("ready", flush=True)
for line in sys.stdin:
    before, began = time.process_time(), time.perf_counter()
    act(line.strip())
    print(time.perf_counter() - began, time.process_time() - before, flush=True)
"""


class DeepNVMe:
    """DeepSpeed's DeepNVMe with pinned memory, in an interpreter that has DeepSpeed."""

    def __init__(
        self, folder: Path, nbytes: int, python: Path, block: int, threads: int
    ) -> None:
        self.name = f"DeepNVMe, {block // MIB} MiB x 32, {threads} threads"
        folder.mkdir()
        arguments = [folder / "file", nbytes, block, 32, threads]
        self.process = subprocess.Popen(
            [str(python), "-c", DEEPNVME, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        while line := self.process.stdout.readline():
            if line.strip() == "ready":
                return
        last_lines = self.process.stderr.read().splitlines()[-3:]
        raise RuntimeError("DeepNVMe does not start: " + " ".join(last_lines))

    def run(self, operation: str) -> Cost:
        self.process.stdin.write(f"{operation}\n")
        self.process.stdin.flush()
        seconds, processor = self.process.stdout.readline().split()
        return float(seconds), float(processor)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def drop_caches() -> None:
    """Drop the page cache, if this user may, so that reads come from the drive."""
    os.sync()
    if os.access(CACHES, os.W_OK):
        CACHES.write_text("3")


def has_fio() -> bool:
    return shutil.which("fio") is not None
