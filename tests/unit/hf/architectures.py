"""A tiny configuration of each architecture of the table, and what fails, with why."""

from collections.abc import Collection
from typing import Any

import pytest

pytest.importorskip("torchax", reason="needs torch and more: pip install '.[hf]'")

import transformers

from tests.unit.hf.models import SMALL, VOCAB

ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
GPT = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    **ENDS,
}
HEAD = {"head_dim": 8}
WINDOW = {"sliding_window": 4}
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
N_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
MAMBA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "state_size": 4,
    **ENDS,
}
NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}

# Of each architecture, what its configuration has besides the sizes of `SMALL`. A
# configuration that names its sizes otherwise is given whole, below "whole".
DENSE: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "bloom": {
        "whole": {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "n_layer": 2,
            "n_head": 4,
            **NO_DROPOUT,
            **ENDS,
        }
    },
    "codegen": {"whole": {**GPT, "rotary_dim": 8, "n_ctx": 32}},
    "cohere": {},
    "cohere2": {**WINDOW, **HEAD},
    "ernie4_5": HEAD,
    "exaone4": {**WINDOW, **HEAD},
    "falcon": {**NO_DROPOUT, "new_decoder_architecture": False},
    "falcon_h1": {
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 4,
        **HEAD,
    },
    "gemma": HEAD,
    "gemma2": {**HEAD, **WINDOW},
    "gemma3_text": {**HEAD, **WINDOW},
    "glm": {**HEAD},
    "glm4": {**HEAD},
    "gpt2": {"whole": GPT},
    "gpt_bigcode": {"whole": GPT},
    "gpt_neo": {
        "whole": {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 32,
            "window_size": 4,
            **ENDS,
        }
    },
    "gpt_neox": NO_DROPOUT,
    "gpt_neox_japanese": {"intermediate_multiple_size": 2, **NO_DROPOUT},
    "gptj": {"whole": {**GPT, "rotary_dim": 8}},
    "granite": {},
    "helium": HEAD,
    "hunyuan_v1_dense": HEAD,
    "jais2": {},
    "lfm2": {
        "layer_types": ["conv", "full_attention"],
        "block_multiple_of": 8,
    },
    "llama": {},
    "mamba": {"whole": MAMBA},
    "mamba2": {
        "whole": {
            **MAMBA,
            "num_heads": 8,
            "head_dim": 8,
            "chunk_size": 4,
            "n_groups": 2,
        }
    },
    "ministral": {**HEAD, **WINDOW},
    "mistral": {**HEAD, **WINDOW},
    "mpt": {
        "whole": {
            "vocab_size": VOCAB,
            "d_model": 32,
            "n_layers": 2,
            "n_heads": 4,
            "max_seq_len": 32,
            **ENDS,
        }
    },
    "nemotron": HEAD,
    "olmo": {},
    "olmo2": {},
    "olmo3": WINDOW,
    "opt": {
        "whole": {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 32,
            "word_embed_proj_dim": 32,
            "dropout": 0.0,
            **ENDS,
        }
    },
    "persimmon": {},
    "phi": {},
    "phi3": {"original_max_position_embeddings": 32},
    "qwen2": {},
    "qwen3": HEAD,
    "recurrent_gemma": {
        "lru_width": 32,
        "attention_window_size": 4,
        "block_types": ["recurrent", "attention"],
        **HEAD,
    },
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0, **HEAD},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {"residual_dropout": 0.0, "embedding_dropout": 0.0},
    "zamba2": {
        "mamba_d_state": 8,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "mamba_ngroups": 1,
        "chunk_size": 4,
        "num_mem_blocks": 1,
        "hybrid_layer_ids": [1],
        "layers_block_type": ["mamba", "hybrid"],
    },
}
EXPERTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**N_ROUTED, **LATENT, "topk_method": "greedy"},
    "deepseek_v3": {**N_ROUTED, **LATENT},
    "dots1": {**N_ROUTED, **HEAD},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {**N_ROUTED, **HEAD},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, **HEAD, **WINDOW},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, **HEAD},
    "jetmoe": {
        "whole": {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "kv_channels": 8,
            "intermediate_size": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 32,
            **ENDS,
        }
    },
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention"],
        "num_dense_layers": 1,
        **ROUTED,
    },
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**ROUTED, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**ROUTED, **HEAD},
}
# What does not work, and why.
FAILING: dict[str, str] = {
    "jetmoe": "no ExpertsInterface: it splits tokens by counts that it computes",
}
WORKING = [name for name in (*DENSE, *EXPERTS) if name not in FAILING]


def slow_part(names: Collection[str]) -> list[Any]:
    """All architectures that work: these marked slow, and the others exhaustive."""
    unknown = set(names) - set(WORKING)
    assert not unknown, unknown
    marks = {True: pytest.mark.slow, False: pytest.mark.exhaustive}
    return [pytest.param(name, marks=marks[name in names]) for name in WORKING]


def config_of(name: str) -> transformers.PretrainedConfig:
    """A new configuration of an architecture."""
    given = (DENSE | EXPERTS)[name]
    kind = transformers.CONFIG_MAPPING[name]
    return kind(**given.get("whole", SMALL | given))
