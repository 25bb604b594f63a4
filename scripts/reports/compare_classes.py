"""Draws tests/unit/hf/compared.json: which causal classes agree with torch.

A tiny model of each class of transformers is compared as `zinf.hf.comparison` does it,
in a process of its own with limits of time and memory. "weights" says what became of
the files that `save_pretrained` writes of it. Where logits or gradients are further off
than `LOGITS` and `GRADIENTS`, "rounding" says how far torch in float32 is off torch in
float64, on the same model. Classes that the table has for the installed versions are
left out, so the script goes on where it was stopped. All that are missing, then two
anew, then the weights alone of all classes, then 40 drawn at random:

    nice -n 10 python scripts/reports/compare_classes.py
    nice -n 10 python scripts/reports/compare_classes.py llama opt
    nice -n 10 python scripts/reports/compare_classes.py --weights
    nice -n 10 python scripts/reports/compare_classes.py --draw 40
"""

import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from zinf import hf
from zinf.hf import comparison
from zinf.hf.comparison import NOT_COMPARED, NOT_TINY, compare, versions
from zinf.hf.tiny import LENGTH, VOCAB, tiny
from zinf.hf.weights import to_numpy

TABLE = Path(__file__).parents[2] / "tests/unit/hf/compared.json"
# Classes that tests compare with torch as well; they come last.
TESTED = json.loads(TABLE.with_name("architectures.json").read_text())
AUTO_CLASS = "AutoModelForCausalLM"
LIMIT_SECONDS = 300
LIMIT_BYTES = 24 << 30  # Of address space, of which XLA reserves much.
# Shares of the largest entry: two layers round float32 numbers a few times.
LOGITS, GRADIENTS = 2e-6, 1e-5
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
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8}
MLA |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "head_dim": 16}
DOTS = MLA | {f"swa_{name}": value for name, value in MLA.items()}
DOTS |= {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4}
DOTS |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
DOTS |= {"topk_group": 1, "moe_intermediate_size": 16, "sliding_window": 4}
DOTS |= {"num_key_value_heads": 4, "num_hidden_layers": 4, "index_topk": 4}
DOTS |= {"index_head_dim": 16, "index_n_heads": 4, "n_shared_experts": 1}
DOTS |= {"shared_experts_intermediate_size": 16, "first_k_dense_replace": 1}
ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
# Small configurations, beside `SMALL`, of classes whose defaults do not become one.
GIVEN = {
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4,
        "rope_parameters": {
            kind: ROTARY | {"mrope_section": [2, 1, 1]}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 32,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {
            "ffn_hidden_size": 16,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "hidden_size": 32,
        },
    },
    "dory": {
        "num_hidden_layers": 4,
        "head_dim": 8,
        "sliding_window": 4,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
    },
    "dots3_note": {
        "text_config": SMALL | DOTS,
        "vision_config": {"adapter_out_dim": SMALL["hidden_size"]},
        "audio_config": {"adapter_out_dim": SMALL["hidden_size"]},
    },
    "dots3_note_text": DOTS,
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
    },
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "local"],
        "attention_head_size": 8,
        "axial_pos_embds": False,
        "feed_forward_size": 48,
        "hidden_dropout_prob": 0.0,
        "local_attention_probs_dropout_prob": 0.0,
        "local_attn_chunk_length": 4,
    },
    "xlstm": {"hidden_size": 64, "num_heads": 4, "chunk_size": 4, "num_blocks": 2},
    "xmod": {"default_language": "en_XX", "is_decoder": True},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "use_mamba_kernels": False,
    },
}
Row = dict[str, str]


def unknown(state: str, reason: str) -> Row:
    return {"verdict": state, "reason": " ".join(reason.split())[:200]}


NOT_DRAWN = unknown(NOT_COMPARED, "not drawn yet")


def configs(name: str) -> Iterator[Callable[[], PretrainedConfig]]:
    """Ways to make a small configuration of a class, the best first."""
    kind = transformers.CONFIG_MAPPING[name]
    given = TESTED.get(name, {})
    small = given.get("whole", SMALL | given)
    if name in GIVEN:
        # `tiny` would change sizes that belong together.
        given = GIVEN[name]
        yield lambda: kind(**given if "text_config" in given else SMALL | given)
        return
    # Some classes have no complete defaults.
    yield lambda: tiny(kind())
    yield lambda: tiny(kind(**small))
    yield lambda: kind(**small)
    if f"{name}_text" in transformers.CONFIG_MAPPING:
        for make in configs(f"{name}_text"):
            yield lambda make=make: kind(text_config=make().to_dict())


