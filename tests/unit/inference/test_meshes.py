"""Generation on several devices of one process writes what one device writes."""

import numpy as np
import pytest

from tests.tiers import streamed
from tests.unit.inference.generating import (
    DRAWN,
    KEYS,
    MIXTURE,
    PROMPTS,
    make_engine,
    programs,
    used_bytes,
)
from zinf.inference import Scores, prompt_lookup

slow = pytest.mark.slow
CASES = (
    pytest.param({"fsdp": 2}, "none", {}, marks=slow),
    pytest.param({"fsdp": 2, "tensor": 2}, "nvme", {}),
    pytest.param({"fsdp": 1, "tensor": 2}, "cpu", {}, marks=slow),
    pytest.param({"fsdp": 2}, "cpu", MIXTURE, marks=slow),
    pytest.param({"fsdp": 1, "expert": 2}, "cpu", MIXTURE, marks=slow),
)
# One prompt, which devices cannot divide; more prompts than rows; guesses.
CALLS = (
    {"prompts": PROMPTS[:1], "rows": 1},
    {"prompts": PROMPTS, "rows": 2, "batch_size": 2, "key": KEYS, **DRAWN},
    {"prompts": PROMPTS, "rows": 2, "drafts": prompt_lookup(3)},
)


def texts(engine, prompts, **how):
    rest = {"max_new_tokens": 6, "scores": Scores(), **how}
    found = engine.generate(prompts, **rest)
    scores = [text.log_probabilities for text in found]
    return [text.tokens for text in found], np.concatenate(scores)


@pytest.mark.parametrize(("mesh", "tier", "shape"), CASES)
def test_tokens_are_those_of_one_device(mesh, tier, shape, tmp_path):
    with make_engine({"execution": "streamed"}, **shape) as one:
        wanted = [texts(one, **how) for how in CALLS]
    settings = streamed(tier, tmp_path, segment={}, mesh=mesh)
    with make_engine(settings, **shape) as engine:
        before = used_bytes(engine)
        for how, (tokens, scores) in zip(CALLS, wanted, strict=True):
            found = texts(engine, **how)
            assert found[0] == tokens
            # Devices add parts of sums of 32 and 128 products.
            np.testing.assert_allclose(found[1], scores, atol=1e-5)
        assert used_bytes(engine) == before
        made = programs(engine).decode
    assert made.layouts.mesh.size == np.prod([*mesh.values()])
    # Each device holds the keys and values of its own sequences.
    parts = mesh["fsdp"] * mesh.get("expert", 1)
    for name in (name for s in made.segments for name in s.spec.caches):
        layout = made.layouts.values[name]
        assert layout.device_shape[0] == layout.shape[0] // parts


def test_slots_for_experts_are_refused_by_name():
    settings = {"mesh": {"fsdp": 2}, "memory": {"experts": "1MiB"}}
    message = "memory.experts is 1,048,576 bytes of slots .* the mesh has 2 devices"
    with pytest.raises(NotImplementedError, match=message):
        make_engine(settings, **MIXTURE)
