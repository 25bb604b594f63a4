"""Models of `transformers` as pure functions, and their weights in and out."""

import json

import numpy as np
import optax
import pytest

from tests.unit.hf.hub import hub
from tests.unit.hf.models import (
    VOCAB,
    gpt2,
    llama,
    make,
    mixtral,
    save,
    tokens,
    torch_logits,
)

import jax  # isort: skip
import jax.numpy as jnp  # isort: skip
import torch  # isort: skip
import transformers  # isort: skip
from huggingface_hub import constants  # isort: skip
from safetensors.numpy import load_file  # isort: skip

from zinf import hf  # isort: skip

# Logits of float32 models of two layers: a few units of rounding of the largest entry.
TOLERANCE = 2e-6
STREAMED = {"execution": "streamed", "segment": {"remat": "always"}}


def engine_of(folder, config=None, **named):
    model = hf.load(folder)
    batch = {"input_ids": tokens()}
    return hf.initialize(
        model, optax.adamw(1e-2), config or STREAMED, batch=batch, **named
    )


def tensors(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(load_file(path))
    return found


def off(found, wanted):
    return np.abs(np.asarray(found) - wanted).max() / np.abs(wanted).max()


def test_load_reads_no_weight(tmp_path):
    llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    model = hf.load(tmp_path)
    torch_model = make(llama(tie_word_embeddings=True))
    names = {n: tuple(p.shape) for n, p in torch_model.named_parameters()}
    assert {name: spec.shape for name, spec in model.specs.items()} == names
    assert "lm_head.weight" not in names
    assert all(p.is_meta for p in model.module.parameters())
    assert not any(b.is_meta for b in model.module.buffers())


def test_a_parameter_may_be_larger_than_any_memory(tmp_path):
    words = 2**45  # An embedding and a head of 4 PiB each.
    llama(vocab_size=words).save_pretrained(tmp_path)
    model = hf.load(tmp_path)
    assert model.specs["lm_head.weight"].shape == (words, 32)
    assert model.specs["model.embed_tokens.weight"].shape == (words, 32)
    assert {b.device.type for b in model.module.buffers()} == {"cpu"}


def test_padding_and_ignored_labels_do_not_change_the_loss(tmp_path):
    """As in torch: what is padded or has the label -100 takes no part."""
    torch_model = save(llama(), tmp_path)
    model = hf.load(tmp_path)
    params = {
        n: jnp.asarray(p.numpy(force=True)) for n, p in torch_model.named_parameters()
    }
    ids = tokens()
    labels = ids.copy()
    labels[0, :5] = -100
    mask = np.ones_like(ids)
    mask[1, 8:] = 0
    labels[1, 8:] = -100
    batch = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    with torch.no_grad():
        wanted = torch_model(**{n: torch.tensor(x).long() for n, x in batch.items()})
    loss = jax.jit(model.loss)(params, batch)
    # One float32 sum over 17 tokens in another order.
    assert abs(float(loss) - float(wanted.loss)) < 1e-6
    ids[1, 8:] = 3
    assert jax.jit(model.loss)(params, batch | {"input_ids": ids}) == loss


@pytest.mark.slow
def test_dropout_is_drawn_from_the_key_in_training_alone(tmp_path):
    save(gpt2(), tmp_path)
    model = hf.load(tmp_path)
    assert model.is_random
    engine = engine_of(tmp_path)
    first = engine.step({"input_ids": tokens()})["loss"]
    with engine_of(tmp_path, rng=jax.random.key(1)) as other:
        assert other.step({"input_ids": tokens()})["loss"] != first
        assert other.evaluate({"input_ids": tokens()}) == other.evaluate(
            {"input_ids": tokens()}
        )
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("make_config", [llama, mixtral, gpt2])
def test_what_is_imported_and_exported_is_what_transformers_loads(
    make_config, tmp_path
):
    """Untouched weights bit for bit; after a step, `transformers` gives our logits."""
    torch_model = save(make_config(), tmp_path / "model")
    wanted = torch_logits(torch_model, tokens())
    with engine_of(tmp_path / "model") as engine:
        hf.export(engine, tmp_path / "same", max_shard_bytes=20_000)
        engine.step({"input_ids": tokens()})
        hf.export(engine, tmp_path / "tuned", max_shard_bytes=20_000)
        model, params = engine.model, engine.params()
    ours, theirs = tensors(tmp_path / "same"), tensors(tmp_path / "model")
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "tuned", attn_implementation="eager"
    )
    logits = torch_logits(loaded.eval(), tokens())
    assert (
        off(jax.jit(model.logits)(params, {"input_ids": tokens()}), logits) < TOLERANCE
    )
    assert off(logits, wanted) > 1e-3


@pytest.mark.slow
def test_weights_in_bfloat16_become_masters_and_their_copies(tmp_path):
    torch_model = make(llama(), dtype=torch.bfloat16)
    torch_model.save_pretrained(tmp_path)
    config = STREAMED | {"bf16": {"enabled": True}}
    with engine_of(tmp_path, config) as engine:
        name = "model.layers.1.mlp.up_proj.weight"
        value = dict(torch_model.named_parameters())[name].float().numpy(force=True)
        assert engine.get(name).dtype == np.float32
        assert np.array_equal(engine.get(name), value)
        assert engine.get(name, "compute").dtype == jnp.bfloat16
        loss = engine.step({"input_ids": tokens()})["loss"]
    with torch.no_grad():
        ids = torch.tensor(tokens()).long()
        wanted = float(torch_model(ids, labels=ids).loss)
    # bfloat16 has 8 bits: 1/256 of the logits, of which the loss is a mean.
    assert abs(loss - wanted) < 0.01 * wanted


