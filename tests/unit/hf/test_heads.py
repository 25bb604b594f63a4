"""Models with other heads: the losses, training and files of `transformers`' own."""

import json

import numpy as np
import optax
import pytest
import yaml
from typer.testing import CliRunner

from tests.unit.hf.models import (
    TOKENS,
    VOCAB,
    gpt2,
    llama,
    make,
    tokenizer,
    tokens,
)
from zinf.config import Config

import jax  # isort: skip
import jax.numpy as jnp  # isort: skip
import torch  # isort: skip
import transformers  # isort: skip
from safetensors.numpy import load_file  # isort: skip

from zinf import hf  # isort: skip
from zinf.cli import app  # isort: skip
from zinf.hf.classes import ClassTokenizing, class_names  # isort: skip

# Float32 models of two layers: a few units of rounding of the largest entry.
TOLERANCE = 2e-6
STREAMED = {"execution": "streamed", "segment": {"remat": "always"}}
# Its export is 50 seconds of a processor.
T5 = pytest.param("T5", marks=pytest.mark.exhaustive)
NAMES = ("bad", "fair", "good")
ENCODER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def text(rows=2, labels=None):
    ids = tokens(rows)
    mask = np.ones_like(ids)
    ids[0, 8:], mask[0, 8:] = 2, 0
    labels = np.arange(rows, dtype=np.int32) % 3 if labels is None else labels
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def image():
    pixels = np.random.default_rng(0).normal(size=(2, 3, 16, 16)).astype(np.float32)
    return {"pixel_values": pixels, "labels": np.array([2, 0], np.int32)}


def pair():
    labels = tokens(2)[:, ::-1].copy()
    labels[0, 9:] = -100
    return text() | {"labels": labels}


def by_token():
    labels = np.random.default_rng(1).integers(0, 3, (2, TOKENS)).astype(np.int32)
    labels[1, :4] = -100
    return text() | {"labels": labels}


def words():
    labels = np.where(np.arange(TOKENS) % 3, -100, tokens(2)).astype(np.int32)
    return text() | {"labels": labels}


def several():
    return text(labels=np.array([[1, 0, 1], [0, 0, 1]], np.float32))


CLASSES = {"num_labels": 3}
CASES = {
    "a decoder": (
        lambda: llama(**CLASSES),
        "AutoModelForSequenceClassification",
        text,
    ),
    "an encoder": (
        lambda: transformers.BertConfig(**ENCODER, vocab_size=VOCAB, **CLASSES),
        "AutoModelForSequenceClassification",
        text,
    ),
    "several classes of a sample": (
        lambda: transformers.RobertaConfig(
            **ENCODER,
            vocab_size=VOCAB,
            pad_token_id=2,
            problem_type="multi_label_classification",
            **CLASSES,
        ),
        "AutoModelForSequenceClassification",
        several,
    ),
    "a number": (
        lambda: gpt2(num_labels=1, pad_token_id=2),
        "AutoModelForSequenceClassification",
        lambda: text(labels=np.array([0.5, -2.0], np.float32)),
    ),
    "classes of tokens": (
        lambda: transformers.DistilBertConfig(
            dim=32, hidden_dim=48, n_layers=2, n_heads=4, vocab_size=VOCAB, **CLASSES
        ),
        "AutoModelForTokenClassification",
        by_token,
    ),
    "hidden words": (
        lambda: transformers.BertConfig(**ENCODER, vocab_size=VOCAB),
        "AutoModelForMaskedLM",
        words,
    ),
    "T5": (
        lambda: transformers.T5Config(
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            vocab_size=VOCAB,
            decoder_start_token_id=0,
        ),
        "AutoModelForSeq2SeqLM",
        pair,
    ),
    "BART": (
        lambda: transformers.BartConfig(
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            vocab_size=VOCAB,
            max_position_embeddings=32,
        ),
        "AutoModelForSeq2SeqLM",
        pair,
    ),
    "images": (
        lambda: transformers.ViTConfig(
            **ENCODER, image_size=16, patch_size=4, **CLASSES
        ),
        "AutoModelForImageClassification",
        image,
    ),
}


def saved(case, folder):
    config, auto_class, batch = CASES[case]
    torch.manual_seed(0)
    config = config()
    config._attn_implementation = "eager"
    model = getattr(transformers, auto_class).from_config(config).eval()
    model.save_pretrained(folder)
    return model, auto_class, batch()


def in_torch(batch):
    return {
        name: torch.tensor(x).long() if x.dtype == np.int32 else torch.tensor(x)
        for name, x in batch.items()
    }


def losses(model, batch, tier):
    config = dict(STREAMED)
    if tier != "device":
        offload = {"device": tier}
        config["zero_optimization"] = {
            "stage": 3,
            "offload_param": offload,
            "offload_optimizer": offload,
        }
    engine = hf.initialize(model, optax.adamw(1e-3), config, batch=batch)
    with engine:
        return [engine.step(batch)["loss"] for _ in range(3)]


