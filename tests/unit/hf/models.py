"""Tiny random models, saved as `transformers` saves them."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torchax", reason="needs torch and more: pip install '.[hf]'")

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

VOCAB, TOKENS = 96, 12
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def llama(**changes) -> transformers.PretrainedConfig:
    return transformers.LlamaConfig(**SMALL | changes)


def mixtral() -> transformers.PretrainedConfig:
    return transformers.MixtralConfig(**SMALL, num_local_experts=4)


def gpt2(**changes) -> transformers.PretrainedConfig:
    ends = {"bos_token_id": 0, "eos_token_id": 1}
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return transformers.GPT2Config(**sizes, **ends, n_positions=32, **changes)


def make(
    config: transformers.PretrainedConfig, *, dtype: torch.dtype = torch.float32
) -> transformers.PreTrainedModel:
    """The model of torch, with random weights that are the same each time."""
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def save(
    config: transformers.PretrainedConfig, folder: Path, *, shard: str = "20KB"
) -> transformers.PreTrainedModel:
    model = make(config)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def tokens(rows: int = 2) -> np.ndarray:
    return np.random.default_rng(0).integers(3, VOCAB, (rows, TOKENS), np.int32)


def torch_logits(model: transformers.PreTrainedModel, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(ids).long(), use_cache=False).logits.numpy()


CHAT = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}a: {% generation %}{{ m.content }} </s>"
    "{% endgeneration %}{% else %}u: {{ m.content }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a: {% endif %}"
)
WORDS = ("<unk>", "</s>", "<pad>", "a:", "u:", *(f"w{i}" for i in range(40)))


def tokenizer(**named) -> transformers.PreTrainedTokenizerFast:
    """A token for each word; `w0` is token 5."""
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    model = WordLevel(vocabulary, unk_token="<unk>")
    words = Tokenizer(model)
    words.pre_tokenizer = WhitespaceSplit()
    ends = {"unk_token": "<unk>", "eos_token": "</s>"} | named
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **ends)
