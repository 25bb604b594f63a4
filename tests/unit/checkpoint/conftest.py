"""Persistent arrays on real stores."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.unit.checkpoint.cases import ARRAYS, homes_on, layouts_of
from zinf.core.memory import Stores, open_stores
from zinf.core.memory.residents import Residents
from zinf.core.program import ArrayId, Tier

OpenResidents = Callable[..., Residents]


@pytest.fixture
def open_residents(tmp_path: Path) -> Iterator[OpenResidents]:
    """Puts arrays on tiers: `open_residents([Tier.HOST], arrays, host_bytes=...)`."""
    opened: list[Stores] = []

    def open_(
        tiers: list[Tier],
        arrays: Mapping[ArrayId, np.ndarray] = ARRAYS,
        *,
        host_bytes: int | None = None,
        device_bytes: int | None = None,
    ) -> Residents:
        stores = open_stores(
            jax.devices()[0],
            capacity_bytes={Tier.DEVICE: device_bytes, Tier.HOST: host_bytes},
            nvme_paths=[tmp_path / f"nvme{len(opened)}"],
        )
        opened.append(stores)
        residents = Residents(stores, layouts_of(arrays), homes_on(tiers, arrays))
        residents.create({})
        for array, value in arrays.items():
            residents.write(array, value.copy())
        return residents

    yield open_
    for stores in opened:
        stores.close()
