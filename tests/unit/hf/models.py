"""Tiny random models, saved as `transformers` saves them, and what runs them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.tiers import streamed

pytest.importorskip("torchax", reason="needs torch and more: pip install '.[hf]'")

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from zinf.adapt.blocks import Encoding

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
STREAMED = {"execution": "streamed", "segment": {"remat": "always"}}
# Logits of float32 models of two layers: a few units of rounding of the largest entry.
TOLERANCE = 2e-6


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


def reloaded(folder: Path) -> transformers.PreTrainedModel:
    """A model that zinf has exported, in torch."""
    kind = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    return model.eval()


def params_of(model: torch.nn.Module) -> dict[str, Any]:
    named = model.named_parameters()
    return {name: jnp.asarray(p.numpy(force=True)) for name, p in named}


def mean_loss(model):
    """The mean loss of a model as a function that jax differentiates."""
    return lambda *arguments, **named: model.loss(*arguments, **named).mean


def tokens(rows: int = 2) -> np.ndarray:
    return np.random.default_rng(0).integers(3, VOCAB, (rows, TOKENS), np.int32)


def torch_logits(model: transformers.PreTrainedModel, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(ids).long(), use_cache=False).logits.numpy()


def torch_loss(model: transformers.PreTrainedModel, ids: np.ndarray) -> float:
    with torch.no_grad():
        given = torch.tensor(ids).long()
        return float(model(given, labels=given).loss)


def off(found: Any, wanted: np.ndarray) -> float:
    """The largest difference, as a share of the largest entry."""
    return np.abs(np.asarray(found) - wanted).max() / np.abs(wanted).max()


def on_tier(tier: str, folder: Path) -> dict[str, Any]:
    """A config with all arrays on a tier: device, host or nvme."""
    name = {"device": "none", "host": "cpu"}.get(tier, tier)
    return streamed(name, folder / "nvme", persistence_threshold=0)


CHAT = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}a: {% generation %}{{ m.content }} </s>"
    "{% endgeneration %}{% else %}u: {{ m.content }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a: {% endif %}"
)
WORDS = ("<unk>", "</s>", "<pad>", "a:", "u:", *(f"w{i}" for i in range(40)))
END = 1


def tokenizer(**named) -> transformers.PreTrainedTokenizerFast:
    """A token for each word; `w0` is token 5."""
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    model = WordLevel(vocabulary, unk_token="<unk>")
    words = Tokenizer(model)
    words.pre_tokenizer = WhitespaceSplit()
    ends = {"unk_token": "<unk>", "eos_token": "</s>"} | named
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **ends)


def judge(
    folder: Path, *, num_labels: int = 1, **named: Any
) -> transformers.PreTrainedModel:
    """A reward model of torch, saved with a tokenizer."""
    torch.manual_seed(0)
    config = llama(num_labels=num_labels)
    config._attn_implementation = "eager"
    kind = transformers.AutoModelForSequenceClassification
    model = kind.from_config(config).eval()
    model.score.weight.data *= 30
    model.save_pretrained(folder)
    tokenizer(**named).save_pretrained(folder)
    return model


def turns(*contents: str) -> list[dict[str, str]]:
    """A conversation of a user, who begins, and an assistant."""
    roles = ("user", "assistant") * len(contents)
    pairs = zip(roles, contents, strict=False)
    return [{"role": role, "content": content} for role, content in pairs]


def change_files(
    folder: Path,
    change: Callable[[dict[str, torch.Tensor]], None],
    section: Mapping[str, Any] | None,
) -> dict[str, torch.Tensor]:
    """The tensors of a saved model, changed in place and written in one file.

    Args:
        section: quantization_config of config.json; None: there is none.
    """
    shards = sorted(folder.glob("model*.safetensors"))
    tensors = {name: x for path in shards for name, x in load_file(path).items()}
    change(tensors)
    for path in (*shards, folder / "model.safetensors.index.json"):
        path.unlink(missing_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if section is not None:
        path = folder / "config.json"
        raw = json.loads(path.read_text()) | {"quantization_config": section}
        path.write_text(json.dumps(raw))
    return tensors


NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def to_nvfp4(tensors: dict[str, torch.Tensor], names: str = "") -> None:
    """Linear layers, and experts one by one, as ModelOpt writes them.

    Args:
        names: what those that are changed have in their names.
    """
    ends = ("proj.weight", "w1.weight", "w2.weight", "w3.weight")
    for name in [n for n in tensors if n.endswith(ends) and names in n]:
        rows, columns = tensors[name].shape
        found = Encoding("nvfp4", 16).encode(tensors[name].numpy())
        codes = np.array(found["codes"]).reshape(rows, columns // 2)
        scales = np.array(found["scales"]).reshape(rows, columns // 16)
        second = np.array(found["tensor_scale"]).view(np.float32)[0]
        # The first code of a byte is in the low half.
        tensors[name] = torch.from_numpy((codes << 4) | (codes >> 4))
        tensors |= {
            f"{name}_scale": torch.from_numpy(scales).view(torch.float8_e4m3fn),
            f"{name}_scale_2": torch.tensor(second),
        }


def model_folder(folder: Path, **changes) -> Path:
    """A model with a tokenizer."""
    save(llama(**changes), folder / "model")
    tokenizer(chat_template=CHAT).save_pretrained(folder / "model")
    return folder / "model"


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def data_file(folder: Path, count: int = 6) -> Path:
    lines = [{"prompt": f"w{i} w1", "completion": f"w{i} w2"} for i in range(count)]
    return write(folder / "data.jsonl", lines)


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return list(map(json.loads, lines))


def refusals(mistakes: Mapping[str, Callable[[], Any]], folder: Path) -> str:
    """The error of each mistake, a paragraph each, without the folder."""
    found = []
    for name, mistake in mistakes.items():
        with pytest.raises((ValueError, NotImplementedError, OSError)) as error:
            mistake()
        text = str(error.value).replace(str(folder), "FOLDER")
        found.append(f"{name}\n  {type(error.value).__name__}: {text}")
    return "\n".join(found)
