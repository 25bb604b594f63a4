"""Models of `transformers` as pure functions, and their weights in and out."""

import json
import re
import shutil
from functools import partial

import numpy as np
import optax
import pytest

from tests.unit.hf.hub import hub
from tests.unit.hf.models import (
    NVFP4,
    STREAMED,
    TOLERANCE,
    VOCAB,
    change_files,
    gpt2,
    llama,
    make,
    mean_loss,
    mixtral,
    model_folder,
    off,
    on_tier,
    params_of,
    refusals,
    reloaded,
    save,
    to_nvfp4,
    tokens,
    torch_logits,
    torch_loss,
)

import jax  # isort: skip
import jax.numpy as jnp  # isort: skip
import torch  # isort: skip
import transformers  # isort: skip
from huggingface_hub import constants  # isort: skip
from safetensors.numpy import load_file, save_file  # isort: skip

import zinf  # isort: skip
from zinf import hf  # isort: skip
from zinf.hf.completion import settings_of  # isort: skip
from zinf.hf.model import TOKENIZER_FILES  # isort: skip
from zinf.core.plan import Rates  # isort: skip

BATCH = {"input_ids": tokens()}


def engine_of(folder, config=STREAMED, **named):
    model = hf.load(folder)
    return hf.initialize(model, optax.adamw(1e-2), config, batch=BATCH, **named)


