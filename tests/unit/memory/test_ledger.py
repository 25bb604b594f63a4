import threading

import pytest

from zinf.memory.ledger import BudgetExceeded, Ledger
from zinf.program import Tier


def test_used_and_peak_follow_reserve_and_release() -> None:
    ledger = Ledger(Tier.HOST, 100)
    ledger.reserve(60, "a")
    ledger.reserve(30, "b")
    ledger.release(60)
    assert (ledger.used_bytes, ledger.peak_bytes, ledger.capacity_bytes) == (
        30,
        60 + 30,
        100,
    )


def test_reset_peak_starts_from_what_is_held() -> None:
    ledger = Ledger(Tier.HOST, None)
    ledger.reserve(60, "a")
    ledger.release(40)
    ledger.reset_peak()
    assert ledger.peak_bytes == 60 - 40
    assert ledger.recent_peak_bytes == 60
    ledger.reset_peak()
    assert ledger.recent_peak_bytes == 60 - 40


def test_the_whole_capacity_can_be_used_and_not_a_byte_more() -> None:
    ledger = Ledger(Tier.DEVICE, 100)
    ledger.reserve(100, "a")
    with pytest.raises(BudgetExceeded):
        ledger.reserve(1, "b")
    assert ledger.used_bytes == ledger.peak_bytes == 100


def test_exceeding_the_budget_says_who_asked_what_and_what_there_is() -> None:
    ledger = Ledger(Tier.NVME, 3000)
    ledger.reserve(2000, "a")
    with pytest.raises(BudgetExceeded, match=r"param/w .*1,500 .*nvme.*500 too") as e:
        ledger.reserve(1500, "param/w")
    error = e.value
    assert "Raise memory.nvme_capacity" in str(error)
    assert (error.tier, error.what) == (Tier.NVME, "param/w")
    assert (error.asked_bytes, error.used_bytes, error.capacity_bytes) == (
        1500,
        2000,
        3000,
    )


def test_no_capacity_is_no_limit() -> None:
    ledger = Ledger(Tier.HOST, None)
    ledger.reserve(2**60, "a")
    assert ledger.used_bytes == 2**60


def test_holding_keeps_bytes_after_success_and_returns_them_after_failure() -> None:
    ledger = Ledger(Tier.HOST, None)
    with ledger.holding(10, "a"):
        pass
    with pytest.raises(ZeroDivisionError), ledger.holding(20, "b"):
        raise ZeroDivisionError
    assert ledger.used_bytes == 10
    assert ledger.peak_bytes == 10 + 20


def test_releasing_more_than_is_held_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="cannot release 1 bytes of 0"):
        Ledger(Tier.HOST, None).release(1)


def test_threads_lose_no_bytes() -> None:
    ledger = Ledger(Tier.HOST, None)

    def work() -> None:
        for _ in range(1000):
            ledger.reserve(3, "a")
            ledger.release(2)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.used_bytes == 4 * 1000 * (3 - 2)
