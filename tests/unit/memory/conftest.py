"""The three stores, and arrays to put in them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest

from tests.fake_cuda import FakeCuda
from zinf.core.memory import AbstractStore, DeviceStore, HostStore, NvmeStore
from zinf.core.memory.host.pages import cuda
from zinf.core.program import Tier

OpenStore = Callable[..., AbstractStore]


@pytest.fixture(params=list(Tier))
def open_store(request: pytest.FixtureRequest, tmp_nvme: Path) -> Iterator[OpenStore]:
    """Opens an empty store of the tier, with the capacity that it is given."""
    opened: list[AbstractStore] = []

    def open_(capacity_bytes: int | None = None) -> AbstractStore:
        if request.param is Tier.DEVICE:
            store: AbstractStore = DeviceStore(jax.devices()[0], capacity_bytes)
        elif request.param is Tier.HOST:
            store = HostStore(capacity_bytes)
        else:
            store = NvmeStore([tmp_nvme], capacity_bytes)
        opened.append(store)
        return store

    yield open_
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: OpenStore) -> AbstractStore:
    return open_store()


@pytest.fixture
def nvme(tmp_nvme: Path) -> Iterator[NvmeStore]:
    store = NvmeStore([tmp_nvme])
    yield store
    store.close()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A CUDA driver that is simulated."""
    found = FakeCuda()
    monkeypatch.setattr(cuda, "load", lambda: found)
    return found
