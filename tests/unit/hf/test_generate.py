"""Models of `transformers` write what `transformers` writes, from every tier."""

from collections.abc import Callable

import numpy as np
import optax
import pytest

pytest.importorskip("torchax", reason="needs torch and more: pip install '.[hf]'")

import torch
import transformers

from tests.unit.hf.models import SMALL, VOCAB, gpt2, llama, mixtral, save, tokens
from zinf import hf
from zinf.inference import plan
from zinf.program import Tier

HEAD = {"head_dim": 8}
WINDOW = {"sliding_window": 4}
ROUTED = {"num_experts_per_tok": 2}
PROMPTS = [
    np.random.default_rng(0).integers(3, VOCAB, length) for length in (3, 9, 16, 1)
]
COUNT = 10
CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": llama,
    "gpt2": gpt2,
    "mixtral": mixtral,
    "qwen2": lambda: transformers.Qwen2Config(**SMALL),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, **HEAD),
    "mistral": lambda: transformers.MistralConfig(**SMALL, **WINDOW),
    "gemma2": lambda: transformers.Gemma2Config(**SMALL, **HEAD, **WINDOW),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SMALL, **HEAD, **WINDOW),
    "phi3": lambda: transformers.Phi3Config(**SMALL),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SMALL),
    "olmo2": lambda: transformers.Olmo2Config(**SMALL),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SMALL, **HEAD, **ROUTED, num_experts=4, moe_intermediate_size=16
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SMALL, **HEAD, **WINDOW, **ROUTED, num_local_experts=4
    ),
}


def settings(tier, folder):
    if tier == "device":
        return {"execution": "streamed"}
    offload = {"device": {"host": "cpu"}.get(tier, tier)}
    found = {
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_param": offload,
            "offload_optimizer": offload,
        },
    }
    return found | ({"memory": {"nvme": str(folder)}} if tier == "nvme" else {})


def written(reference, prompt):
    """The tokens that transformers writes after a prompt, greedily."""
    ids = torch.tensor(prompt[None]).long()
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 2}
    found = reference.generate(ids, max_new_tokens=COUNT, **options)
    return found[0, len(prompt) :].tolist()


@pytest.mark.sampled(slow=4)
@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_those_of_transformers_from_every_tier(
    name, tmp_path, monkeypatch
):
    """Weights and cache rest on the same tier."""
    reference = save(CONFIGS[name](), tmp_path / "model")
    wanted = [written(reference, prompt) for prompt in PROMPTS]
    model = hf.load(tmp_path / "model")
    for tier in Tier if name == "llama" else (Tier.HOST, Tier.NVME):
        monkeypatch.setattr(plan.GenerationPlanner, "tiers", (tier,))
        config = settings(tier.name.lower(), tmp_path / "nvme")
        with hf.open_model(model, config, rows=4, length=16) as engine:
            homes = engine.residents.homes
            assert {homes[a] for a in homes if ".0." in a.path} == {tier}
            assert engine.generate(PROMPTS, max_new_tokens=COUNT, rows=4) == wanted
            (made,) = {id(x): x for x in engine._forward._made.values()}.values()
            # Keys and values of two layers, and the number of slots in use.
            assert len(made.prefill.segmented.program.caches) == 5
            assert set(made.prefill.cache_homes.values()) == {tier}


@pytest.mark.slow
def test_a_layer_with_another_state_is_refused_by_name(tmp_path):
    config = transformers.Lfm2Config(
        **SMALL, layer_types=["conv", "full_attention"], block_multiple_of=8
    )
    save(config, tmp_path)
    model = hf.load(tmp_path)
    batch = {"input_ids": tokens()}
    with hf.initialize(model, optax.sgd(0.1), {}, batch=batch) as engine:
        with pytest.raises(NotImplementedError, match="lfm2.*kind conv"):
            engine.generate(PROMPTS[:1], max_new_tokens=1)
