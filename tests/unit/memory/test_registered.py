"""Memory that is registered with a GPU once, with a CUDA driver that is simulated."""

import ctypes
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.unit.memory.test_pages import LARGE, NAME, alone, filled
from zinf.core.memory import HostStore, StorageError, open_stores
from zinf.core.memory.host.aligned import address
from zinf.core.memory.host.pages import (
    RegisteredPages,
    arena,
    cuda,
    open_pages,
    registered,
)
from zinf.core.memory.host.pages.abstract import PINNED_FROM_BYTES
from zinf.core.memory.host.region import HUGE_PAGE_BYTES

NEEDED = 2 * HUGE_PAGE_BYTES


def test_memory_for_all_arrays_is_registered_once_and_unregistered_at_close(driver):
    pages = RegisteredPages(jax.devices()[:1], NEEDED)
    assert (driver.calls, driver.registered_bytes) == (1, NEEDED)
    found = [filled(pages, n) for n in range(NEEDED // PINNED_FROM_BYTES)]
    (start,) = driver.registered
    assert all(start <= address(x) < start + NEEDED for x in found)
    assert len({address(x) for x in found}) == len(found)
    assert (driver.calls, driver.registered_bytes) == (1, NEEDED)
    pages.close()
    assert (driver.registered_bytes, driver.contexts, driver.streams) == (0, 0, 0)
    # Who still has an array keeps its memory, which is pinned no more.
    assert all(np.all(x == n) for n, x in enumerate(found))


def test_large_amounts_are_registered_in_pieces_and_no_array_crosses_their_ends(
    driver, monkeypatch
):
    monkeypatch.setattr(arena, "PIECE_BYTES", HUGE_PAGE_BYTES)
    pages = RegisteredPages(jax.devices()[:1], 3 * HUGE_PAGE_BYTES)
    assert list(driver.registered.values()) == [HUGE_PAGE_BYTES] * 3
    shape = (HUGE_PAGE_BYTES // 2 // 4 + 1,)
    sources = [jnp.full(shape, n) for n in range(3)]
    # The driver refuses copies that are not within one registration.
    for n, found in enumerate(pages.to_host(*sources)):
        assert np.all(found == n)
    pages.close()


def test_one_memory_serves_several_devices_and_rows_and_read_only_views(driver):
    devices = jax.devices()[:3]
    pages = RegisteredPages(devices, NEEDED)
    content = filled(pages, 1, (4, *LARGE))
    content[1:3] = 7
    view = content[1:3].view()
    view.flags.writeable = False
    moved = pages.to_device([content[0], view, content[3]], devices)
    assert [next(iter(x.devices())) for x in moved] == devices
    for found, expected in zip(pages.to_host(*moved), (1, 7, 1), strict=True):
        assert np.all(found == expected)
    assert pages.pageable_bytes == 0 and driver.calls == 1
    pages.close()
    assert driver.contexts == 0


def test_memory_is_reused_and_grows_only_within_the_budget(driver, caplog):
    pages = RegisteredPages(jax.devices()[:1], HUGE_PAGE_BYTES)
    store = HostStore(2 * HUGE_PAGE_BYTES, pages)
    half, whole = (HUGE_PAGE_BYTES // 8,), (HUGE_PAGE_BYTES // 4,)
    content = filled(pages, 1, half)
    first = address(content)
    del content
    content = filled(pages, 2, half)
    assert address(content) == first
    store.write(NAME, content).result()
    assert address(store.memory(NAME)) == first
    more = filled(pages, 3, whole)  # No hole has room, but the budget has.
    assert driver.registered_bytes == 2 * HUGE_PAGE_BYTES and driver.calls == 2
    assert not caplog.records
    other = filled(pages, 4, whole)
    (moved,) = pages.to_device([other], jax.devices()[0])
    assert np.all(np.asarray(moved) == 4) and pages.pageable_bytes == other.nbytes
    assert driver.registered_bytes == 2 * HUGE_PAGE_BYTES
    filled(pages, 5, whole)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"no room in one piece for an array of {other.nbytes:,}" in caplog.text
    del more
    store.close()
    assert driver.registered_bytes == 0


def test_an_array_that_cuda_refuses_to_grow_for_is_pageable_and_said_so(driver, caplog):
    pages = RegisteredPages(jax.devices()[:1], NEEDED)
    driver.limit_bytes = NEEDED
    content = filled(pages, 1, (NEEDED // 4 + 1,))
    assert not pages.has_made(content, content.base)
    assert "CUDA_ERROR_OUT_OF_MEMORY" in caplog.text
    assert driver.registered_bytes == NEEDED
    pages.close()


# Failures.


@pytest.mark.parametrize(
    ("limit", "words"), [("65536", "65,536 bytes"), ("unlimited", "any number of")]
)
def test_a_refusal_names_cudas_error_the_bytes_and_what_to_set(
    driver, monkeypatch, tmp_path, limit, words
):
    limits = tmp_path / "limits"
    limits.write_text(f"Max locked memory         {limit}              {limit}  bytes")
    monkeypatch.setattr(registered, "LIMITS", limits)
    monkeypatch.setattr(arena, "PIECE_BYTES", HUGE_PAGE_BYTES)
    driver.limit_bytes = HUGE_PAGE_BYTES
    with pytest.raises(
        ValueError,
        match=rf"pin {NEEDED:,} bytes of host memory, and cuMemHostRegister_v2 "
        r"returned 2, CUDA_ERROR_OUT_OF_MEMORY \(out_of_memory\). This process may "
        rf"lock {words}.*\(ulimit -l\).*lower memory.host, or use memory.pinned: "
        "arrays or off",
    ):
        open_pages("registered", jax.devices()[:1], NEEDED, alone)
    # The piece that was registered before is not any more.
    assert driver.calls == 1
    assert (driver.registered_bytes, driver.contexts, driver.streams) == (0, 0, 0)


def test_a_machine_that_cannot_have_such_memory_is_refused(driver, monkeypatch):
    def fail(memory):
        raise TypeError("unsupported device type")

    def expect_refused(words):
        with pytest.raises(NotImplementedError, match=words):
            RegisteredPages(jax.devices()[:1], NEEDED)
        assert driver.registered_bytes == 0

    with monkeypatch.context() as patched:
        patched.setattr(jax.dlpack, "from_dlpack", fail)
        expect_refused("by DLPack.*unsupported device")
    with monkeypatch.context() as patched:
        patched.setattr(driver, "cuStreamSynchronize", lambda stream: 0)
        expect_refused("came back changed")
    monkeypatch.setattr(cuda, "load", lambda: ctypes.CDLL("no-such-library.so"))
    expect_refused("CUDA driver, and jax runs on cpu")


def test_nothing_stays_registered_if_stores_cannot_be_opened_or_are_dropped(
    driver, tmp_path
):
    pages = RegisteredPages(jax.devices()[:1], NEEDED)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        open_stores(jax.devices()[0], nvme_paths=[tmp_path / "file"], pages=pages)
    assert driver.registered_bytes == 0
    pages = RegisteredPages(jax.devices()[:1], NEEDED)
    assert driver.registered_bytes == NEEDED
    del pages
    gc.collect()
    assert driver.registered_bytes == 0
