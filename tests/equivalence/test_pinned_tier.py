"""The memory of the host tier, pageable or pinned, never changes a number."""

import pytest

from tests.equivalence.models import LINEN, PYTREE
from tests.equivalence.training import (
    ON_DEVICE,
    ON_NVME,
    Setting,
    assert_bit_equal,
    train,
)
from tests.fake_cuda import FakeCuda
from zinf.core.memory.host.pages import abstract, choose, cuda

slow = pytest.mark.slow


@pytest.fixture
def driver(monkeypatch):
    """A CUDA driver that is simulated."""
    simulated = FakeCuda()
    monkeypatch.setattr(cuda, "load", lambda: simulated)
    return simulated


@pytest.fixture
def opened(monkeypatch):
    """The pinned memories that are opened; arrays of any size are pinned."""
    memories = []

    def opens(kind):
        def open_one(*arguments):
            memories.append(kind(*arguments))
            return memories[-1]

        return open_one

    monkeypatch.setattr(abstract, "PINNED_FROM_BYTES", 1)
    for name, kind in choose.KINDS.items():
        if name != choose.OFF:
            monkeypatch.setitem(choose.KINDS, name, opens(kind))
    return memories


@pytest.mark.parametrize(
    ("model", "name", "place", "kind"),
    [
        (PYTREE, "plain", ON_NVME, "registered"),
        pytest.param(LINEN, "accumulation", ON_NVME, "arrays", marks=slow),
        pytest.param(PYTREE, "fp16", ("none", "nvme"), "arrays", marks=slow),
        pytest.param(
            PYTREE, "bf16 clipping", ("cpu", "nvme"), "registered", marks=slow
        ),
    ],
)
def test_losses_and_parameters_are_bit_equal_in_pinned_memory(
    model, name, place, kind, opened, driver
):
    setting = Setting(place, name, more=(("memory.pinned", kind),))
    found = train.__wrapped__(model, setting)
    assert_bit_equal(found, train(model, Setting(ON_DEVICE, name)))
    (pages,) = opened
    assert pages.pinned_bytes > 0 and pages.pageable_bytes == 0
    if kind == "registered":
        assert driver.calls > 0 and driver.copied_bytes > 0
        assert (driver.registered_bytes, driver.contexts) == (0, 0)  # closed
    else:
        assert pages.idle_bytes == 0
