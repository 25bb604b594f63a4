"""Updates on the host, in place or in pieces where that can be, change no number."""

from collections import Counter

import pytest

from tests.equivalence.models import PYTREE
from tests.equivalence.training import (
    ON_DEVICE,
    ON_HOST,
    OPTIMIZERS,
    Setting,
    assert_bit_equal,
    train,
)
from zinf.core.optim.host import chunked, on_host
from zinf.core.step.updates import Updates

slow = pytest.mark.slow


@pytest.mark.parametrize("name", ["bf16 clipping", pytest.param("plain", marks=slow)])
def test_updates_in_pieces_change_no_number(name, monkeypatch):
    expected = train(PYTREE, Setting(ON_DEVICE, name), "sgd")
    # As for a transform that no loop can be made for.
    monkeypatch.setattr(on_host, "WAYS", (chunked.chunked_updates,))
    # Less than most leaves have, and no divisor of them.
    monkeypatch.setattr(chunked, "CHUNK_NUMEL", 100)
    found = train.__wrapped__(PYTREE, Setting(ON_HOST, name), "sgd")
    assert_bit_equal(found, expected)


@pytest.mark.parametrize(
    ("name", "optimizer", "placement", "is_in_place"),
    [
        ("plain", "adam", ON_HOST, True),
        ("plain", "lamb", ON_HOST, False),
        pytest.param("plain", "adam", ON_DEVICE, False, marks=slow),
        pytest.param("plain", "sgd", ("none", "nvme"), True, marks=slow),
        # Gradients in float16 are summed in float32.
        pytest.param("fp16 accumulation", "adam", ON_HOST, True, marks=slow),
        pytest.param("fp16", "adam", ON_HOST, False, marks=slow),
    ],
)
def test_elementwise_updates_are_in_place_on_the_host(
    name, optimizer, placement, is_in_place, monkeypatch, tmp_path
):
    calls = Counter()
    for way in ("apply", "apply_in_place"):
        original = getattr(Updates, way)

        def counting(*arguments, way=way, original=original):
            calls[way] += 1
            return original(*arguments)

        monkeypatch.setattr(Updates, way, counting)
    setting = Setting(placement, name)
    config = setting.config(PYTREE, str(tmp_path))
    with PYTREE.start(OPTIMIZERS[optimizer], config) as engine:
        # In float16 the first steps are skipped.
        for batch in PYTREE.batches(6, setting.num_microbatches):
            engine.step(batch)
            if calls:
                break
    # A scalar leaf keeps its executable.
    assert ("apply_in_place" in calls) is is_in_place
