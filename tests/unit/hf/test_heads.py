"""Models with other heads: the losses, training and files of `transformers`' own."""

import json
from pathlib import Path

import numpy as np
import optax
import pytest
import yaml

from tests.command import run
from tests.unit.hf.models import (
    STREAMED,
    TOKENS,
    TOLERANCE,
    VOCAB,
    llama,
    make,
    mean_loss,
    on_tier,
    params_of,
    refusals,
    tokenizer,
    tokens,
    write,
)
from zinf.core.config import Config

import jax  # isort: skip
import jax.numpy as jnp  # isort: skip
import torch  # isort: skip
import transformers  # isort: skip
from safetensors.numpy import load_file  # isort: skip

from zinf import hf  # isort: skip
from zinf.hf.objectives.classification import ClassTokenizing, class_names  # isort: skip

NAMES = ("bad", "fair", "good")


def text(labels=(0, 1)):
    ids = tokens()
    mask = np.ones_like(ids)
    ids[0, 8:], mask[0, 8:] = 2, 0
    labels = np.asarray(labels)
    dtype = np.float32 if labels.dtype.kind == "f" else np.int32
    return {"input_ids": ids, "attention_mask": mask, "labels": labels.astype(dtype)}


def image():
    pixels = np.random.default_rng(0).normal(size=(2, 3, 16, 16)).astype(np.float32)
    return {"pixel_values": pixels, "labels": np.array([2, 0], np.int32)}


def pair():
    labels = tokens()[:, ::-1].copy()
    labels[0, 9:] = -100
    return text(labels)


# The class of a model, its kind, and its configuration.
TABLE = json.loads(Path(__file__).with_name("heads.json").read_text())
BATCHES = {
    "a decoder": text,
    "several classes of a sample": lambda: text([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]]),
    "a number": lambda: text([0.5, -2.0]),
    "several numbers": lambda: text([[0.5, -2.0, 1.0], [0.0, 3.0, -1.0]]),
    "hidden words": lambda: text(np.where(np.arange(TOKENS) % 3, -100, tokens())),
    "pairs of texts": pair,
    "images": image,
}


def saved(case, folder):
    auto_class, kind, given = TABLE[case]
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**given)
    config._attn_implementation = "eager"
    model = getattr(transformers, auto_class).from_config(config).eval()
    model.save_pretrained(folder)
    return model, auto_class, BATCHES[case]()


