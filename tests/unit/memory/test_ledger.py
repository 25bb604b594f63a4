"""What a tier holds is counted against its budget."""

import errno
from pathlib import Path

import jax
import pytest

from tests.golden import Golden
from zinf.core.memory import open_stores
from zinf.core.memory.ledger import BudgetExceeded, Ledger
from zinf.core.memory.storage_error import StorageError, from_os_error, from_tensorstore
from zinf.core.program import Tier


def test_used_and_peak_follow_reserve_and_release():
    ledger = Ledger(Tier.HOST, 100)
    ledger.reserve(60, "a")
    ledger.reserve(40, "b")
    with pytest.raises(BudgetExceeded):  # Not a byte more than all.
        ledger.reserve(1, "c")
    assert (ledger.used_bytes, ledger.peak_bytes, ledger.capacity_bytes) == (100,) * 3
    ledger.release(70)
    ledger.reserve(10, "d")
    assert (ledger.used_bytes, ledger.peak_bytes) == (100 - 70 + 10, 100)
    ledger.reset_peak()
    assert (ledger.peak_bytes, ledger.recent_peak_bytes) == (40, 100)
    ledger.reset_peak()
    assert ledger.recent_peak_bytes == 40
    ledger.release(40)
    with pytest.raises(AssertionError, match="cannot release 1 bytes of 0"):
        ledger.release(1)


def test_exceeding_the_budget_says_who_asked_what_and_what_there_is():
    ledger = Ledger(Tier.NVME, 3000)
    ledger.reserve(2000, "a")
    with pytest.raises(BudgetExceeded) as e:
        ledger.reserve(1500, "param/w")
    assert str(e.value) == (
        "param/w needs 1,500 bytes on tier nvme, which holds 2,000 of its 3,000 bytes: "
        "500 too many. Raise memory.nvme_capacity, or place fewer arrays there."
    )
    assert (e.value.tier, e.value.what) == (Tier.NVME, "param/w")
    numbers = e.value.asked_bytes, e.value.used_bytes, e.value.capacity_bytes
    assert numbers == (1500, 2000, 3000)


def test_bytes_that_another_thread_freed_meanwhile_are_reserved():
    """It freed all that was spare, so nothing is left for this one to free."""
    ledger = Ledger(Tier.DEVICE, 100, lambda: ledger.release(60))
    ledger.reserve(60, "spare")
    ledger.reserve(100, "a")
    assert ledger.used_bytes == 100


def test_holding_keeps_bytes_after_success_and_returns_them_after_failure():
    ledger = Ledger(Tier.HOST, None)  # Without a limit.
    with ledger.holding(2**60, "a"):
        pass
    with pytest.raises(ZeroDivisionError), ledger.holding(20, "b"):
        raise ZeroDivisionError
    assert (ledger.used_bytes, ledger.peak_bytes) == (2**60, 2**60 + 20)


def test_each_tier_gives_its_store_with_its_budget(tmp_nvme):
    budgets = {Tier.DEVICE: 1000, Tier.HOST: 2000, Tier.NVME: 3000}
    device = jax.devices()[0]
    stores = open_stores(device, capacity_bytes=budgets, nvme_paths=[tmp_nvme])
    assert stores.tiers == tuple(Tier)
    for tier, capacity_bytes in budgets.items():
        assert stores[tier].tier is tier
        assert stores[tier].ledger.capacity_bytes == capacity_bytes
        stores[tier].ledger.reserve(10, "a")
        stores[tier].ledger.release(4)
        assert stores.peak_bytes(tier) == 10
    stores.reset_peaks()
    assert [stores.peak_bytes(tier) for tier in Tier] == [10 - 4] * len(Tier)
    stores.close()


def test_without_folders_there_is_no_nvme_tier():
    stores = open_stores(jax.devices()[0])
    assert stores[Tier.HOST].ledger.capacity_bytes is None
    assert stores.tiers == (Tier.DEVICE, Tier.HOST)
    assert stores.peak_bytes(Tier.NVME) == 0
    with pytest.raises(KeyError, match="Set memory.nvme"):
        stores[Tier.NVME]
    stores.close()


# As TensorStore 0.1.86 words them, on a full tmpfs and for damaged chunks.
TENSORSTORE = (
    'RESOURCE_EXHAUSTED: Error writing local file "/nvme/param/w/c.3.0": Failed '
    'writing: "/nvme/param/w/c.3.0.__lock": Failed to write 4096 bytes to file 4: No '
    "space left on device [os_error_code='28']",
    'NOT_FOUND: chunk {0, 0} stored at local file "/nvme/param/w/c.0.0" is missing',
    'FAILED_PRECONDITION: Error reading local file "/nvme/param/w/c.0.0": Not enough '
    "data: expected at least 128 or 118 more; at byte 10",
    'NOT_FOUND: Error opening "zarr3" driver: Error writing local file '
    "\"/nvme/param/w/zarr.json\": Permission denied [os_error_code='13'] "
    "[tensorstore_spec='{\\\"context\\\":{}}']",
    "INTERNAL: what",
)


def test_errors_of_a_drive_have_number_file_and_advice(golden: Golden):
    what, folder = "Cannot use param/w", Path("/nvme/param/w")
    errors = [from_tensorstore(what, folder, ValueError(x)) for x in TENSORSTORE]
    numbers = (errno.EROFS, errno.EDQUOT, errno.ETIMEDOUT, errno.EMFILE, errno.ENODATA)
    errors += [from_os_error(what, folder, OSError(x, "whatever")) for x in numbers]
    errors += [from_os_error(what, folder, TimeoutError(), place="byte 3")]
    errors += [from_os_error(what, folder, OSError("no number"))]
    assert all(isinstance(error, StorageError) for error in errors)
    golden.check("storage_error.txt", "\n".join(map(str, errors)))
