"""The memory of the host tier, pageable or pinned, never changes a number."""

import chex
import pytest

from tests.equivalence.models import LINEN, PYTREE
from tests.equivalence.training import ON_DEVICE, train
from tests.marks import slow_except
from zinf.memory.pages import arrays, choose

ON_HOST, ON_DRIVE = ("cpu", "cpu"), ("nvme", "nvme")
CASES = [
    (LINEN, "plain", ON_HOST),
    (PYTREE, "plain", ON_DRIVE),
    (PYTREE, "bf16 accumulation", ("nvme", "cpu")),
    (PYTREE, "clipping", ("cpu", "nvme")),
    (PYTREE, "fp16", ("none", "nvme")),
]
FAST = [(PYTREE, "plain", ON_DRIVE)]


@pytest.fixture
def opened(monkeypatch):
    """The pinned memories that are opened; arrays of any size are pinned."""
    found = []

    def opens(kind):
        def open_one(*arguments):
            found.append(kind(*arguments))
            return found[-1]

        return open_one

    monkeypatch.setattr(arrays, "PINNED_FROM_BYTES", 1)
    for name, kind in choose.KINDS.items():
        if name != choose.OFF:
            monkeypatch.setitem(choose.KINDS, name, opens(kind))
    return found


@pytest.mark.parametrize(
    ("model", "variant", "placement"),
    slow_except(FAST, CASES),
    ids=["-".join((m.name, v, *p)) for m, v, p in CASES],
)
def test_losses_and_parameters_are_bit_equal_in_pinned_memory(
    model, variant, placement, opened
):
    found = train.__wrapped__(model, variant, placement, "adam", "arrays")
    expected = train(model, variant, ON_DEVICE)
    assert found.losses == expected.losses
    assert found.grad_norms == expected.grad_norms
    chex.assert_trees_all_equal(found.params, expected.params, strict=True)
    (pages,) = opened
    assert pages.pinned_bytes > 0 and pages.pageable_bytes == 0
    assert pages.idle_bytes == 0  # closed