def in_torch(batch):
    return {
        name: torch.tensor(x).long() if x.dtype == np.int32 else torch.tensor(x)
        for name, x in batch.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", TABLE)
def test_loss_and_gradients_are_those_of_transformers(case, tmp_path):
    torch_model, auto_class, batch = saved(case, tmp_path)
    model = hf.load_head(tmp_path, auto_class)
    arrays = {name: jnp.asarray(x) for name, x in batch.items()}
    wanted = torch_model(**in_torch(batch)).loss
    wanted.backward()
    gradient = jax.jit(jax.value_and_grad(mean_loss(model)))
    loss, gradients = gradient(params_of(torch_model), arrays)
    np.testing.assert_allclose(loss, wanted.item(), rtol=TOLERANCE)
    by_name = dict(torch_model.named_parameters())
    largest = max(float(jnp.abs(x).max()) for x in gradients.values())
    assert gradients.keys() == by_name.keys()
    for name, gradient in gradients.items():
        theirs = by_name[name].grad
        theirs = torch.zeros_like(by_name[name]) if theirs is None else theirs
        assert np.abs(gradient - theirs.numpy()).max() < 1e-5 * largest, name


@pytest.mark.slow
@pytest.mark.parametrize("case", ["a decoder", "images"])
def test_a_model_trains_away_from_the_device_and_its_export_loads(case, tmp_path):
    _, auto_class, batch = saved(case, tmp_path / "model")
    model = hf.load_head(tmp_path / "model", auto_class)
    config = on_tier("host", tmp_path)
    with hf.initialize(model, optax.adamw(1e-3), config, batch=batch) as engine:
        losses = [engine.step(batch)["loss"] for _ in range(3)]
        hf.export(engine, tmp_path / "tuned")
        wanted = engine.evaluate(batch)
    assert wanted < losses[2] < losses[0]
    kind = getattr(transformers, auto_class)
    again = kind.from_pretrained(tmp_path / "tuned", attn_implementation="eager").eval()
    with torch.no_grad():
        loss = again(**in_torch(batch)).loss.item()
    np.testing.assert_allclose(loss, wanted, rtol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
@pytest.mark.filterwarnings("ignore::FutureWarning:peft")
def test_a_model_of_text_gets_a_new_classifier_beside_adapters(tmp_path, caplog):
    """The classifier is trained whole."""
    peft = pytest.importorskip("peft")
    make(llama()).save_pretrained(tmp_path / "base")
    model = hf.load_head(tmp_path / "base", labels=NAMES)
    assert model.labels == NAMES and not model.is_trained_so
    values = []
    for seed in (0, 0, 1):
        opened = hf.load_head(tmp_path / "base", labels=NAMES, seed=seed)
        files, weights = opened.open_weights()
        with files:
            values.append(weights.whole("score.weight"))
            assert "lm_head.weight" in weights.unused
            assert list(weights.new) == ["score.weight"]
    first, again, other = values
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    # `initializer_range` is 0.02.
    assert first.shape == (3, 32) and 0.01 < first.std() < 0.03
    batch = text()
    config = Config.load(STREAMED | {"adapter": {"r": 4}})
    with hf.initialize(model, optax.adamw(1e-2), config, batch=batch) as engine:
        assert "score.weight: the files have no such weights" in caplog.text
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
    assert merged.config.id2label == dict(enumerate(NAMES))
    given = {n: x for n, x in in_torch(batch).items() if n != "labels"}
    with torch.no_grad():
        theirs, ours = tuned(**given).logits, merged(**given).logits
    assert torch.abs(theirs - ours).max() < TOLERANCE * torch.abs(ours).max()


def tokenizing(**changes):
    settings = {
        "sequence_length": 8,
        "too_long": "error",
        "completion_only": True,
        "vocab_size": VOCAB,
        "classes": ("bad", "good"),
    }
    return ClassTokenizing(tokenizer(), **settings | changes)


def test_bad_input_is_refused_by_name(tmp_path, golden):
    make(llama()).save_pretrained(tmp_path)
    model = hf.load_head(tmp_path, labels=NAMES)
    classifier = tmp_path / "classifier"
    llama(architectures=["LlamaForSequenceClassification"]).save_pretrained(classifier)

    def traced(**changes):
        jax.eval_shape(model.loss, model.zeros(), text() | changes)

    def line(**fields):
        tokenizing().read(fields, "line 1")

    def names(*labels):
        lines = [{"text": "w1", "label": label} for label in labels]
        class_names([write(tmp_path / "data.jsonl", lines)], ())

    model.check(text([-100, 2]))
    mistakes = {
        "a class of models that this one has not": lambda: (
            hf.load_head(tmp_path, "AutoModelForImageClassification").specs
        ),
        "no class of models": lambda: hf.load_head(tmp_path, "AutoModelForAll").specs,
        "labels twice": lambda: hf.load_head(tmp_path, labels=("a", "a")),
        "no labels": lambda: hf.load_head(tmp_path, labels=()),
        "a label beyond the classes": lambda: model.check(text([0, 3])),
        "a label below 0": lambda: model.check(text([0, -1])),
        "a token beyond the words": lambda: model.check(
            text() | {"input_ids": np.full((2, TOKENS), VOCAB, np.int32)}
        ),
        "labels of another shape": lambda: traced(labels=pair()["labels"]),
        "an unknown array": lambda: traced(pixels=tokens()),
        "no labels in a batch": lambda: model.loss({}, {"input_ids": tokens()}),
        "scores of a text": lambda: model.token_log_probabilities({}, text()),
        "several samples in a row": model.check_packing,
        "a line without a label": lambda: line(text="w1"),
        "a line without a text": lambda: line(text="", label="a"),
        "a text without a token": lambda: line(text=" ", label="a"),
        "a label that is no class": lambda: line(text="w1", label="ugly"),
        "a number that is no class": lambda: line(text="w1", label=2),
        "a number below 0": lambda: line(text="w1", label=-1),
        "a long text": lambda: line(text="w1 " * 9, label=1),
        "numbers and names": lambda: names(1, "a"),
        "one class": lambda: names("a", "a"),
        "one number": lambda: names(0, 0),
        "a line of another kind": lambda: line(messages=[]),
        "a table": lambda: class_names([tmp_path / "data.csv"], ()),
        "a classifier as a language model": lambda: hf.load(classifier),
    }
    lines = refusals(mistakes, tmp_path).splitlines()
    # Arguments depend on the version of transformers.
    golden.check("heads.txt", "\n".join(x.split(" It takes ")[0] for x in lines))


def test_a_text_has_its_class_at_its_last_token():
    for label in ("good", 1):
        found = tokenizing().read({"text": "w1 w2", "label": label}, "line 1")
        assert found.samples == (([6, 7], [-100, 1]),)


def test_names_of_classes_are_found_in_files(tmp_path):
    def names(labels, known=()):
        lines = [{"text": "w1", "label": label} for label in labels]
        return class_names([write(tmp_path / "data.jsonl", lines)], known)

    assert names(["b", "a", "b"]) == ("a", "b")
    assert names(["b"], known=("b", "a")) == ("b", "a")
    assert names(["c", "d"], known=("b", "a")) == ("c", "d")
    assert names([2, 0]) == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert names([1], known=("no", "yes")) == ("no", "yes")
    assert names([2], known=("no", "yes")) == ("LABEL_0", "LABEL_1", "LABEL_2")


def test_a_classifier_without_a_token_of_padding_is_refused(tmp_path):
    ends = {"pad_token_id": None, "eos_token_id": None}
    llama(**ends).save_pretrained(tmp_path)
    model = hf.load_head(tmp_path, labels=NAMES)
    batch = text()
    with pytest.raises(ValueError, match="config.json names no .*Set pad_token_id"):
        jax.eval_shape(model.loss, model.zeros(), batch)
    alone = {name: x[:1] for name, x in batch.items()}
    assert jax.eval_shape(mean_loss(model), model.zeros(), alone).shape == ()
    # A token that ends texts stands for padding.
    llama(pad_token_id=None, eos_token_id=[7, 8]).save_pretrained(tmp_path)
    assert hf.load_head(tmp_path, labels=NAMES).config.pad_token_id == 7


@pytest.mark.slow
def test_the_command_trains_a_classifier_that_transformers_runs(tmp_path, caplog):
    make(llama()).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    rng = np.random.default_rng(0)
    lines = []
    for i in range(32):
        fill = [f"w{n}" for n in rng.integers(4, 12, rng.integers(2, 6))]
        words = " ".join([*fill, f"w{i % 2}"])
        lines.append({"text": words, "label": ("bad", "good")[i % 2]})
    data, output = write(tmp_path / "data.jsonl", lines), tmp_path / "tuned"
    common = ("--objective", "classification", "--sequence-length", 8, "--data", data)
    run(
        *("finetune", tmp_path / "model", *common, "--output", output, "--samples", 8),
        *("--learning-rate", 1e-2, "--epochs", 6, "--eval-data", data),
    )
    config = yaml.safe_load((tmp_path / "tuned.run/finetune.yaml").read_text())
    assert config["data"]["labels"] == ["bad", "good"]
    assert "score.weight: the files have no such weights" in caplog.text
    ask = transformers.pipeline("text-classification", str(output))
    found = [ask(line["text"])[0]["label"] for line in lines]
    assert found == [line["label"] for line in lines]
    # The model is a classifier now, and its classes are those of its config.
    tuned = hf.load_head(output)
    assert tuned.is_trained_so and tuned.labels == ("bad", "good")
    files, weights = tuned.open_weights()
    with files:
        assert not weights.new