@pytest.mark.slow
@pytest.mark.sampled(slow=3)
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_transformers(case, tmp_path):
    torch_model, auto_class, batch = saved(case, tmp_path)
    model = hf.load_head(tmp_path, auto_class)
    files, weights = model.open_weights()
    with files:
        params = {name: jnp.asarray(weights.whole(name)) for name in model.specs}
    given = in_torch(batch)
    arrays = {name: jnp.asarray(x) for name, x in batch.items()}
    wanted = torch_model(**given)
    wanted.loss.backward()
    loss, gradients = jax.value_and_grad(model.loss)(params, arrays)
    np.testing.assert_allclose(loss, wanted.loss.item(), rtol=TOLERANCE)
    by_name = dict(torch_model.named_parameters())
    largest = max(float(jnp.abs(x).max()) for x in gradients.values())
    assert gradients.keys() == by_name.keys()
    for name, gradient in gradients.items():
        theirs = by_name[name].grad
        theirs = torch.zeros_like(by_name[name]) if theirs is None else theirs
        assert np.abs(gradient - theirs.numpy()).max() < 1e-5 * largest, name


@pytest.mark.slow
@pytest.mark.parametrize("case", ["a decoder", "images"])
def test_losses_are_the_same_on_every_tier_and_fall(case, tmp_path):
    _, auto_class, batch = saved(case, tmp_path)
    model = hf.load_head(tmp_path, auto_class)
    found = [losses(model, batch, tier) for tier in ("device", "cpu")]
    assert found[0] == found[1]
    assert found[0][-1] < found[0][0]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["a decoder", "an encoder", T5, "images"])
def test_what_is_exported_loads_with_equal_logits(case, tmp_path):
    _, auto_class, batch = saved(case, tmp_path / "model")
    model = hf.load_head(tmp_path / "model", auto_class)
    engine = hf.initialize(model, optax.adamw(1e-3), STREAMED, batch=batch)
    with engine:
        engine.step(batch)
        hf.export(engine, tmp_path / "tuned")
        wanted = engine.evaluate(batch)
    kind = getattr(transformers, auto_class)
    again = kind.from_pretrained(tmp_path / "tuned", attn_implementation="eager").eval()
    given = in_torch(batch)
    with torch.no_grad():
        np.testing.assert_allclose(again(**given).loss.item(), wanted, rtol=TOLERANCE)


@pytest.mark.slow
def test_a_model_of_text_gets_a_new_classifier(tmp_path, caplog):
    make(llama()).save_pretrained(tmp_path)
    model = hf.load_head(tmp_path, labels=NAMES)
    assert model.labels == NAMES
    files, weights = model.open_weights()
    with files:
        first = weights.whole("score.weight")
        assert "lm_head.weight" in weights.unused
        assert list(weights.new) == ["score.weight"]
    assert first.shape == (3, 32)
    # `initializer_range` is 0.02.
    assert 0.01 < first.std() < 0.03
    files, weights = hf.load_head(tmp_path, labels=NAMES).open_weights()
    with files:
        np.testing.assert_array_equal(weights.whole("score.weight"), first)
    batch = text()
    engine = hf.initialize(model, optax.adamw(1e-2), STREAMED, batch=batch)
    with engine:
        assert "score.weight: the files have no such weights" in caplog.text
        found = [engine.step(batch)["loss"] for _ in range(4)]
        hf.export(engine, tmp_path / "tuned")
    assert found[-1] < found[0]
    again = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "tuned"
    )
    assert again.config.id2label == dict(enumerate(NAMES))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
@pytest.mark.filterwarnings("ignore::FutureWarning:peft")
def test_a_classifier_is_trained_whole_beside_adapters(tmp_path):
    peft = pytest.importorskip("peft")
    make(llama()).save_pretrained(tmp_path / "base")
    model = hf.load_head(tmp_path / "base", labels=NAMES)
    batch = text()
    config = Config.load(STREAMED | {"adapter": {"r": 4}})
    engine = hf.initialize(model, optax.adamw(1e-2), config, batch=batch)
    with engine:
        found = [engine.step(batch)["loss"] for _ in range(4)]
        hf.export_adapter(engine, tmp_path / "adapter")
        hf.export(engine, tmp_path / "merged")
    assert found[-1] < found[0]
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert any("score" in name for name in names)
    kind = transformers.AutoModelForSequenceClassification
    base = kind.from_pretrained(tmp_path / "base", num_labels=3, pad_token_id=2)
    tuned = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    merged = kind.from_pretrained(tmp_path / "merged").eval()
    ids = torch.tensor(batch["input_ids"]).long()
    mask = torch.tensor(batch["attention_mask"])
    with torch.no_grad():
        theirs = tuned(input_ids=ids, attention_mask=mask).logits
        ours = merged(input_ids=ids, attention_mask=mask).logits
    assert torch.abs(theirs - ours).max() < TOLERANCE * torch.abs(ours).max()


