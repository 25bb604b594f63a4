"""Models of `transformers` write what `transformers` writes, from every tier."""

from functools import partial

import numpy as np
import optax
import pytest

pytest.importorskip("torchax", reason="needs torch and more: pip install '.[hf]'")

import torch

from tests.marks import drawn
from tests.unit.hf.architectures import config_of
from tests.unit.hf.models import VOCAB, make, on_tier, save, tokenizer, tokens
from tests.unit.inference.generating import counting_sweeps
from zinf import hf
from zinf.core.config import Config
from zinf.core.machine.devices import on_devices
from zinf.core.machine.resources import Resources
from zinf.core.program import Tier
from zinf.distributed import Alone
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
                assert set(made.prefill.cache_tiers.values()) == {tier}


@pytest.mark.slow
def test_a_token_reads_the_experts_that_it_chose(tmp_path):
    """2 of 8, of weights that are stacked as the files have them."""
    config = config_of("mixtral")
    config.num_local_experts = 8
    save(config, tmp_path / "model")
    wanted = [written(make(config), prompt) for prompt in PROMPTS]
    rest = {"max_new_tokens": COUNT, "rows": 1, "batch_size": 1}
    for tier in ("cpu", "nvme"):
        model = hf.load(tmp_path / "model")
        with hf.open_model(model, on_tier(tier, tmp_path), rows=1, length=16) as engine:
            assert engine.generate(PROMPTS, **rest) == wanted
            decodes = [
                made.decode.segmented.program.chosen
                for made in engine._programs.made._made.values()
                if isinstance(made, plan.Generation)
            ]
            assert all(len(chosen) == 2 for chosen in decodes)


@pytest.mark.slow
def test_a_layer_with_another_state_is_refused_by_name(tmp_path):
    save(config_of("lfm2"), tmp_path)
    model = hf.load(tmp_path)
    batch = {"input_ids": tokens()}
    with hf.initialize(model, optax.sgd(0.1), {}, batch=batch) as engine:
        with pytest.raises(NotImplementedError, match="lfm2.*kind conv"):
            engine.generate(PROMPTS[:1], max_new_tokens=1)


@pytest.mark.slow
def test_a_small_model_guesses_within_the_same_budgets(tmp_path):
    """Here it is the large one itself, so all guesses are right."""
    save(config_of("llama"), tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    model = hf.load_as_stored(tmp_path / "model")
    config = Config.load(on_tier("cpu", tmp_path))
    rest = {"max_new_tokens": COUNT, "rows": 1}
    with hf.open_model(model, config, rows=1, length=16) as engine:
        wanted = engine.generate(PROMPTS[:2], **rest)
    whole = Resources(config, on_devices(config)[1], Alone()).capacity
    how = {"num_tokens": 3, "longest": 9 + COUNT, "rows": 1, "count": 2}
    with (
        hf.drafting(model, str(tmp_path / "model"), config, **how) as (drafts, left),
        hf.open_model(model, left, rows=1, length=16) as engine,
        counting_sweeps() as sweeps,
    ):
        found = engine.generate(PROMPTS[:2], drafts=drafts, **rest)
        assert left.device_bytes < whole[Tier.DEVICE]
        assert left.host_bytes < whole[Tier.HOST]
    assert found == wanted
    # The draft is fused: only the large model has such passes. Each makes 4 tokens.
    assert len(sweeps) == 1 + -(-(COUNT - 1) // 4)
