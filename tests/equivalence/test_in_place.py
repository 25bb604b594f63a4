"""Updates on the host, in place where that can be, never change a number."""

from collections import Counter

import chex
import numpy as np
import pytest

from tests.equivalence.models import PYTREE
from tests.equivalence.training import (
    BOTH,
    MIXED,
    ON_DEVICE,
    OPTIMIZERS,
    SETTINGS,
    streamed_config,
    train,
)
from tests.marks import slow_except
from zinf.optim import chunked, on_host
from zinf.prepare.updates import Updates

ON_HOST = ("cpu", "cpu")


@pytest.mark.parametrize("variant", slow_except(["fp16 accumulation"], [BOTH, *MIXED]))
def test_losses_and_parameters_are_bit_equal_with_updates_on_the_host(variant):
    expected = train(PYTREE, variant, ON_DEVICE)
    found = train(PYTREE, variant, ON_HOST)
    assert found.losses == expected.losses
    assert found.grad_norms == expected.grad_norms
    chex.assert_trees_all_equal(found.params, expected.params, strict=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant",
    slow_except(["bf16 clipping"], ["plain", "bf16 clipping", "fp16 accumulation"]),
)
def test_updates_by_a_loop_made_for_the_transform_change_no_number(variant):
    """Of SGD with momentum, which takes no reciprocal root that XLA would estimate."""
    expected = train(PYTREE, variant, ON_DEVICE, "sgd")
    found = train(PYTREE, variant, ON_HOST, "sgd")
    assert found.losses == expected.losses
    chex.assert_trees_all_equal(found.params, expected.params, strict=True)


@pytest.mark.parametrize(
    "variant",
    slow_except(["bf16 clipping"], ["plain", "bf16 clipping", "fp16 accumulation"]),
)
def test_updates_in_pieces_change_no_number(variant, monkeypatch):
    expected = train(PYTREE, variant, ON_DEVICE, "sgd")
    # As for a transform that no loop can be made for.
    monkeypatch.setattr(on_host, "WAYS", (chunked.chunked_updates,))
    # Less than most leaves have, and no divisor of them.
    monkeypatch.setattr(chunked, "CHUNK_NUMEL", 100)
    found = train.__wrapped__(PYTREE, variant, ON_HOST, "sgd")
    assert found.losses == expected.losses
    chex.assert_trees_all_equal(found.params, expected.params, strict=True)


def test_loss_scaling_skips_steps_in_these_runs():
    """Guards the test above: its overflows must be real."""
    norms = train(PYTREE, "fp16", ON_HOST).grad_norms
    assert not np.isfinite(norms[0]) and np.isfinite(norms[-1])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("variant", "optimizer", "placement", "is_in_place"),
    [
        ("plain", "adam", ON_HOST, True),
        ("plain", "adam", ("none", "nvme"), True),
        ("bf16 accumulation", "adam", ON_HOST, True),
        # Gradients in float16 are summed in float32.
        ("fp16 accumulation", "adam", ON_HOST, True),
        ("fp16", "adam", ON_HOST, False),
        ("plain", "sgd", ON_HOST, True),
        ("plain", "lamb", ON_HOST, False),
        ("plain", "adam", ON_DEVICE, False),
    ],
)
def test_elementwise_updates_are_in_place_on_the_host(
    variant, optimizer, placement, is_in_place, monkeypatch, tmp_path
):
    calls = Counter()
    for name in ("apply", "apply_in_place"):
        original = getattr(Updates, name)

        def counting(*arguments, name=name, original=original):
            calls[name] += 1
            return original(*arguments)

        monkeypatch.setattr(Updates, name, counting)
    config = {**streamed_config(placement, str(tmp_path)), **SETTINGS[variant]}
    engine = PYTREE.start(OPTIMIZERS[optimizer], config)
    num_microbatches = config.get("gradient_accumulation_steps", 1)
    # Until a step is not skipped.
    for batch in PYTREE.batches(20, num_microbatches):
        engine.step(batch)
        if calls:
            break
    engine.close()
    # A scalar leaf keeps its executable.
    assert ("apply_in_place" in calls) is is_in_place
