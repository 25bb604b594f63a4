"""Where the host tier gets memory from: pageable or pinned."""

from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zinf.memory import HostStore, open_stores
from zinf.memory.aligned import address
from zinf.memory.pages import PAGEABLE, PINNED, PinnedArrays, arrays, choose, open_pages
from zinf.memory.pages.abstract import PINNED_FROM_BYTES
from zinf.program import ArrayId, Role, Tier

LARGE = (PINNED_FROM_BYTES // 4,)
NAME = ArrayId(Role.PARAM, "w")


def pinned():
    return PinnedArrays(jax.devices()[:1])


def filled(pages, value, shape=LARGE, dtype=np.float32):
    content = pages.empty(shape, dtype)
    content[...] = value
    return content


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_fetch_is_of_the_pinned_array_and_sees_what_numpy_wrote_in_place(dtype):
    pages = pinned()
    content = filled(pages, 3, (2, PINNED_FROM_BYTES), jnp.dtype(dtype))
    moved = pages.to_device([content], jax.devices()[0])[0]
    assert moved.sharding.memory_kind == "device" and moved.dtype == dtype
    assert (pages.pinned_bytes, pages.pageable_bytes) == (content.nbytes, 0)
    np.testing.assert_array_equal(moved, content)
    content[...] = 4  # a later write is not seen
    assert np.all(np.asarray(moved) == 3)


def test_an_offload_lands_in_pinned_memory_of_its_own_that_can_be_written():
    pages = pinned()
    source = jnp.arange(LARGE[0], dtype=jnp.float32) + 1
    (content,) = pages.to_host(source)
    assert arrays._array_of(content).sharding.memory_kind == PINNED
    content += 1
    np.testing.assert_array_equal(content, np.arange(LARGE[0]) + 2)
    np.testing.assert_array_equal(source, np.arange(LARGE[0]) + 1)
    assert (pages.pinned_bytes, pages.pageable_bytes) == (content.nbytes, 0)


def test_small_arrays_and_rows_cross_as_pageable_memory_and_are_counted():
    pages = pinned()
    content = filled(pages, 1, (4, *LARGE))
    values = [content[1:3], np.ones(3, np.float32), np.ones((), np.float32)]
    for value, moved in zip(
        values, pages.to_device(values, jax.devices()[0]), strict=True
    ):
        np.testing.assert_array_equal(moved, value)
    assert pages.pinned_bytes == 0
    assert pages.pageable_bytes == sum(value.nbytes for value in values)
    (small,) = pages.to_host(jnp.ones(3))
    assert pages.has_made(small, small.base)


def test_memory_is_reused_for_the_same_shape_and_dtype_within_the_budget():
    pages = pinned()
    nbytes = 4 * LARGE[0]
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


def test_the_host_tier_keeps_pinned_memory_and_copies_all_other_into_it():
    pages = pinned()
    store = HostStore(None, pages)
    content = filled(pages, 1)
    store.write(NAME, content).result()
    assert address(store.memory(NAME)) == address(content)
    elsewhere = np.full(LARGE, 2, np.float32)
    store.write(NAME, elsewhere).result()  # into the memory that it has
    assert address(store.memory(NAME)) == address(content)
    other = ArrayId(Role.PARAM, "v")
    store.write(other, elsewhere).result()
    assert arrays._array_of(store.memory(other)) is not None
    assert arrays._array_of(store.read(other).result()) is not None
    np.testing.assert_array_equal(store.read(other).result(), elsewhere)
    store.close()


def test_a_drive_reads_into_the_memory_that_devices_fetch_from(tmp_path):
    pages = pinned()
    stores = open_stores(jax.devices()[0], nvme_paths=[tmp_path / "nvme"], pages=pages)
    stores[Tier.NVME].write(NAME, np.full(LARGE, 5, np.float32)).result()
    content = stores[Tier.NVME].read(NAME).result()
    stores.host.write(NAME, content).result()
    assert address(stores.host.memory(NAME)) == address(content)
    (moved,) = pages.to_device([stores.host.read(NAME).result()], jax.devices()[0])
    assert np.all(np.asarray(moved) == 5) and pages.pageable_bytes == 0
    stores.close()


def test_several_devices_in_a_process_and_devices_without_the_kind_are_refused():
    with pytest.raises(NotImplementedError, match="this process has 2. Start a proc"):
        PinnedArrays(jax.devices()[:2])
    bare = SimpleNamespace(addressable_memories=list, platform="odd")
    with pytest.raises(NotImplementedError, match=r"pinned: arrays.*no memories.*off"):
        PinnedArrays([bare])


def test_memory_of_another_layout_is_refused(monkeypatch):
    """As on a TPU, whose arrays are tiled also in host memory."""
    monkeypatch.setattr(arrays, "_address", lambda array: 64)
    with pytest.raises(NotImplementedError, match="memory of another layout"):
        pinned()


# What is chosen.


class Gpu(NamedTuple):
    platform: str


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


def test_an_accelerator_is_measured_once_and_the_choice_is_logged(monkeypatch, caplog):
    gpu = Gpu("gpu")
    calls = []

    def measured(devices):
        calls.append(devices)
        return {"off": (10.0, 10.0), "arrays": (50.0, 40.0)}

    monkeypatch.setattr(choose, "measure", measured)
    monkeypatch.setattr(choose, "FOUND", {})
    monkeypatch.setitem(choose.KINDS, "arrays", lambda devices, needed_bytes: "pinned")
    with caplog.at_level("INFO"):
        for _ in range(2):
            assert open_pages("auto", [gpu], 7, alone) == "pinned"
    assert calls == [[gpu]]
    assert "memory.pinned is arrays: off moves 10.0 GB/s" in caplog.text


@pytest.mark.parametrize(
    ("found", "best", "words"),
    [
        ([{"off": [9.0, 9.0], "arrays": [50.0, 40.0]}], "arrays", "50.0 GB/s to"),
        # A gain of less than a tenth is not worth memory that stays allocated.
        ([{"off": [9.0, 9.0], "arrays": [9.5, 9.5]}], "off", "9.5 GB/s to"),
        # One slow or refusing process decides for all.
        (
            [
                {"off": [9.0, 9.0], "arrays": [50.0, 40.0]},
                {"off": [9.0, 9.0], "arrays": [4.0, 40.0]},
            ],
            "off",
            "4.0 GB/s to the device and 40.0 back",
        ),
        (
            [
                {"off": [9.0, 9.0], "arrays": [50.0, 40.0]},
                {"off": [9.0, 9.0], "arrays": "the pool is small"},
            ],
            "off",
            "arrays is refused (the pool is small)",
        ),
    ],
)
def test_all_processes_use_the_kind_that_the_slowest_moves_fastest(found, best, words):
    kind, why = choose.fastest(found)
    assert kind == best and words in why