def row(name: str) -> Row:
    """What the table says of a class, by its model_type."""
    found = NOT_DRAWN  # The first reason is that of the published sizes.
    for make in configs(name):
        try:
            config = make()
        except Exception as error:
            if found is NOT_DRAWN:
                found = unknown(NOT_TINY, f"{type(error).__name__}: {error}")
            continue
        verdict = compare(config, AUTO_CLASS)
        if not verdict.reason:
            figures = f"{verdict.logits:.1e}", f"{verdict.gradients:.1e}"
            numbers = dict(zip(("logits", "gradients"), figures, strict=True))
            found = {"verdict": verdict.state, **numbers}
            if verdict.logits > LOGITS or verdict.gradients > GRADIENTS:
                found["rounding"] = rounding(config)
            return found | weights(name)
        if found is NOT_DRAWN or verdict.state != NOT_TINY:
            found = unknown(verdict.state, verdict.reason)
        if verdict.state != NOT_TINY:
            break
    return found | weights(name)


def rounding(config: PretrainedConfig) -> str:
    """How far torch in float32 is off torch in float64: logits, and gradients."""
    ids = np.random.default_rng(0).integers(3, VOCAB, (comparison.ROWS, LENGTH))
    try:
        module = comparison._torch_model(config, AUTO_CLASS, 0)
        given = AUTO_CLASS, ids, 0
        double = deepcopy(module).double()
        narrow, _, narrow_gradients = comparison._torch_results(module, *given)
        wide, _, wide_gradients = comparison._torch_results(double, *given)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:100]
    largest = max(np.abs(g).max() for g in wide_gradients.values())
    off = max(
        np.abs(g - narrow_gradients[path]).max() / max(np.abs(g).max(), 1e-3 * largest)
        for path, g in wide_gradients.items()
    )
    return f"{np.abs(narrow - wide).max() / np.abs(wide).max():.1e}, {off:.1e}"


def weights(name: str) -> Row:
    """What became of the tensors of saved files, and of the parameters of the model."""
    found = "no small model"
    for make in configs(name):
        try:
            config = make()
            module = comparison._torch_model(config, AUTO_CLASS, 0)
        except Exception:
            continue
        try:
            with tempfile.TemporaryDirectory() as folder:
                module.save_pretrained(folder)
                # Published files of some classes have more than the class of text.
                config.save_pretrained(folder)
                found = account(module, hf.load(folder))
        except Exception as error:
            found = f"{type(error).__name__}: {error}"[:200]
        break
    return {"weights": found}


def account(module: transformers.PreTrainedModel, model: hf.Model) -> str:
    """What is wrong with the weights of a model that were read; "all" if nothing."""
    files, stored = model.open_weights()
    with files:
        wanted = dict(module.named_parameters()) | dict(module.named_buffers())
        kept = {*model.specs, *model.persistent_buffers()}
        wrong = {
            "not used": [*stored.unused],
            "absent": sorted(kept - set(stored.specs)),
            "other": [
                name
                for name in sorted(kept & set(stored.specs))
                if not np.array_equal(stored.whole(name), to_numpy(wanted[name]))
            ],
        }
    text = "; ".join(f"{key}: {', '.join(x)}" for key, x in wrong.items() if x)
    return text[:200] or "all"


def apart(of: Callable[[], Row]) -> Row:
    """A row that is made in a process of its own."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
        torch.set_num_threads(1)
        try:
            found = of()
        except BaseException as error:
            found = unknown(NOT_COMPARED, f"{type(error).__name__}: {error}")
        os.write(write, json.dumps(found).encode())
        os._exit(0)
    os.close(write)
    end = time.monotonic() + LIMIT_SECONDS
    while not os.waitpid(child, os.WNOHANG)[0]:
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return unknown(NOT_COMPARED, f"it took over {LIMIT_SECONDS} s")
        time.sleep(0.1)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    return json.loads(text) if text else unknown(NOT_COMPARED, "its process died")


def save(rows: dict[str, Row]) -> None:
    lines = [f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(rows.items())]
    date = datetime.now(UTC).date().isoformat()
    TABLE.write_text(
        f'{{\n  "date": "{date}",\n  "versions": "{versions()}",\n  "classes": {{\n'
        + ",\n".join(lines)
        + "\n  }\n}\n"
    )


def main(asked: list[str]) -> None:
    transformers.utils.logging.disable_progress_bar()
    names = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, key=lambda n: (n in TESTED, n))
    rows = dict.fromkeys(names, NOT_DRAWN)
    if TABLE.is_file():
        found = json.loads(TABLE.read_text())
        if found["versions"] == versions():
            rows |= found["classes"]
    if asked == ["--weights"]:
        for name in names:
            rows[name] |= apart(partial(weights, name))
            print(name, rows[name]["weights"], flush=True)
        return save(rows)
    if asked[:1] == ["--draw"]:
        asked = random.Random(0).sample(names, int(asked[1]))
    for name in asked or [name for name in names if rows[name] == NOT_DRAWN]:
        rows[name] = apart(partial(row, name))
        print(name, rows[name], flush=True)
        save(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
