"""Where arrays rest, and how little room there is, never changes a number."""

import chex
import jax
import numpy as np
import pytest

from tests.equivalence.model_state import NORMED
from tests.equivalence.models import EQUINOX, LINEN, LONG, MODELS, NNX, PYTREE, Model
from tests.equivalence.training import (
    ON_DEVICE,
    ON_HOST,
    ON_NVME,
    OPTIMIZERS,
    PLACEMENTS,
    SETTINGS,
    Run,
    Setting,
    assert_bit_equal,
    run_of,
    streamed_config,
    train,
)
from zinf.core.plan import Plan
from zinf.core.plan import Run as RunSegment
from zinf.core.program import Tier

slow = pytest.mark.slow
ELSEWHERE = [p for p in PLACEMENTS if p != ON_DEVICE]
FP16_SUM = "fp16 accumulation"
FAST = [
    (PYTREE, "plain", ("nvme", "cpu")),
    (PYTREE, "bf16 clipping", ("cpu", "nvme")),
    (PYTREE, FP16_SUM, ON_HOST),
    (LONG, "plain", ON_NVME),
]
# Every pair of tiers, and every setting, for one model; a pair for each other one.
CASES = FAST + [
    (LINEN, "accumulation", ON_NVME),
    (LONG, "plain", ON_HOST),
    (PYTREE, "accumulation", ("none", "cpu")),
    (PYTREE, "clipping", ("none", "nvme")),
    (PYTREE, "accumulation and clipping", ON_NVME),
    (PYTREE, "bf16", ("cpu", "none")),
    (PYTREE, "bf16 accumulation", ("nvme", "none")),
    (PYTREE, "fp16", ON_HOST),
    (NNX, "clipping", ("cpu", "nvme")),
    (EQUINOX, "bf16", ON_NVME),
    (NORMED, "accumulation", ("cpu", "none")),
    (NORMED, "plain", ON_NVME),
]


@pytest.mark.parametrize(
    ("model", "name", "place"),
    [pytest.param(*case, marks=() if case in FAST else slow) for case in CASES],
)
def test_losses_and_parameters_are_bit_equal_on_all_tiers(model, name, place):
    # In float16 the first steps are skipped.
    steps = 6 if "fp16" in name else 3
    expected = train(model, Setting(ON_DEVICE, name), steps=steps)
    found = train(model, Setting(place, name), steps=steps)
    assert found.skipped == expected.skipped
    assert any(found.skipped) == ("fp16" in name) and not found.skipped[-1]
    assert_bit_equal(found, expected)
    if model is NORMED:
        states = (
            {**s, "key": jax.random.key_data(s["key"])}
            for s in (found.state, expected.state)
        )
        chex.assert_trees_all_equal(*states, strict=True)
        assert found.state["layers"][0]["count"] == steps


def test_every_model_setting_and_pair_of_tiers_occurs():
    assert {case[0] for case in CASES} == {*MODELS, NORMED, LONG}
    assert {case[1] for case in CASES} == SETTINGS.keys()
    assert {case[2] for case in CASES} == {*ELSEWHERE}


@pytest.mark.parametrize("optimizer", [pytest.param("lamb", marks=slow), "muon"])
def test_optimizers_that_need_whole_leaves_give_the_same_everywhere(optimizer):
    expected, found = (
        train(PYTREE, Setting(place), optimizer) for place in (ON_DEVICE, ON_NVME)
    )
    assert_bit_equal(found, expected)


def test_every_setting_has_an_effect_of_its_own():
    """Guards the tests above: a setting that does nothing would pass them all."""
    names = ("plain", "clipping", "bf16 clipping", FP16_SUM, "accumulation")
    runs = [train(PYTREE, Setting(ON_DEVICE, name), steps=6) for name in names]
    assert len({run.losses for run in runs}) == len(names)


@slow
@pytest.mark.parametrize("name", ["plain", "bf16 clipping", FP16_SUM])
def test_updates_by_a_loop_made_for_the_transform_change_no_number(name):
    """Of SGD with momentum, which takes no reciprocal root that XLA would estimate."""
    expected, found = (
        train(PYTREE, Setting(place, name), "sgd", 6) for place in (ON_DEVICE, ON_HOST)
    )
    assert_bit_equal(found, expected)


# Budgets change what is moved, and when, but no number.


def within(model: Model, folder: str, name: str, **budgets: int) -> tuple[Run, Plan]:
    """A run with everything on nvme, and its plan."""
    setting = Setting(ON_NVME, name)
    config = streamed_config(ON_NVME, folder) | SETTINGS[name]
    config["memory"] |= budgets
    with model.start(OPTIMIZERS["adam"], config) as engine:
        batches = model.batches(3, setting.num_microbatches)
        metrics = [engine.step(batch) for batch in batches]
        run, plan = run_of(metrics, engine.params()), engine.plan
    for tier, budget in budgets.items():
        assert all(m[f"{tier}_bytes"] <= budget for m in metrics)
    return run, plan


def segments(plan: Plan) -> list[str]:
    runs = (i.operation for i in plan.instructions)
    return [run.name for run in runs if isinstance(run, RunSegment)]


def test_half_the_bytes_give_the_same_numbers(tmp_path):
    expected, plan = within(PYTREE, str(tmp_path / "ample"), "accumulation")
    budgets = {str(t): int(0.55 * plan.peak_bytes[t]) for t in (Tier.DEVICE, Tier.HOST)}
    found, tight = within(PYTREE, str(tmp_path / "tight"), "accumulation", **budgets)
    assert segments(tight) == segments(plan)
    assert_bit_equal(found, expected)


@slow
def test_smaller_segments_differ_by_rounding_alone(tmp_path):
    """A layer that does not fit is cut, and XLA orders the sums of its parts anew."""
    expected, plan = within(EQUINOX, str(tmp_path / "ample"), "plain")
    device = int(0.65 * plan.peak_bytes[Tier.DEVICE])
    found, tight = within(EQUINOX, str(tmp_path / "tight"), "plain", device=device)
    assert len(segments(tight)) > len(segments(plan))
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)
