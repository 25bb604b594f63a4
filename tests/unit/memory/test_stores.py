from pathlib import Path

import jax
import numpy as np
import pytest

from zinf.memory import open_stores
from zinf.program import ArrayId, Role, Tier

WHOLE = ArrayId(Role.PARAM, "w")


def test_each_tier_gives_its_store_with_its_budget(tmp_nvme: Path) -> None:
    stores = open_stores(
        jax.devices()[0],
        device_bytes=1000,
        host_bytes=2000,
        nvme_bytes=3000,
        nvme_paths=[tmp_nvme],
    )
    for tier, capacity_bytes in zip(Tier, (1000, 2000, 3000), strict=True):
        assert stores[tier].tier is tier
        assert stores[tier].ledger.capacity_bytes == capacity_bytes
    stores.close()


def test_without_folders_there_is_no_nvme_tier() -> None:
    stores = open_stores(jax.devices()[0])
    assert stores[Tier.HOST].ledger.capacity_bytes is None
    with pytest.raises(KeyError, match="Set memory.nvme"):
        stores[Tier.NVME]
    stores.close()


def test_an_array_goes_down_the_tiers_and_up_again_unchanged(tmp_nvme: Path) -> None:
    value = np.random.default_rng(0).random((6, 50), np.float32)
    stores = open_stores(jax.devices()[0], nvme_paths=[tmp_nvme])
    stores[Tier.HOST].write(WHOLE, value.copy()).result()
    for source, target in [
        (Tier.HOST, Tier.NVME),
        (Tier.NVME, Tier.DEVICE),
        (Tier.DEVICE, Tier.HOST),
    ]:
        moved = np.asarray(stores[source].read(WHOLE).result())
        stores[source].free(WHOLE)
        stores[target].write(WHOLE, moved).result()
        np.testing.assert_array_equal(stores[target].read(WHOLE).result(), value)
    assert [stores[tier].ledger.used_bytes for tier in Tier] == [0, value.nbytes, 0]
    stores.close()
