"""The memory of the host tier, pageable or pinned, never changes a number."""

import chex
import pytest

from tests.equivalence.models import LINEN, PYTREE
from tests.equivalence.training import ON_DEVICE, train
from tests.fake_cuda import FakeCuda
from tests.marks import slow_except
from zinf.memory.pages import abstract, choose, cuda

ON_HOST, ON_DRIVE = ("cpu", "cpu"), ("nvme", "nvme")
CASES = [
    (LINEN, "plain", ON_HOST, "arrays"),
    (PYTREE, "plain", ON_DRIVE, "arrays"),
    (PYTREE, "bf16 accumulation", ("nvme", "cpu"), "arrays"),
    (PYTREE, "bf16 accumulation", ("nvme", "cpu"), "registered"),
    (PYTREE, "clipping", ("cpu", "nvme"), "arrays"),
    (PYTREE, "clipping", ("cpu", "nvme"), "registered"),
    (PYTREE, "plain", ON_DRIVE, "registered"),
    (PYTREE, "fp16", ("none", "nvme"), "arrays"),
    (PYTREE, "fp16", ("none", "nvme"), "registered"),
]
FAST = [(PYTREE, "plain", ON_DRIVE, "registered")]


@pytest.fixture
def driver(monkeypatch):
    """A CUDA driver that is simulated."""
    found = FakeCuda()
    monkeypatch.setattr(cuda, "load", lambda: found)
    return found


@pytest.fixture
def opened(monkeypatch):
    """The pinned memories that are opened; arrays of any size are pinned."""
    found = []

    def opens(kind):
        def open_one(*arguments):
            found.append(kind(*arguments))
            return found[-1]

        return open_one

    monkeypatch.setattr(abstract, "PINNED_FROM_BYTES", 1)
    for name, kind in choose.KINDS.items():
        if name != choose.OFF:
            monkeypatch.setitem(choose.KINDS, name, opens(kind))
    return found


@pytest.mark.parametrize(
    ("model", "variant", "placement", "kind"),
    slow_except(FAST, CASES),
    ids=["-".join((m.name, v, *p, kind)) for m, v, p, kind in CASES],
)
def test_losses_and_parameters_are_bit_equal_in_pinned_memory(
    model, variant, placement, kind, opened, driver
):
    found = train.__wrapped__(model, variant, placement, "adam", kind)
    expected = train(model, variant, ON_DEVICE)
    assert found.losses == expected.losses
    assert found.grad_norms == expected.grad_norms
    chex.assert_trees_all_equal(found.params, expected.params, strict=True)
    (pages,) = opened
    assert pages.pinned_bytes > 0 and pages.pageable_bytes == 0
    if kind == "registered":
        assert driver.calls > 0 and driver.copied_bytes > 0
        assert (driver.registered_bytes, driver.contexts) == (0, 0)  # closed
    else:
        assert pages.idle_bytes == 0
