"""What reviews of the NVMe tier found wanting, and what must stay mended."""

import gc
import json
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod
from threading import Event

import numpy as np
import pytest

from zinf.memory import NvmeStore, StorageError, aligned_empty
from zinf.memory.chunk import LARGEST_PADDING, MAX_CHUNK_BYTES, chunk_shape
from zinf.memory.nvme import Drive, File, System
from zinf.memory.nvme.chunk_file import ChunkFile
from zinf.memory.nvme.open_file import DIRECT_FROM_BYTES, Mover
from zinf.memory.nvme.profile import PROFILE, find_profile
from zinf.memory.nvme.root import ARRAYS, MARKER, Root
from zinf.program import ArrayId, ArraySpec, Role

W, V = ArrayId(Role.PARAM, "w"), ArrayId(Role.PARAM, "v")


@pytest.mark.parametrize("coverage", ["off", "full"])
def test_a_read_under_way_sees_the_old_content_to_the_end(tmp_path, coverage):
    nbytes = DIRECT_FROM_BYTES + 1001
    mover = Drive(tmp_path).mover()
    assert mover.is_direct
    chunk = ChunkFile(
        tmp_path / "c.0", start=0, nbytes=nbytes, file_bytes=nbytes, coverage=coverage
    )
    chunk.allocate(mover)
    old, new = (np.full(nbytes, n, np.uint8) for n in (1, 2))
    chunk.write(0, nbytes, old, mover)
    reached, go = Event(), Event()

    def held(*arguments):
        reached.set()
        assert go.wait(10)
        return os.preadv(*arguments)

    slow = Mover(System(preadv=held), 2**20, is_direct=True)
    found = aligned_empty((nbytes,), np.uint8)
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(chunk.read, 0, nbytes, found, slow)
        reached.wait(10)
        chunk.write(0, nbytes, new, mover)
        go.set()
        reading.result(10)
    assert np.unique(found).tolist() == [1]


def test_big_endian_arrays_keep_their_values(tmp_path):
    store = NvmeStore([tmp_path / "n"])
    value = np.arange(4, dtype=">f4")
    try:
        store.write(W, value).result()
        np.testing.assert_array_equal(store.read(W).result(), value)
    except (ValueError, TypeError, StorageError):
        pass  # Refusing is right, too.
    finally:
        store.close()


@pytest.mark.parametrize(
    ("content", "says"),
    [("{", "damaged"), (json.dumps({"format": 99}), "has format 99, of another")],
)
def test_a_marker_that_is_not_ours_is_named(tmp_path, content, says):
    (tmp_path / ARRAYS).mkdir()
    (tmp_path / MARKER).write_text(content)
    with pytest.raises(StorageError) as error:
        Root(tmp_path)
    assert says in error.value.strerror


def test_a_row_of_a_large_chunk_is_not_read_in_the_callers_thread(tmp_path):
    threads = []

    def preadv(fd, memory, offset, *flags):
        threads.append((threading.current_thread().name, memory[0].nbytes, flags))
        return os.preadv(fd, memory, offset, *flags)

    store = NvmeStore([tmp_path / "n"], system=System(preadv=preadv))
    store.write(W, np.ones((4096, 1024), np.float32)).result()
    store.read(replace(W, rows=(1, 2))).result()
    store.close()
    me = threading.current_thread().name
    assert not [t for t in threads if t[0] == me and t[1] >= DIRECT_FROM_BYTES]


def test_an_error_is_raised_by_one_flush_only(tmp_path, monkeypatch):
    settle = File._settle

    def late(self, future):
        time.sleep(0.1)
        settle(self, future)

    monkeypatch.setattr(File, "_settle", late)
    with Drive(tmp_path) as drive:
        file = File(drive, tmp_path / "f")
        file.read_async(np.zeros(1, np.uint8))
        with pytest.raises(StorageError):
            file.flush()
        time.sleep(0.3)
        file.flush()


def test_asking_a_closed_drive_is_an_error_and_flush_does_not_hang(tmp_path):
    with Drive(tmp_path) as drive:
        file = File(drive, tmp_path / "f")
    with pytest.raises((ValueError, RuntimeError)):
        file.write(np.zeros(1, np.uint8))
    flushed = threading.Thread(target=file.flush, daemon=True)
    flushed.start()
    flushed.join(2)
    assert not flushed.is_alive()


def test_a_failed_request_lets_go_of_the_memory(tmp_path):
    with Drive(tmp_path) as drive:
        file = File(drive, tmp_path / "f")
        memory = np.zeros(10, np.uint8).view(type("Weak", (np.ndarray,), {}))
        kept = weakref.ref(memory)
        gc.collect()
        gc.disable()
        try:
            future = file.read_async(memory)
            error = future.exception()
            with pytest.raises(StorageError):
                file.flush()
            del future, memory, error
            time.sleep(0.2)
            assert kept() is None
        finally:
            gc.enable()


def test_an_array_written_after_a_free_is_not_overtaken(tmp_path):
    store = NvmeStore([tmp_path / "n"])
    for _ in range(300):
        first = store.write(W, np.full(300_000, 1, np.uint8))
        store.free(W)
        second = store.write(V, np.full(300_000, 2, np.uint8))
        first.exception(), second.result()
        assert np.unique(store.read(V).result()).tolist() == [2]
        store.free(V)
    store.close()


def test_no_chunk_is_over_the_limit_without_rows_per_chunk():
    spec = ArraySpec((10007, 2_000_000), "float32", 4)
    chunk = chunk_shape(spec)
    assert prod(chunk) * 4 <= MAX_CHUNK_BYTES * (1 + LARGEST_PADDING)


def test_all_files_are_private(tmp_path):
    Root(tmp_path / "n").close()
    assert (tmp_path / "n" / MARKER).stat().st_mode & 0o777 == 0o600


def test_a_profile_of_any_bytes_is_named(tmp_path):
    (tmp_path / PROFILE).write_bytes(b"\xff\xfe{")
    with pytest.raises(ValueError, match="Delete the file"):
        find_profile(tmp_path)