@pytest.mark.slow
def test_bad_input_is_refused_by_name(tmp_path):
    make(llama()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no AutoModelForImageClassification for"):
        hf.load_head(tmp_path, "AutoModelForImageClassification").specs  # noqa: B018
    with pytest.raises(ValueError, match="no class of models 'AutoModelForAll'"):
        hf.load_head(tmp_path, "AutoModelForAll").specs  # noqa: B018
    with pytest.raises(ValueError, match="different names"):
        hf.load_head(tmp_path, labels=("a", "a"))
    model = hf.load_head(tmp_path, labels=NAMES)
    with pytest.raises(ValueError, match="has the label 3, and .* 3 classes"):
        model.check(text(labels=np.array([0, 3], np.int32)))
    with pytest.raises(ValueError, match="has 96 at token 0"):
        model.check(text() | {"input_ids": np.full((2, TOKENS), VOCAB, np.int32)})
    with pytest.raises(ValueError, match=r"labels are int32\[2, 12\], and the logits"):
        jax.eval_shape(model.loss, model.zeros(), pair())
    with pytest.raises(ValueError, match="has pixels, which LlamaForSequence"):
        jax.eval_shape(model.loss, model.zeros(), text() | {"pixels": tokens(2)})
    with pytest.raises(ValueError, match="has labels; this one has input_ids"):
        jax.eval_shape(model.loss, model.zeros(), {"input_ids": tokens(2)})
    with pytest.raises(NotImplementedError, match="need a causal language model"):
        model.token_log_probabilities(model.zeros(), text())


@pytest.mark.slow
def test_a_classifier_without_a_token_of_padding_is_refused(tmp_path):
    ends = {"pad_token_id": None, "eos_token_id": None}
    llama(**ends).save_pretrained(tmp_path)
    model = hf.load_head(tmp_path, labels=NAMES)
    batch = text()
    with pytest.raises(ValueError, match="config.json names no .*Set pad_token_id"):
        jax.eval_shape(model.loss, model.zeros(), batch)
    alone = {name: x[:1] for name, x in batch.items()}
    assert jax.eval_shape(model.loss, model.zeros(), alone).shape == ()


def words_model(folder):
    """A model of text with a tokenizer, and a file of texts that two words class."""
    make(llama()).save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    rng = np.random.default_rng(0)
    lines = []
    for i in range(32):
        label = ("bad", "good")[i % 2]
        fill = [f"w{n}" for n in rng.integers(4, 12, rng.integers(2, 6))]
        lines.append({"text": " ".join([*fill, f"w{i % 2}"]), "label": label})
    data = folder / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, lines)))
    return folder / "model", data, lines


def run(*arguments):
    return CliRunner().invoke(app, [str(x) for x in arguments])


@pytest.mark.slow
def test_the_command_trains_a_classifier_that_transformers_runs(tmp_path, caplog):
    folder, data, lines = words_model(tmp_path)
    output = tmp_path / "tuned"
    done = run(
        *("finetune", folder, "--data", data, "--output", output, "--samples", 8),
        *("--objective", "classification", "--sequence-length", 8),
        *("--learning-rate", 1e-2, "--epochs", 6, "--eval-data", data),
    )
    assert done.exit_code == 0, done.output
    config = yaml.safe_load((tmp_path / "tuned.run/finetune.yaml").read_text())
    assert config["data"]["labels"] == ["bad", "good"]
    assert "score.weight: the files have no such weights" in caplog.text
    caplog.clear()
    ask = transformers.pipeline("text-classification", str(output))
    found = [ask(line["text"])[0]["label"] for line in lines]
    assert found == [line["label"] for line in lines]
    # The model is a classifier now, and its classes are those of its config.
    again = run(
        *("finetune", output, "--data", data, "--output", tmp_path / "more"),
        *("--objective", "classification", "--sequence-length", 8, "--steps", 1),
    )
    assert again.exit_code == 0, again.output
    assert "have no such weights" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    "line, said",
    [
        ({"text": "w1"}, "must have a text that is not empty, and a label"),
        ({"text": "", "label": "a"}, "must have a text that is not empty"),
        ({"text": "w1", "label": "ugly"}, "label 'ugly' is no class of the model"),
        ({"text": "w1", "label": 2}, "label 2 is no class of the model"),
        ({"text": "w1 " * 9, "label": 1}, "has 9 tokens, and data.sequence_length"),
    ],
)
def test_lines_that_are_wrong_are_refused(line, said):
    how = ClassTokenizing(
        tokenizer(),
        sequence_length=8,
        truncates=False,
        completion_only=True,
        vocab_size=VOCAB,
        classes=("bad", "good"),
    )
    with pytest.raises(ValueError, match=f"line 1.*{said}"):
        how.sample(line, "line 1")


@pytest.mark.slow
def test_names_of_classes_are_found_in_files(tmp_path):
    data = tmp_path / "data.jsonl"

    def names(labels, known=()):
        lines = [{"text": "w1", "label": label} for label in labels]
        data.write_text("\n".join(map(json.dumps, lines)))
        return class_names([data], known)

    assert names(["b", "a", "b"]) == ("a", "b")
    assert names(["b"], known=("b", "a")) == ("b", "a")
    assert names([2, 0]) == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert names([1], known=("no", "yes")) == ("no", "yes")
    with pytest.raises(ValueError, match="some labels are numbers"):
        names([1, "a"])
