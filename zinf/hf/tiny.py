"""A tiny configuration of the same class, which keeps the features that are on.

Sizes become small numbers that fit each other. Features that depend on the length of
a sequence (windows, selected keys, chunks) get limits below the compared `LENGTH`.
"""

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import transformers

LENGTH, VOCAB = 12, 96
# Beyond so many tokens rotary embeddings have other frequencies, if they change.
SWITCH, ORIGINAL = 8, "original_max_position_embeddings"
NUM_HEADS, HEAD_DIM = 4, 8
HIDDEN = NUM_HEADS * HEAD_DIM
# State spaces expand the hidden dim twice.
SSM_HEADS = 2 * NUM_HEADS
LAYERS = re.compile(r"^(num_hidden_layers|n_layers?|num_layers|(de|en)coder_layers)$")
# Kinds of layers that are kept at most, of those that the configuration names.
MAX_KINDS = 4
HEADS = re.compile(
    r"^(num_attention_heads|n_heads?|num_heads|(de|en)coder_attention_heads"
    r"|attention_heads)$"
)


def tiny(config: transformers.PretrainedConfig) -> transformers.PretrainedConfig:
    """A configuration of a model of a few thousand parameters.

    Raises:
        Exception: the class refuses the small sizes, in any way it likes.
    """
    return type(config).from_dict(_small(deepcopy(config.to_dict())))


def _small(values: dict[str, Any]) -> dict[str, Any]:
    """Values of a configuration, or of one inside it, with sizes made small."""
    counts = [v for k, v in values.items() if LAYERS.search(k) and _is_count(v)]
    count = max(counts, default=0)
    kept = _kept_layers(values, count)
    heads = [v for k, v in values.items() if HEADS.search(k) and _is_count(v)]
    # A head of DeepSeek's attention has two parts.
    parts = (values.get("qk_nope_head_dim") or 0) + (
        values.get("qk_rope_head_dim") or 0
    )
    is_ssm = "expand" in values and "head_dim" in values
    found: dict[str, Any] = {}
    for key, value in values.items():
        if key == "per_layer_config" and isinstance(value, Mapping):
            numbered = {int(i): x for i, x in value.items()}
            found[key] = {
                n: _small(dict(numbered[i]))
                for n, i in enumerate(kept)
                if i in numbered
            }
        elif isinstance(value, Mapping):
            is_section = key not in ("id2label", "label2id")
            found[key] = _small(dict(value)) if is_section else value
        elif _is_by_layer(key, value, count):
            found[key] = [_number(key, value[i], heads) for i in kept]
        elif isinstance(value, list | tuple):
            found[key] = _few(key, list(value), heads, len(kept))
        elif LAYERS.search(key) and _is_count(value):
            found[key] = len(kept)
        elif is_ssm and key == "num_heads":
            found[key] = SSM_HEADS
        elif key.endswith("head_dim") and value == parts:
            found[key] = 2 * HEAD_DIM
        else:
            found[key] = _number(key, value, heads)
    _shorten_rotary(found)
    return found


def _shorten_rotary(found: dict[str, Any]) -> None:
    """Let frequencies of rotary embeddings change with the length below `LENGTH`."""
    settings = found.get("rope_parameters")
    if not isinstance(settings, dict):
        return
    if settings.get("rope_type") == "dynamic":
        found["max_position_embeddings"] = SWITCH
    if settings.get("rope_type") != "longrope":
        return
    for section in (found, settings):
        if ORIGINAL in section:
            section[ORIGINAL] = SWITCH
    pairs = int(HEAD_DIM * (settings.get("partial_rotary_factor") or 1.0)) // 2
    for name in ("short_factor", "long_factor"):
        settings[name] = settings[name][:pairs]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_by_layer(key: str, value: Any, count: int) -> bool:
    is_list = isinstance(value, list | tuple) and len(value) == count > 0
    return is_list and not key.endswith("token_id")


def _kept_layers(values: Mapping[str, Any], count: int) -> list[int]:
    """Numbers of layers to keep: one of each kind in the lists, and at least two."""
    lists = [v for k, v in values.items() if _is_by_layer(k, v, count)]
    kinds: dict[str, int] = {}
    for i in range(count):
        kinds.setdefault(repr([x[i] for x in lists]), i)
    kept = sorted(kinds.values())[:MAX_KINDS]
    rest = [i for i in range(count) if i not in kept]
    return sorted([*kept, *rest[: max(0, 2 - len(kept))]])


