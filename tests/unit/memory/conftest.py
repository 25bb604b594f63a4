"""The three stores, and arrays to put in them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from zinf.memory import AbstractStore, DeviceStore, HostStore, NvmeStore
from zinf.program import Tier

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


@pytest.fixture(
    params=[
        np.float32,
        np.float16,
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e4m3fn,
        np.int32,
        np.uint8,
        np.bool_,
        np.complex64,
    ],
    ids=lambda dtype: np.dtype(dtype).name,
)
def dtype(request: pytest.FixtureRequest) -> np.dtype:
    return np.dtype(request.param)
