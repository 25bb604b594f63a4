"""Where the host tier gets memory from: pageable, pinned, or registered with CUDA."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zinf.core.memory import HostStore, open_stores
from zinf.core.memory.host.aligned import address
from zinf.core.memory.host.pages import (
    PAGEABLE,
    PINNED,
    PinnedArrays,
    RegisteredPages,
    arrays,
    choose,
    open_pages,
)
from zinf.core.memory.host.pages.abstract import PINNED_FROM_BYTES
from zinf.core.program import ArrayId, Role, Tier

LARGE = (PINNED_FROM_BYTES // 4,)
NAME, OTHER = ArrayId(Role.PARAM, "w"), ArrayId(Role.PARAM, "v")
NEEDED = 2**22


@pytest.fixture(params=[PinnedArrays, RegisteredPages], ids=lambda kind: kind.name)
def pages(request, driver):
    made = request.param(jax.devices()[:1], NEEDED)
    yield made
    made.close()


def filled(pages, value, shape=LARGE, dtype=np.float32):
    content = pages.empty(shape, dtype)
    content[...] = value
    return content


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint16"])
def test_arrays_cross_both_ways_in_the_memory_that_numpy_uses(pages, driver, dtype):
    content = filled(pages, 3, (2, PINNED_FROM_BYTES), jnp.dtype(dtype))
    content[1] = 5
    before = driver.copied_bytes
    (moved,) = pages.to_device([content], jax.devices()[0])
    assert moved.sharding.memory_kind == "device"
    assert moved.dtype == dtype and moved.shape == content.shape
    np.testing.assert_array_equal(moved, content)
    content[...] = 4  # a later write is not seen
    assert np.all(np.asarray(moved)[0] == 3)
    (back,) = pages.to_host(moved)
    np.testing.assert_array_equal(back, moved)
    back += 1  # the caller owns it
    assert np.all(np.asarray(moved)[0] == 3)
    assert (pages.pinned_bytes, pages.pageable_bytes) == (2 * content.nbytes, 0)
    assert pages.has_made(back, back.base)
    if isinstance(pages, PinnedArrays):
        assert arrays._array_of(back).sharding.memory_kind == PINNED
    else:
        assert driver.copied_bytes - before == content.nbytes


def test_what_is_not_pinned_crosses_as_pageable_memory_and_is_counted(pages):
    content = filled(pages, 1, (4, *LARGE))
    values = [content.T, np.ones(3, np.float32), np.full(LARGE, 2, np.float32)]
    values += [pages.empty((LARGE[0] - 1,), np.float32), np.ones((), np.float32)]
    values[3][...] = 0
    if isinstance(pages, PinnedArrays):
        values.append(content[1:3])  # Rows are no jax arrays.
    for value, moved in zip(
        values, pages.to_device(values, jax.devices()[0]), strict=True
    ):
        np.testing.assert_array_equal(moved, value)
    assert pages.pinned_bytes == 0
    assert pages.pageable_bytes == sum(value.nbytes for value in values)
    (small,) = pages.to_host(jnp.ones(3))
    assert pages.has_made(small, small.base)


def test_the_host_tier_keeps_pinned_memory_and_copies_all_other_into_it(pages):
    store = HostStore(None, pages)
    content = filled(pages, 1)
    store.write(NAME, content).result()
    assert address(store.memory(NAME)) == address(content)
    elsewhere = np.full(LARGE, 2, np.float32)
    store.write(NAME, elsewhere).result()  # into the memory that it has
    assert address(store.memory(NAME)) == address(content)
    store.write(OTHER, elsewhere).result()
    kept = store.memory(OTHER)
    assert pages.has_made(kept, kept.base)
    np.testing.assert_array_equal(store.read(OTHER).result(), elsewhere)
    store.close()


def test_a_drive_and_the_host_update_use_the_memory_that_devices_fetch_from(
    pages, tmp_path
):
    stores = open_stores(jax.devices()[0], nvme_paths=[tmp_path / "nvme"], pages=pages)
    stores[Tier.NVME].write(NAME, np.full(LARGE, 5, np.float32)).result()
    content = stores[Tier.NVME].read(NAME).result()
    stores.host.write(NAME, content).result()

    def add_one(memory):
        assert address(memory) == address(content)
        memory += 1

    stores.host.update([NAME], add_one)
    (moved,) = pages.to_device([stores.host.read(NAME).result()], jax.devices()[0])
    assert np.all(np.asarray(moved) == 6) and pages.pageable_bytes == 0
    stores.close()


def test_memory_is_reused_for_the_same_shape_and_dtype_within_the_budget():
    pages, nbytes = PinnedArrays(jax.devices()[:1]), 4 * LARGE[0]
    store = HostStore(2 * nbytes, pages)
    content = filled(pages, 1)
    first = address(content)
    del content
    assert pages.idle_bytes == nbytes
    content = filled(pages, 1)
    assert address(content) == first and pages.idle_bytes == 0
    store.write(NAME, content).result()
    assert address(store.memory(NAME)) == first
    other = pages.empty(LARGE, np.int32)
    assert address(other) != first
    del content, other
    assert pages.idle_bytes == nbytes  # beside the array of the tier
    another = pages.empty(LARGE, np.uint32)
    assert pages.idle_bytes == 0  # made room for it
    store.free(NAME)
    del another
    assert pages.idle_bytes <= 2 * nbytes
    store.close()
    assert pages.idle_bytes == 0


def test_devices_that_cannot_have_such_arrays_are_refused(monkeypatch):
    with pytest.raises(NotImplementedError, match="this process has 2. Start a proc"):
        PinnedArrays(jax.devices()[:2])
    bare = SimpleNamespace(addressable_memories=list, platform="odd")
    with pytest.raises(NotImplementedError, match=r"pinned: arrays.*no memories.*off"):
        PinnedArrays([bare])
    # As on a TPU, whose arrays are tiled also in host memory.
    monkeypatch.setattr(arrays, "_address", lambda array: 64)
    with pytest.raises(NotImplementedError, match="memory of another layout"):
        PinnedArrays(jax.devices()[:1])


# What auto takes.


def alone(name, value):
    return [value]


def test_memory_is_pageable_by_default_where_devices_compute_in_host_memory():
    assert open_pages("auto", jax.devices(), 0, alone) is PAGEABLE
    assert open_pages("off", jax.devices(), 0, alone) is PAGEABLE
    assert isinstance(open_pages("arrays", jax.devices()[:1], 0, alone), PinnedArrays)


def test_every_kind_is_measured_or_says_why_not(monkeypatch):
    monkeypatch.setattr(choose, "MEASURED_BYTES", 2**20)
    found = choose.measure(jax.devices()[:1])
    assert list(found) == list(choose.KINDS)
    assert min(found["off"]) > 0 and min(found["arrays"]) > 0
    assert "needs the CUDA driver, and jax runs on cpu" in found["registered"]
    two = choose.measure(jax.devices()[:2])
    assert "one device in each process" in two["arrays"]


def measured(arrays):
    return {"off": (10.0, 10.0), "arrays": arrays}


GOOD = measured((50.0, 40.0))


@pytest.mark.parametrize(
    ("found", "best", "words"),
    [
        ([GOOD], "arrays", "off moves 10.0 GB/s to the device and 10.0 back; arrays"),
        # A gain of less than a tenth is not worth memory that stays allocated.
        ([measured((11.0, 11.0))], "off", "11.0 GB/s to"),
        ([measured((11.2, 11.2))], "arrays", "11.2 GB/s to"),
        # One slow or refusing process decides for all.
        ([GOOD, measured((4.0, 60.0))], "off", "4.0 GB/s to the device and 40.0 back"),
        ([GOOD, measured("small pool")], "off", "arrays is refused (small pool)"),
    ],
)
def test_all_processes_use_the_kind_that_the_slowest_moves_fastest(found, best, words):
    kind, why = choose.fastest(found)
    assert kind == best and words in why


@pytest.fixture
def rates(driver, monkeypatch):
    """By kind, GB/s there and back in place of a measurement; a GPU is simulated."""
    found = {"off": (9.0, 9.0), "arrays": (40.0, 40.0), "registered": (50.0, 50.0)}

    def take_rates(pages, device):
        filled(pages, 1)
        return found[pages.name]

    monkeypatch.setattr(choose, "_rates", take_rates)
    monkeypatch.setattr(choose, "FOUND", {})
    monkeypatch.setattr(choose, "computes_in_host_memory", lambda devices: False)
    return found


def test_auto_takes_what_was_fastest_when_it_was_measured_and_logs_it(
    driver, rates, caplog
):
    with caplog.at_level("INFO"):
        pages = open_pages("auto", jax.devices()[:1], NEEDED, alone)
    assert isinstance(pages, RegisteredPages)
    # It was measured in memory of its own, which is not registered any more.
    assert driver.registered_bytes == NEEDED
    assert "memory.pinned is registered: off moves 9.0 GB/s" in caplog.text
    pages.close()
    rates["arrays"] = (90.0, 90.0)  # Nothing is measured again.
    pages = open_pages("auto", jax.devices()[:1], NEEDED, alone)
    assert isinstance(pages, RegisteredPages)
    pages.close()


def test_auto_falls_back_to_the_next_kind_with_the_reason_if_cuda_refuses(
    driver, rates, caplog
):
    driver.limit_bytes = choose.MEASURED_BYTES
    with caplog.at_level("INFO"):
        pages = open_pages("auto", jax.devices()[:1], 2 * choose.MEASURED_BYTES, alone)
    assert pages.name == "arrays" and driver.registered_bytes == 0
    assert "registered is refused (memory.pinned: registered asked CUDA" in caplog.text
    assert "CUDA_ERROR_OUT_OF_MEMORY" in caplog.text
    rates["arrays"] = rates["registered"] = (9.0, 9.0)
    choose.FOUND.clear()
    assert open_pages("auto", jax.devices()[:1], NEEDED, alone) is PAGEABLE


def test_all_processes_go_on_with_another_kind_if_one_is_refused(driver, rates):
    def gather(name, value):
        """Of two processes; the other cannot pin so much."""
        if name == "pinned":
            return [value, value]
        return [value, "no memory there" if driver.registered_bytes else None]

    pages = open_pages("auto", jax.devices()[:1], NEEDED, gather)
    assert pages.name == "arrays" and driver.registered_bytes == 0