def tensors(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(load_file(path))
    return found


def test_load_reads_no_weight(tmp_path):
    llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    model = hf.load(tmp_path)
    torch_model = make(llama(tie_word_embeddings=True))
    names = {n: tuple(p.shape) for n, p in torch_model.named_parameters()}
    assert {name: spec.shape for name, spec in model.specs.items()} == names
    assert "lm_head.weight" not in names
    assert all(p.is_meta for p in model.module.parameters())
    words = 2**45  # An embedding and a head of 4 PiB each.
    llama(vocab_size=words).save_pretrained(tmp_path)
    model = hf.load(tmp_path)
    assert model.specs["lm_head.weight"].shape == (words, 32)
    assert {b.device.type for b in model.module.buffers()} == {"cpu"}


def test_padding_and_ignored_labels_do_not_change_the_loss(tmp_path):
    """As in torch: what is padded or has the label -100 takes no part."""
    torch_model = save(llama(), tmp_path)
    model, params = hf.load(tmp_path), params_of(torch_model)
    ids, mask = tokens(), np.ones_like(tokens())
    labels = ids.copy()
    labels[0, :5] = labels[1, 8:] = -100
    mask[1, 8:] = 0
    batch = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    with torch.no_grad():
        wanted = torch_model(**{n: torch.tensor(x).long() for n, x in batch.items()})
    loss = jax.jit(mean_loss(model))(params, batch)
    # One float32 sum over 17 tokens in another order.
    assert abs(float(loss) - float(wanted.loss)) < 1e-6
    ids[1, 8:] = 3
    assert jax.jit(mean_loss(model))(params, batch | {"input_ids": ids}) == loss
    # Without labels, all tokens are trained on but those without a mask.
    del batch["labels"]
    unmasked = np.where(mask == 1, ids, -100)
    both = [
        jax.jit(mean_loss(model))(params, batch | x) for x in ({}, {"labels": unmasked})
    ]
    assert both[0] == both[1] != loss


def test_measured_rates_predict_and_change_no_loss(tmp_path):
    save(llama(), tmp_path)
    found = {}
    for rates in ("fixed", "measured"):
        with engine_of(tmp_path, STREAMED | {"rates": rates}) as engine:
            found[rates] = engine.plan.rates, engine.step(BATCH)["loss"]
    assert found["fixed"][1] == found["measured"][1]
    assert found["fixed"][0] == Rates() != found["measured"][0]


def test_dropout_is_drawn_from_the_key_in_training_alone(tmp_path):
    torch_model = save(gpt2(), tmp_path)
    assert hf.load(tmp_path).is_random
    with engine_of(tmp_path, {}) as engine:
        plain = engine.evaluate(BATCH)
        first = engine.step(BATCH)["loss"]
    with engine_of(tmp_path, {}, rng=jax.random.key(1)) as engine:
        other = engine.step(BATCH)["loss"]
    assert plain == pytest.approx(torch_loss(torch_model, tokens()), rel=1e-6)
    assert len({plain, first, other}) == 3


@pytest.mark.parametrize("make_config", [mixtral, gpt2])
def test_what_is_imported_and_exported_is_what_transformers_loads(
    make_config, tmp_path
):
    """Untouched weights bit for bit; after a step, `transformers` gives our logits."""
    torch_model = save(make_config(), tmp_path / "model")
    wanted = torch_logits(torch_model, tokens())
    with engine_of(tmp_path / "model") as engine:
        hf.export(engine, tmp_path / "same", max_shard_bytes=20_000)
        engine.step(BATCH)
        hf.export(engine, tmp_path / "tuned", max_shard_bytes=20_000)
        model, params = engine.model, engine.params()
    ours, theirs = tensors(tmp_path / "same"), tensors(tmp_path / "model")
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    sizes = [path.stat().st_size for path in (tmp_path / "same").glob("*.safetensors")]
    assert len(sizes) > 1
    logits = torch_logits(reloaded(tmp_path / "tuned"), tokens())
    assert off(jax.jit(model.logits)(params, BATCH), logits) < TOLERANCE
    assert off(logits, wanted) > 1e-3


def test_an_average_is_exported_as_transformers_loads_it(tmp_path):
    save(mixtral(), tmp_path / "model")
    tx = optax.chain(optax.adamw(1e-2), zinf.with_ema(0.5))
    model = hf.load(tmp_path / "model")
    with hf.initialize(model, tx, STREAMED, batch=BATCH) as engine:
        engine.step(BATCH)
        hf.export(engine, tmp_path / "average", kind="ema")
        losses = [engine.evaluate(BATCH, kind=kind) for kind in ("ema", "master")]
    found = torch_loss(reloaded(tmp_path / "average"), tokens())
    assert found == pytest.approx(losses[0], rel=1e-5)
    assert abs(found - losses[1]) > 1e-3


def test_files_beside_the_weights_are_exported_as_they_are(tmp_path, caplog):
    """A model that is tuned must stop at the tokens where it stopped before."""
    folder = model_folder(tmp_path)
    settings = {"eos_token_id": [1, 20, 21], "do_sample": True, "temperature": 0.6}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    (folder / "modeling_own.py").write_text("raise SystemExit")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with caplog.at_level("INFO"), engine_of(folder) as engine:
        hf.export(engine, tmp_path / "tuned")
    after = {path.name: path.read_bytes() for path in (tmp_path / "tuned").iterdir()}
    copied = {n for n in before if not n.endswith((".safetensors", ".index.json"))}
    copied -= {"config.json", "modeling_own.py"}
    assert {"generation_config.json", "tokenizer.json"} <= copied
    assert {n: after[n] for n in copied} == {n: before[n] for n in copied}
    assert "modeling_own.py" not in after and "modeling_own.py" in caplog.text


def test_a_second_tensor_for_a_tied_parameter_is_compared(tmp_path):
    """What merges by others write: both names, with another head."""
    save(llama(tie_word_embeddings=True), tmp_path, shard="5GB")
    path = tmp_path / "model.safetensors"
    found = load_file(path)
    assert "lm_head.weight" not in found
    found["lm_head.weight"] = found["model.embed_tokens.weight"].copy()
    save_file(found, path, metadata={"format": "pt"})
    hf.load(tmp_path).check_files()
    found["lm_head.weight"][-1, -1] += 1
    save_file(found, path, metadata={"format": "pt"})
    names = "'lm_head.weight' and 'model.embed_tokens.weight', which differ"
    with pytest.raises(ValueError, match=names):
        hf.load(tmp_path).check_files()


def test_weights_in_bfloat16_become_masters_and_their_copies(tmp_path):
    torch_model = make(llama(), dtype=torch.bfloat16)
    torch_model.save_pretrained(tmp_path)
    with engine_of(tmp_path, STREAMED | {"bf16": {"enabled": True}}) as engine:
        name = "model.layers.1.mlp.up_proj.weight"
        value = dict(torch_model.named_parameters())[name].float().numpy(force=True)
        assert engine.get(name).dtype == np.float32
        assert np.array_equal(engine.get(name), value)
        assert engine.get(name, "compute").dtype == jnp.bfloat16
        loss = engine.step(BATCH)["loss"]
    # bfloat16 has 8 bits: 1/256 of the logits, of which the loss is a mean.
    assert loss == pytest.approx(torch_loss(torch_model, tokens()), rel=0.01)


def change(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def remove(folder, pattern, *, but=0):
    for path in sorted(folder.glob(pattern))[but:]:
        path.unlink()


def instead(folder, name):
    """A file with weights in a form that is not read."""
    remove(folder, "*.safetensors*")
    (folder / name).write_bytes(b"\x80")


def cut_off(folder):
    path = sorted(folder.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-1])


def nested_deeply(folder):
    (folder / "config.json").write_text('{"model_type":' + "[" * 10**5)


def without_norm(folder):
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    file = folder / content["weight_map"].pop("model.norm.weight")
    found = load_file(file)
    del found["model.norm.weight"]
    save_file(found, file, metadata={"format": "pt"})
    index.write_text(json.dumps(content))


# How a model's folder is spoiled.
BROKEN = {
    "no shard": partial(remove, pattern="*.safetensors", but=1),
    "no weights": partial(remove, pattern="*.safetensors*"),
    "pickles": partial(instead, name="pytorch_model.bin"),
    "for llama.cpp": partial(instead, name="model-Q4_K_M.gguf"),
    "wider": partial(change, hidden_size=64),
    "an unknown kind": partial(change, model_type="no_such_model"),
    "code of its own": partial(change, model_type="own", auto_map={"AutoConfig": "C"}),
    "quantized": partial(change, quantization_config={"quant_method": "gptq"}),
    "cut off": cut_off,
    "no config": partial(remove, pattern="config.json"),
    "a model of images": partial(change, model_type="vit"),
    "no norm": without_norm,
    "a billion layers": partial(change, num_hidden_layers=10**9),
    "endless layers": partial(change, num_hidden_layers=float("inf")),
    "a billion labels": partial(change, num_labels=10**9),
    "layers as a text": partial(change, num_hidden_layers="many"),
    "a quantization as a text": partial(change, quantization_config="gptq"),
    "no heads": partial(change, num_attention_heads=0),
    "more experts than any": partial(
        change, model_type="mixtral", num_hidden_layers=999, num_local_experts=999
    ),
    "an unknown activation": partial(change, hidden_act="\x1b[2Jnope"),
    "an unknown rope": partial(change, rope_parameters={"rope_type": "nope"}),
    "rope of a text": partial(
        change, rope_parameters={"rope_type": "default", "rope_theta": "x"}
    ),
    "heads without width": partial(change, head_dim=0),
    "heads of negative width": partial(change, head_dim=-2),
    "no heads of keys": partial(change, num_key_value_heads=0),
    "fewer words than none": partial(change, vocab_size=-5),
    "padding beyond the words": partial(change, pad_token_id=10**9),
    "a number of texts": partial(change, text_config=3),
    "nested deeply": nested_deeply,
}


# What is written in place of a file of a model's folder.
TEXTS = {
    "empty": b"",
    "no UTF-8": b"\xff\xfe\x00",
    "null": b"null",
    "a list": b"[]",
    "a text": b'"x"',
    "cut off": b"{",
    "nested": b"[" * 10**5,
    "nested objects": b'{"a":' * 10**5,
    "a zero": b"\0",
}
READ = {
    "config.json": lambda model: model,
    "generation_config.json": lambda model: settings_of(model, {}),
    "model.safetensors.index.json": lambda model: model.check_files(),
    **dict.fromkeys(TOKENIZER_FILES, lambda model: model.tokenizer),
}


def test_each_file_of_a_folder_that_holds_anything_is_refused_by_name(tmp_path, golden):
    sound = model_folder(tmp_path)

    def check(name, content):
        folder = tmp_path / "made up"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(sound, folder)
        (folder / name).write_bytes(content)
        READ[name](hf.load(folder))

    mistakes = {
        f"{name}, {text}": partial(check, name, content)
        for name in READ
        for text, content in TEXTS.items()
    }
    golden.check("files.txt", refusals(mistakes, tmp_path))


def test_broken_models_are_refused_by_name(tmp_path, golden):
    """By a look at the files, and by an engine before any plan is made."""
    save(llama(), tmp_path / "sound")

    def check(name):
        folder = tmp_path / name
        shutil.copytree(tmp_path / "sound", folder)
        BROKEN[name](folder)
        hf.load(folder).check_files()

    mistakes = {name: partial(check, name) for name in BROKEN}
    text = refusals(mistakes, tmp_path)
    # What depends on the version of transformers, and how that lays out files.
    text = text.replace(f"transformers {transformers.__version__}", "transformers")
    told = r"(transformers cannot (?:read|make) [^:]*): .*?\. Get it"
    text = re.sub(told, r"\1: ... Get it", text, flags=re.DOTALL)
    golden.check("broken.txt", re.sub(r"byte [\d,]+ and it at [\d,]+", "byte", text))
    with pytest.raises(ValueError, match=r"\[96, 64\] here and \[96, 32\] there"):
        engine_of(tmp_path / "wider")


@pytest.fixture
def at_hub(tmp_path, monkeypatch):
    """Serves the model in `tmp_path` as the hub; see `hub`."""
    # A download that is cut off is tried again five times, a second apart.
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda s: None)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    save(llama(), tmp_path / "model")
    served = []

    def serve(**how):
        served.append(hub(tmp_path / "model", **how))
        address = served[-1].__enter__()
        url = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)

    yield serve
    for one in served:
        one.__exit__(None, None, None)


