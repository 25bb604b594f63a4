"""Where arrays rest never changes a number."""

from itertools import cycle

import chex
import pytest

from tests.equivalence.models import MODELS, PYTREE
from tests.equivalence.training import ON_DEVICE, PLACEMENTS, VARIANTS, train
from tests.marks import slow_except

ELSEWHERE = [p for p in PLACEMENTS if p != ON_DEVICE]
# All pairs of tiers for one model in every variant; for the others, whose leaves differ
# but not where they may rest, a pair for each variant.
OTHERS = {
    "plain": ("none", "nvme"),
    "accumulation": ("nvme", "cpu"),
    "clipping": ("cpu", "nvme"),
    "bf16": ("nvme", "nvme"),
}
CASES = [(PYTREE, v, p) for v in VARIANTS for p in ELSEWHERE]
CASES += [(m, v, p) for m in MODELS[1:] for v, p in OTHERS.items()]
# Every placement, variant and model at least once.
FAST = [(PYTREE, v, p) for v, p in zip(cycle(VARIANTS), ELSEWHERE, strict=False)]
FAST += [(m, v, p) for m, (v, p) in zip(MODELS[1:], OTHERS.items(), strict=False)]


@pytest.mark.sampled(2, slow=8)
@pytest.mark.parametrize(
    ("model", "variant", "placement"),
    slow_except(FAST, CASES),
    ids=["-".join((m.name, v, *p)) for m, v, p in CASES],
)
def test_losses_and_parameters_are_bit_equal_on_all_tiers(model, variant, placement):
    expected = train(model, variant, ON_DEVICE)
    found = train(model, variant, placement)
    assert found.losses == expected.losses
    assert found.grad_norms == expected.grad_norms
    chex.assert_trees_all_equal(found.params, expected.params, strict=True)


@pytest.mark.parametrize(
    "optimizer", slow_except(["muon"], ["lamb", "adafactor", "muon"])
)
def test_optimizers_that_need_whole_leaves_give_the_same_everywhere(optimizer):
    expected = train(PYTREE, "plain", ON_DEVICE, optimizer)
    found = train(PYTREE, "plain", ("nvme", "nvme"), optimizer)
    assert found.losses == expected.losses
    chex.assert_trees_all_equal(found.params, expected.params, strict=True)


@pytest.mark.parametrize(
    "model", slow_except([PYTREE], MODELS), ids=[m.name for m in MODELS]
)
def test_every_variant_learns_in_a_way_of_its_own(model):
    """Guards the tests above: a variant that does nothing would pass them all."""
    losses = {variant: train(model, variant, ON_DEVICE).losses for variant in VARIANTS}
    assert all(run[-1] < run[0] for run in losses.values())
    assert len(set(losses.values())) == len(VARIANTS)
