from zinf.plan import InfeasibleError
from zinf.plan.infeasible import Shortage
from zinf.program import Tier

CAPACITY = {Tier.DEVICE: 1000, Tier.HOST: 2000, Tier.NVME: 3000}
HOST = Shortage(2000, 5000, "`update layer0`")
DEVICE = Shortage(1000, 1500, "`forward layer0 @0`")


def test_the_error_says_what_was_asked_found_and_to_change() -> None:
    message = str(InfeasibleError({Tier.HOST: HOST}, CAPACITY))
    assert "The host budget is 2,000 bytes" in message
    assert "`update layer0` needs 5,000 bytes at once" in message
    assert "Raise memory.host to at least 5,000" in message


def test_all_budgets_are_named_at_once_the_fastest_tier_first() -> None:
    error = InfeasibleError({Tier.HOST: HOST, Tier.DEVICE: DEVICE}, CAPACITY)
    assert list(error.shortages) == [Tier.DEVICE, Tier.HOST]
    raised = "Raise memory.device to at least 1,500 and memory.host to at least 5,000"
    assert raised in str(error)
    assert error.missing_bytes == (500, 3000, 0)
    assert error.capacity_bytes == CAPACITY


def test_the_budget_of_nvme_is_named_by_its_own_key() -> None:
    short = Shortage(3000, 4000, "the state placed there")
    message = str(InfeasibleError({Tier.NVME: short}, CAPACITY))
    assert "memory.nvme_capacity to at least 4,000" in message