def test_a_model_of_a_hub_is_loaded_and_no_other_form_of_it(at_hub, tmp_path):
    for other in ("consolidated.safetensors", "other.safetensors"):
        (tmp_path / "model" / other).write_bytes(b"the same weights again")
    at_hub()
    model = hf.load("some/model")
    assert not list(model.folder.glob("*.safetensors"))
    files, weights = model.open_weights()
    with files:
        assert weights.specs.keys() == model.specs.keys()
    found = {path.name for path in model.folder.glob("*.safetensors")}
    assert found == {f"model-0000{n}-of-00005.safetensors" for n in range(1, 6)}


def test_a_quantized_model_of_a_hub_is_kept_as_its_files_are(at_hub, tmp_path):
    """A plan needs no weights, by config.json; they are there before an engine is."""
    change_files(tmp_path / "model", to_nvfp4, NVFP4)
    at_hub()
    model = hf.load("some/model")
    planned = hf.running(model, rows=1, length=8).adapted
    assert planned is not None and len(planned.targets) == 14
    assert not list(model.folder.glob("*.safetensors"))
    with hf.open_model(model, on_tier("host", tmp_path), rows=1, length=8) as engine:
        found = engine.get("base/model.layers.1.mlp.down_proj.weight/codes")
    assert found.dtype == np.uint8 and len(model.encodings) == 14