# What is wrong with a model's folder: how to break it, the error, and words of it.
def no_shard(folder):
    sorted(folder.glob("*.safetensors"))[1].unlink()


def no_weights(folder):
    for path in folder.glob("*.safetensors*"):
        path.unlink()


def pickles(folder):
    no_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80")


def wider(folder):
    change(folder, hidden_size=64)


def another_kind(folder):
    change(folder, model_type="no_such_model")


def remote_code(folder):
    change(folder, model_type="own", auto_map={"AutoConfig": "own.Config"})


def quantized(method):
    def spoil(folder):
        change(folder, quantization_config={"quant_method": method})

    spoil.__name__ = method
    return spoil


def gguf(folder):
    no_weights(folder)
    (folder / "model-Q4_K_M.gguf").write_bytes(b"GGUF")


def cut_off(folder):
    path = sorted(folder.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-1])


def no_config(folder):
    (folder / "config.json").unlink()


def no_language_model(folder):
    change(folder, model_type="vit")


def lacking(folder):
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    file = folder / content["weight_map"]["model.norm.weight"]
    found = load_file(file)
    del found["model.norm.weight"], content["weight_map"]["model.norm.weight"]
    from_numpy(found, file)
    index.write_text(json.dumps(content))


def change(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def from_numpy(found, file):
    from safetensors.numpy import save_file

    save_file(found, file, metadata={"format": "pt"})


BROKEN = [
    (no_shard, FileNotFoundError, "lacks model-0000.*which .*index.json names"),
    (no_weights, FileNotFoundError, "no file .*safetensors"),
    (pickles, NotImplementedError, "pytorch_model.bin.*save_pretrained"),
    (wider, ValueError, r"\[96, 64\] here and \[96, 32\] there.*config.json"),
    (another_kind, ValueError, "config.json.*'no_such_model'.*Install"),
    (remote_code, NotImplementedError, "trust_remote_code"),
    *(
        (quantized(method), NotImplementedError, f"config.json.*{method}.*bfloat16")
        for method in ("bitsandbytes", "gptq", "awq")
    ),
    (gguf, NotImplementedError, "model-Q4_K_M.gguf is quantized for llama.cpp"),
    (cut_off, ValueError, "model-00002-of-.*safetensors"),
    (no_config, FileNotFoundError, "has no config.json"),
    (no_language_model, ValueError, "no AutoModelForCausalLM for the arch.* 'vit'"),
    (lacking, ValueError, "no tensor for 1 leaves: 'model.norm.weight'"),
]


@pytest.mark.parametrize(
    ("spoil", "error", "words"), BROKEN, ids=lambda x: getattr(x, "__name__", "")
)
def test_a_broken_model_is_refused_by_name(spoil, error, words, tmp_path):
    save(llama(), tmp_path)
    spoil(tmp_path)
    with pytest.raises(error, match=f"(?s){words}"):
        engine_of(tmp_path, {"execution": "fused"})


def test_files_are_compared_without_planning(tmp_path):
    save(llama(), tmp_path)
    hf.load(tmp_path).check_files()
    wider(tmp_path)
    with pytest.raises(ValueError, match="not those of this model"):
        hf.load(tmp_path).check_files()


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ({"refuses": "GatedRepo"}, PermissionError, r"some/model.*\(401\).*Accept"),
        ({"refuses": "RepoNotFound"}, FileNotFoundError, r"some/model \(404\).*spell"),
        ({"cuts": "config.json"}, OSError, "config.json for some/model was cut off"),
    ],
    ids=["gated", "absent", "cut off"],
)
def test_a_hub_that_refuses_is_quoted(how, error, words, tmp_path, monkeypatch):
    # A download that is cut off is tried again five times, a second apart.
    monkeypatch.setattr(
        "huggingface_hub.file_download.time.sleep", lambda seconds: None
    )
    make(llama()).config.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with hub(tmp_path / "model", **how) as address:
        url = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
        with pytest.raises(error, match=words):
            hf.load("some/model")


def test_weights_of_a_hub_that_are_cut_off_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "huggingface_hub.file_download.time.sleep", lambda seconds: None
    )
    save(llama(), tmp_path / "model")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    shard = sorted((tmp_path / "model").glob("*.safetensors"))[1].name
    with hub(tmp_path / "model", cuts=shard) as address:
        url = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
        model = hf.load("some/model")
        with pytest.raises(OSError, match=f"{shard} for some/model was cut off"):
            model.open_weights()


def test_a_model_of_a_hub_is_loaded(tmp_path, monkeypatch):
    save(llama(), tmp_path / "model")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with hub(tmp_path / "model") as address:
        url = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
        model = hf.load("some/model")
        assert not list(model.folder.glob("*.safetensors"))
        files, weights = model.open_weights()
    with files:
        assert weights.specs.keys() == model.specs.keys()


# What is wrong with a batch, and words of the error.
WRONG = [
    ({"input_ids": [[3, 4, VOCAB]]}, r"sample 0 .* has 96 at token 2.*96 words"),
    (
        {"input_ids": [[3, 4]], "labels": [[3, -1]]},
        "labels of sample 0.*-100 for tokens",
    ),
    (
        {"input_ids": [[3, 4]], "labels": [[3, -100]]},
        "No token of the batch is trained",
    ),
    ({"input_ids": [[3] * 33]}, "have 33 tokens, and .* was made for 32"),
]


@pytest.mark.parametrize(("given", "words"), WRONG)
def test_a_wrong_batch_is_refused(given, words, tmp_path):
    llama().save_pretrained(tmp_path)
    batch = {name: np.int32(x) for name, x in given.items()}
    with pytest.raises(ValueError, match=words):
        hf.load(tmp_path).check(batch)


def test_a_folder_that_is_not_there_is_no_model_of_the_hub(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        hf.load(tmp_path / "absent")
