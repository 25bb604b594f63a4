"""Models of `transformers` write what `transformers` writes, from every tier."""

from functools import partial

import numpy as np
import optax
import pytest

pytest.importorskip("torchax", reason="needs torch and more: pip install '.[hf]'")

import torch

from tests.marks import drawn
from tests.unit.hf.architectures import config_of
from tests.unit.hf.models import VOCAB, make, on_tier, save, tokens
from zinf import hf
from zinf.core.program import Tier
from zinf.inference import Drafts, plan

PROMPTS = [
    np.random.default_rng(0).integers(3, VOCAB, length) for length in (3, 9, 16, 1)
]
COUNT = 10
# Grouped heads; windows in every other layer, and a tied head; frequencies that change
# with the length, beyond 16 tokens. One more is drawn.
FIXED = ("llama", "gemma2", "llama with dynamic", "phi3 with longrope")
OTHERS = (
    *("gpt2", "mixtral", "qwen2", "qwen3", "mistral", "gemma3_text", "phi3"),
    *("gpt_neox", "olmo2", "qwen3_moe", "gpt_oss"),
)


def written(reference, prompt):
    """The tokens that transformers writes after a prompt, greedily."""
    ids = torch.tensor(prompt[None]).long()
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 2}
    found = reference.generate(ids, max_new_tokens=COUNT, **options)
    return found[0, len(prompt) :].tolist()


def every_third_is_wrong(wanted, numbers, texts):
    """Guesses of the tokens after each text."""
    found = []
    for number, text in zip(numbers, texts, strict=True):
        places = range(len(text) - len(PROMPTS[number]), COUNT)
        found.append([3 if i % 3 == 0 else wanted[number][i] for i in places])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FIXED, *drawn(OTHERS, 1)])
def test_greedy_tokens_are_those_of_transformers_from_every_tier(
    name, tmp_path, monkeypatch
):
    """Weights and cache rest on the same tier; or all fits the device, in a loop."""
    save(config_of(name), tmp_path / "model")
    # A new model each: torch keeps the frequencies of the longest sequence so far.
    wanted = [written(make(config_of(name)), prompt) for prompt in PROMPTS]
    model = hf.load(tmp_path / "model")
    with hf.open_model(model, {}, rows=4, length=16) as engine:
        assert engine.generate(PROMPTS, max_new_tokens=COUNT, rows=4) == wanted
        assert all(
            x.programs.plan.is_fused for x in engine._programs.made._made.values()
        )
    for tier in Tier if name == "llama" else (Tier.NVME,):
        monkeypatch.setattr(plan.GenerationPlanner, "tiers", (tier,))
        config = on_tier(tier.name.lower(), tmp_path)
        with hf.open_model(model, config, rows=4, length=16) as engine:
            homes = engine.residents.homes
            assert {homes[a] for a in homes if ".0." in a.path} == {tier}
            assert engine.generate(PROMPTS, max_new_tokens=COUNT, rows=4) == wanted
            drafts = Drafts(3, partial(every_third_is_wrong, wanted))
            rest = {"max_new_tokens": COUNT, "rows": 4, "drafts": drafts}
            assert engine.generate(PROMPTS, **rest) == wanted
            for made in engine._programs.made._made.values():
                if not isinstance(made, plan.Generation):
                    continue
                # Keys and values of two layers, and the number of slots in use.
                assert len(made.prefill.segmented.program.caches) == 5
                assert set(made.prefill.cache_homes.values()) == {tier}


@pytest.mark.slow
def test_a_layer_with_another_state_is_refused_by_name(tmp_path):
    save(config_of("lfm2"), tmp_path)
    model = hf.load(tmp_path)
    batch = {"input_ids": tokens()}
    with hf.initialize(model, optax.sgd(0.1), {}, batch=batch) as engine:
        with pytest.raises(NotImplementedError, match="lfm2.*kind conv"):
            engine.generate(PROMPTS[:1], max_new_tokens=1)
