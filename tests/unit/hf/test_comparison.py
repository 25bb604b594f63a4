"""Classes of models beside torch: arguments of attention, verdicts, and their table."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from tests.command import run
from tests.marks import drawn
from tests.unit.hf.architectures import config_of
from tests.unit.hf.models import llama, save

import torch  # isort: skip
import transformers  # isort: skip
from torchax import default_env  # isort: skip
from torchax.interop import jax_view, torch_view  # isort: skip
from transformers.masking_utils import create_causal_mask  # isort: skip

from zinf import hf  # isort: skip
from zinf.core.process.user_cache import recall  # isort: skip
from zinf.hf import attention, comparison  # isort: skip
from zinf.hf.comparison import AGREES, DIFFERS, NOT_TINY, REFUSED  # isort: skip
from zinf.hf.module import build  # isort: skip
from zinf.hf.tiny import LENGTH, tiny  # isort: skip

pytestmark = pytest.mark.slow
TABLE = json.loads(Path(__file__).with_name("compared.json").read_text())
CLASSES = TABLE["classes"]
AGREEING = [name for name, row in CLASSES.items() if row["verdict"] == AGREES]
# Keys that an index selects (of other tokens, and of blocks), beside others.
FIXED = ["deepseek_v32", "minimax_m3_vl_text"]
CAUSAL = "AutoModelForCausalLM"


SEEN = np.tri(8, dtype=bool)[None, None]
# A causal mask as models give it, or leave it to the attention.
MASKS = {
    "none": None,
    "booleans": SEEN,
    "numbers": np.where(SEEN, 0, np.finfo("float32").min).astype("float32"),
}


def attended(form="none", **named):
    """The attention of zinf: two heads of queries, one of keys, with a causal mask."""
    random = np.random.default_rng(0)
    q, k, v = (random.normal(size=(1, n, 8, 4)).astype("float32") for n in (2, 1, 1))
    module = torch.nn.Module()
    module.indexer = torch.nn.Module()
    module.indexer.block_size = 2
    with default_env():
        is_array = {n: isinstance(x, np.ndarray) for n, x in named.items()}
        arrays = {
            n: torch_view(jnp.asarray(x)) if is_array[n] else x
            for n, x in named.items()
        }
        given = (torch_view(jnp.asarray(x)) for x in (q, k, v))
        mask = MASKS[form]
        mask = None if mask is None else torch_view(jnp.asarray(mask))
        found, _ = attention.attend(module, *given, mask, **arrays)
    return np.asarray(jax_view(found)), (q, k, v)


@pytest.mark.parametrize("form", MASKS)
@pytest.mark.parametrize("size", [1, 2])
def test_a_query_sees_what_its_layer_selects_and_the_mask_allows(size, form):
    """`size` keys to a block; a later key is not seen though it is selected."""
    chosen = np.random.default_rng(1).permuted(
        np.tile(np.arange(8 // size), (1, 8, 1)), axis=-1
    )[..., :3]
    chosen[..., 0] = np.arange(8) // size
    if size == 1:
        found, (q, k, v) = attended(form, indices=chosen)
    else:
        chosen[0, 5, 2] = -1
        found, (q, k, v) = attended(form, block_indices=chosen[:, None])
    sees = np.zeros((8, 8), bool)
    for row, blocks in enumerate(chosen[0]):
        for block in blocks[blocks >= 0]:
            sees[row, block * size : block * size + size] = True
    mask = torch.tensor(sees & np.tri(8, dtype=bool))
    given = (torch.tensor(x).expand(1, 2, 8, 4) for x in (q, k, v))
    wanted = torch.nn.functional.scaled_dot_product_attention(*given, attn_mask=mask)
    assert np.allclose(found, wanted.swapaxes(1, 2).numpy(), atol=1e-6)


def test_an_unknown_argument_of_an_attention_is_refused():
    attended(position_ids=np.arange(8)[None], new_thing=None, other=False)
    with pytest.raises(NotImplementedError, match="Module passes 'new_thing'"):
        attended(new_thing=np.ones(3))


def test_a_class_without_torchs_own_attention_gets_a_mask_of_numbers():
    """DeepSeek V4 appends numbers to it: as booleans, 0 (seen) would hide a key."""
    kind = transformers.DeepseekV4ForCausalLM
    module = build(tiny(kind.config_class()), torch.float32, CAUSAL)
    assert module.config._attn_implementation == attention.ADDING
    with default_env():
        ids = torch_view(jnp.zeros((1, 4, 1)))
        mask = create_causal_mask(
            module.config, ids, None, None, torch_view(jnp.arange(4)[None])
        )
    lowest = np.finfo("float32").min
    wanted = np.where(np.tri(4, dtype=bool), 0, lowest)
    assert np.array_equal(jax_view(mask)[0, 0], wanted)


@pytest.mark.parametrize(
    "name", [*FIXED, *drawn([n for n in AGREEING if n not in FIXED], 1)]
)
def test_the_table_says_what_a_comparison_finds(name):
    try:
        config = tiny(transformers.CONFIG_MAPPING[name]())
    except Exception as error:  # Each class refuses sizes in its own way.
        pytest.skip(f"compare_classes.py gives it sizes: {error}")
    verdict = comparison.compare(config, CAUSAL)
    if verdict.state == NOT_TINY:
        pytest.skip(f"compare_classes.py gives it sizes: {verdict.reason}")
    assert verdict.state == CLASSES[name]["verdict"] == AGREES, str(verdict)


def test_the_table_has_a_verdict_and_its_reason_for_each_causal_class():
    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if f"transformers {transformers.__version__}" in TABLE["versions"]:
        assert set(CLASSES) == set(mapping)
    for name, row in CLASSES.items():
        reason = "logits" if row["verdict"] in (AGREES, DIFFERS) else "reason"
        assert row["weights"] in ("all", "no small model"), name
        assert row["verdict"] in (AGREES, DIFFERS, REFUSED, NOT_TINY), name
        assert row[reason], name


def test_nine_of_ten_classes_are_equal_within_the_rounding_of_two_layers():
    """The tolerances of tests/unit/hf/test_architectures.py."""
    equal = [
        name
        for name in AGREEING
        if float(CLASSES[name]["logits"]) <= 2e-6
        and float(CLASSES[name]["gradients"]) <= 1e-5
    ]
    assert len(equal) >= 0.9 * len(CLASSES)


def test_a_tiny_configuration_keeps_what_depends_on_the_length():
    """Limits are below the length, and each kind of layer is there."""
    window = tiny(transformers.Gemma2Config(sliding_window=4096))
    assert window.sliding_window < LENGTH
    assert set(window.layer_types) == {"sliding_attention", "full_attention"}
    assert tiny(transformers.DeepseekV32Config()).index_topk < LENGTH
    assert tiny(config_of("llama with dynamic")).max_position_embeddings < LENGTH
    short = tiny(config_of("phi3 with longrope"))
    assert short.rope_parameters["original_max_position_embeddings"] < LENGTH


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/zinf/compared"


def test_a_class_that_differs_is_refused_once_compared(
    own_cache, tmp_path, monkeypatch
):
    """The attention forgets its mask; the verdict holds when it does not again."""
    save(llama(), tmp_path / "model")
    model, attend = hf.load(tmp_path / "model"), attention.attend

    def forgetful(module, q, k, v, mask, **named):
        return attend(module, q, k, v, None, **named | {"is_causal": False})

    with monkeypatch.context() as context:
        context.setattr(attention, "attend", forgetful)
        with pytest.raises(NotImplementedError, match=r"LlamaForCausalLM .* logits"):
            hf.open_model(model, {}, rows=1, length=8)
    attention.register()
    (file,) = own_cache.iterdir()
    with pytest.raises(NotImplementedError, match="LlamaForCausalLM"):
        comparison.check_class(model)
    done = run("verify", tmp_path / "model")
    assert "LlamaForCausalLM agrees: logits are" in done.output
    assert recall(file)["state"] == AGREES
    monkeypatch.setattr(comparison, "compare", None)
    comparison.check_class(model)


def test_a_class_that_cannot_be_computed_is_refused_before_a_weight_is_read(
    own_cache, tmp_path, monkeypatch
):
    save(llama(), tmp_path / "model")
    model = hf.load(tmp_path / "model")
    for path in (tmp_path / "model").glob("*.safetensors"):
        path.write_bytes(b"no weights")

    def look_at_values(module, q, *_, **__):
        return q[: int(q.sum())], None

    monkeypatch.setattr(attention, "attend", look_at_values)
    words = r"no way to run its class LlamaForCausalLM \(ConcretizationTypeError: "
    with pytest.raises(NotImplementedError, match=words):
        hf.open_model(model, {}, rows=1, length=8)


def test_a_class_that_cannot_be_made_tiny_is_warned_of(tmp_path, monkeypatch, caplog):
    save(llama(), tmp_path / "model")
    model = hf.load(tmp_path / "model")
    monkeypatch.setattr(comparison, "tiny", lambda _: 1 // 0)
    comparison.check_class(model)
    assert "Nobody has compared this model with torch: Llama" in caplog.text
    assert f"{NOT_TINY} (ZeroDivisionError" in caplog.text