SHARD = "model-00002-of-"


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ({"refuses": "GatedRepo"}, PermissionError, r"some/model.*\(401\).*Accept"),
        ({"refuses": "RepoNotFound"}, FileNotFoundError, r"some/model \(404\).*spell"),
        ({"cuts": "config.json"}, OSError, "config.json for some/model was cut off"),
        ({"cuts": SHARD}, OSError, f"{SHARD}.* for some/model was cut off"),
    ],
    ids=["gated", "absent", "config cut off", "weights cut off"],
)
def test_a_hub_that_refuses_is_quoted(how, error, words, at_hub):
    at_hub(**how)
    with pytest.raises(error, match=words):
        hf.load("some/model").open_weights()


def test_wrong_batches_and_names_are_refused(tmp_path, golden):
    llama().save_pretrained(tmp_path)
    model = hf.load(tmp_path)

    def batch(**given):
        model.check({name: np.int32([x]) for name, x in given.items()})

    batch(input_ids=[3] * 32, labels=[-100] * 31 + [VOCAB - 1])
    mistakes = {
        "a token beyond the words": lambda: batch(input_ids=[3, 4, VOCAB]),
        "a token below 0": lambda: batch(input_ids=[-1]),
        "a label below 0": lambda: batch(input_ids=[3, 4], labels=[3, -1]),
        "no label but a first": lambda: batch(input_ids=[3, 4], labels=[3, -100]),
        "too long": lambda: batch(input_ids=[3] * 33),
        "an unknown array": lambda: model.logits({}, {"input_ids": 0, "pixels": 0}),
        "no folder": lambda: hf.load(tmp_path / "absent/model"),
        "a base of a whole model": lambda: hf.load(tmp_path, base=tmp_path),
        "a layer too many": lambda: hf.load(tmp_path, random_ltd_layers=(1, 2)),
    }
    text = refusals(mistakes, tmp_path).splitlines()
    golden.check("model.txt", "\n".join(x.split(" (relative")[0] for x in text))