def _few(key: str, values: list[Any], heads: list[int], layers: int) -> list[Any]:
    """A short form of a list that does not have one entry for each layer."""
    if not values:
        return values
    if key.endswith(("short_factor", "long_factor")):
        return values[: HEAD_DIM // 2]
    if key == "mrope_section":
        return [2, 1, 1]
    if re.search(r"layers|layer_ids|indices|indexes|layer_idx", key):
        return [v for v in values if not _is_count(v) or v < layers] or [layers - 1]
    return [_number(key, v, heads) for v in values]


def _kv_heads(value: int, heads: list[int]) -> int:
    if value == 1:
        return 1
    return NUM_HEADS if not heads or value >= min(heads) else NUM_HEADS // 2


# What becomes of a number, by the first pattern in its name; other numbers from 64 on
# become `HIDDEN`.
RULES: list[tuple[str, Callable[[int], int]]] = [
    (r"pad_token_id$", lambda _: 2),
    (r"bos_token_id$|decoder_start_token_id$", lambda _: 0),
    (r"eos_token_id$|sep_token_id$", lambda _: 1),
    (r"token_id$|token_index$|token_ids$", lambda v: VOCAB - 1 - v % 8),
    (r"vocab", lambda _: VOCAB),
    (r"num_labels", lambda v: v),
    # Limits below the length.
    (r"window|index_topk$|local_attention|attention_chunk", lambda v: min(v, 4)),
    (r"chunk|block_size$", lambda v: min(v, 4)),
    (r"topk_blocks|num_local_blocks", lambda v: min(v, 1)),
    (r"original_max_position", lambda _: 16),
    (r"max_position|max_seq|n_positions|n_ctx|max_length|context", lambda _: 32),
    # Experts.
    (r"n_group$|topk_group$|expert_group$", lambda v: min(v, 1)),
    (
        r"experts_per_tok|num_selected|moe_top_?k|moe_k$|top_k$|topk$",
        lambda v: min(v, 2),
    ),
    (r"zero_expert", lambda v: min(v, 2)),
    (r"shared_experts", lambda v: min(v, 1)),
    (r"num_experts|n_routed|local_experts|expert_num|num_expert", lambda v: min(v, 4)),
    (r"first_k_dense|dense_layers|num_dense", lambda v: min(v, 1)),
    (r"kv_shared", lambda _: 0),
    # Heads.
    (r"linear_num_key_heads", lambda _: 2),
    (r"linear_num_value_heads", lambda _: 4),
    (r"mamba.*heads", lambda _: SSM_HEADS),
    (r"n_groups|ngroups", lambda v: min(v, 2)),
    (r"index_n_heads|index_num_heads", lambda v: min(v, 4)),
    (r"mamba_d_ssm", lambda _: 2 * HIDDEN),
    (r"mamba.*(head_?dim|d_head)", lambda _: HEAD_DIM),
    (r"^attention_head_dim$", lambda _: 2 * HEAD_DIM),
    (r"^attention_hidden_size$", lambda _: 2 * HIDDEN),
    (r"head_dim$|head_size$|^d_kv$|^d_head$|kv_channels", lambda _: HEAD_DIM),
    (r"(qk|v).*head_dim|rotary_dim|rope_dim", lambda _: HEAD_DIM),
    (r"rank$", lambda v: min(v, 16)),
    # Sizes.
    (r"state|d_conv|conv_kernel", lambda v: min(v, 8)),
    (r"(moe|expert).*(intermediate|ffn|hidden)", lambda _: 16),
    (r"intermediate|ffn|n_inner|d_ff|feed_forward|mlp_dim", lambda _: 48),
    (r"hidden|n_embd|d_model|embed|^dim$", lambda v: min(v, HIDDEN)),
]


def _number(key: str, value: Any, heads: list[int]) -> Any:
    """A small number in place of a number that is a size; any other value itself."""
    if not _is_count(value) or value <= 0 and not key.endswith("_id"):
        return value
    if HEADS.search(key):
        return min(value, NUM_HEADS)
    if re.search(r"key_value_heads|kv_heads|num_kv$|n_head_kv|query_groups", key):
        return _kv_heads(value, heads)
    for pattern, change in RULES:
        if re.search(pattern, key):
            return change(value)
    return HIDDEN if value >= 64 else value
