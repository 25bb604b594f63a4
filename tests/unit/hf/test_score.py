"""`zinf score` and `zinf embed`: what transformers and torch say of the same texts."""

import json
from functools import partial

import numpy as np
import pytest

from tests.command import run
from tests.unit.hf.models import (
    CHAT,
    VOCAB,
    llama,
    make,
    model_folder,
    on_tier,
    refusals,
    tokenizer,
    turns,
    write,
)

import torch  # isort: skip
import transformers  # isort: skip
from safetensors.torch import save_file  # isort: skip

from zinf import hf  # isort: skip
from zinf.cli.outputs import JsonLines, Vectors  # isort: skip
from zinf.hf.sentence import read_recipe  # isort: skip

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 2,
}
LONG = " ".join(f"w{i}" for i in range(20))
LINES = [
    {"text": "w1 w2 w3 w9", "id": 1},
    {"prompt": "w1 w2", "completion": "w3 w4 w5", "id": 2},
    {"messages": turns("w1 w2", "w3", "w5", "w3 w4")},
    {"prompt": "w1 w7", "choices": ["w1", "w2", "w3 w4"]},
    {"messages": turns("w1 w2"), "choices": ["w1", "w2", "w3"]},
    {"text": LONG},
]


def log_likelihood(model, text, num_scored):
    """That of the last tokens of a text, by transformers, in float64."""
    ids = tokenizer()(text).input_ids
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits.double()
    shares = torch.log_softmax(logits, -1)[0]
    places = range(len(ids) - num_scored, len(ids))
    return sum(shares[i - 1, ids[i]].item() for i in places)


def expected(model):
    of = partial(log_likelihood, model)
    chat = "u: w1 w2 a: w3 </s>u: w5 a: "
    yield {"log_likelihood": of("w1 w2 w3 w9", 3), "num_tokens": 3}
    yield {"log_likelihood": of("w1 w2 w3 w4 w5", 3), "num_tokens": 3}
    yield {"log_likelihood": of(f"{chat}w3 w4 </s>", 3), "num_tokens": 3}
    for before, choices in (("w1 w7 ", LINES[3]), ("u: w1 w2 a: ", LINES[4])):
        texts = choices["choices"]
        totals = [of(before + text, len(text.split())) for text in texts]
        shares = np.exp(totals) / np.exp(totals).sum()
        yield {
            "log_likelihoods": totals,
            "probabilities": shares,
            "best": texts[int(np.argmax(totals))],
        }
    yield {"log_likelihood": of(LONG, 19), "num_tokens": 19}


def check_equal(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, str):
            assert found[name] == value
        else:
            np.testing.assert_allclose(found[name], value, rtol=1e-5)


@pytest.mark.slow
def test_scores_are_those_of_transformers_from_every_tier(tmp_path):
    folder = model_folder(tmp_path)
    wanted = list(expected(make(llama())))
    found = {t: hf.score(folder, LINES, on_tier(t, tmp_path)) for t in ("nvme", "host")}
    assert found["nvme"] == found["host"]
    for line, scores in zip(found["nvme"], wanted, strict=True):
        check_equal(line, scores)


@pytest.mark.slow
def test_a_killed_run_of_scores_goes_on_and_writes_the_same_bytes(tmp_path):
    folder = model_folder(tmp_path)
    data, output = write(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl"
    asked = ("score", folder, "--data", data, "--output", output, "--max-length", 19)
    refused = run(*asked, code=2)
    assert not output.exists()
    assert "1 line has more tokens than max_length = 19: " in refused.output
    assert "line 6 (20 tokens)" in refused.output
    done = run(*asked, "--too-long", "drop")
    assert "They get no answer." in done.output
    content = output.read_bytes()
    made = [json.loads(line) for line in content.splitlines()]
    dropped = {"log_likelihood": None, "num_tokens": None}
    assert made[5] == LINES[5] | dropped
    wanted = [*list(expected(make(llama())))[:5], dropped]
    for line, before, scores in zip(made, LINES, wanted, strict=True):
        assert {name: line[name] for name in before} == before
        if line is not made[5]:
            check_equal({n: line[n] for n in line if n not in before}, scores)
    # Killed within the third line.
    third = content.index(b"\n", content.index(b"\n") + 1)
    output.write_bytes(content[: third + 70])
    done = run(*asked, "--too-long", "drop")
    assert "has 2 of 6 lines already" in done.output
    assert output.read_bytes() == content
    refused = run(*asked, "--too-long", "truncate", code=2)
    assert '  too_long: "drop" -> "truncate"' in refused.output
    assert output.read_bytes() == content


def encoder(folder, **changes):
    """A tiny BERT with random weights, in torch."""
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES | changes)
    config._attn_implementation = "eager"
    model = transformers.BertModel(config).eval()
    model.save_pretrained(folder)
    tokenizer(pad_token="<pad>").save_pretrained(folder)
    return model


def sentence_folder(folder, *, mode="mean_tokens", layers=(), modules=(), **pooling):
    """A folder as sentence-transformers writes it, and its model in torch."""
    model = encoder(folder)
    kinds = ["Transformer", "Pooling", *layers, *modules]
    names = ["", *(f"{i}_{kind}" for i, kind in enumerate(kinds) if i)]
    listed = [
        {"idx": i, "name": str(i), "path": name, "type": f"sentence.models.{kind}"}
        for i, (kind, name) in enumerate(zip(kinds, names, strict=True))
    ]
    settings = {
        "modules.json": listed,
        "sentence_bert_config.json": {"max_seq_length": 12, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "prompts": {"query": "w30 w31 ", "document": ""},
            "default_prompt_name": None,
        },
        "1_Pooling/config.json": {f"pooling_mode_{mode}": True, **pooling},
    }
    for name, content in settings.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return model


def dense(folder):
    """A layer behind the pooling, in torch."""
    torch.manual_seed(1)
    layer = torch.nn.Linear(32, 8)
    folder.mkdir()
    state = {f"linear.{name}": x for name, x in layer.state_dict().items()}
    save_file(state, folder / "model.safetensors")
    settings = {"activation_function": "torch.nn.modules.activation.Tanh"}
    (folder / "config.json").write_text(json.dumps(settings))
    return lambda x: torch.tanh(layer(x))


def vectors(model, texts, pool):
    """The pooled states of texts, one text at a time."""
    with torch.no_grad():
        found = []
        for text in texts:
            ids = torch.tensor([tokenizer()(text).input_ids[:12]])
            found.append(pool(model(ids).last_hidden_state[0]))
        return torch.stack(found)


TEXTS = ["w1 w2 w3", "w5", LONG, "w3 w2"]
POOLINGS = {
    "mean_tokens": lambda states: states.mean(0),
    "lasttoken": lambda states: states[-1],
    "cls_token": lambda states: states[0],
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", POOLINGS)
def test_vectors_are_those_of_torch(mode, tmp_path):
    model = sentence_folder(tmp_path, mode=mode)
    wanted = vectors(model, TEXTS, POOLINGS[mode]).numpy()
    np.testing.assert_allclose(hf.embed(tmp_path, TEXTS), wanted, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_folder_of_sentence_transformers_has_layers_prompts_and_length_one(tmp_path):
    """Streamed from a drive. A mean may leave out the tokens of a prompt."""
    folder = tmp_path / "model"
    options = {"layers": ["Dense"], "modules": ["Normalize"], "include_prompt": False}
    model = sentence_folder(folder, **options)
    layer = dense(folder / "2_Dense")
    asked = [f"w30 w31 {text}" for text in TEXTS]
    pooled = vectors(model, asked, lambda states: states[2:].mean(0))
    with torch.no_grad():
        wanted = torch.nn.functional.normalize(layer(pooled), dim=1).numpy()
    config = on_tier("nvme", tmp_path)
    found = hf.embed(folder, TEXTS, config, prompt_name="query")
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_killed_run_of_vectors_goes_on_and_writes_the_same_bytes(tmp_path):
    """Means of length 1, of a model alone."""
    model = encoder(tmp_path / "model", max_position_embeddings=12)
    lines = [{"title": text, "id": i} for i, text in enumerate(TEXTS)]
    data, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.npy"
    asked = ["embed", tmp_path / "model", "--data", data, "--column", "title"]
    done = run(*asked, "--output", output)
    assert "1 line has more tokens than max_length = 12: " in done.output
    content, found = output.read_bytes(), np.load(output)
    pooled = vectors(model, TEXTS, POOLINGS["mean_tokens"])
    wanted = torch.nn.functional.normalize(pooled, dim=1).numpy()
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    for kept in (len(content) - 130, 130, 60):
        output.write_bytes(content[:kept])
        with pytest.raises(ValueError):
            np.load(output)
        run(*asked, "--output", output)
        assert output.read_bytes() == content
    # Other lines have other vectors.
    write(data, [{"title": "w9"}, *lines[1:]])
    refused = run(*asked, "--output", output, code=2)
    assert "  data.content: " in refused.output
    run(*asked, "--output", tmp_path / "out.jsonl")
    made = [json.loads(x) for x in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["title"] for line in made] == ["w9", *TEXTS[1:]]
    again = np.array([line["embedding"] for line in made[1:]], np.float32)
    assert np.array_equal(again, found[1:])


KINDS = {
    "classes": {},
    "one number": {"num_labels": 1},
    "several classes": {"problem_type": "multi_label_classification"},
    "numbers": {"problem_type": "regression"},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_classes_are_those_of_transformers(kind, tmp_path):
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES | {"num_labels": 3} | KINDS[kind])
    config._attn_implementation = "eager"
    model = transformers.BertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    named = ["input_ids", "token_type_ids"]
    words = tokenizer(pad_token="<pad>", model_input_names=named)
    words.save_pretrained(tmp_path)
    lines = [{"text": "w1 w2 w3"}, {"text": "w5", "text_pair": "w7 w8"}]
    found = hf.score(tmp_path, lines)
    for line, texts in zip(found, lines, strict=True):
        given = words(*texts.values(), return_tensors="pt")
        assert given["token_type_ids"].any() == ("text_pair" in texts)
        with torch.no_grad():
            logits = model(**given).logits[0].double()
        names = [config.id2label[i] for i in range(config.num_labels)]
        shares = logits.sigmoid() if kind == "several classes" else logits.softmax(0)
        if kind == "one number":
            wanted = {"score": logits.item()}
        elif kind == "numbers":
            wanted = {"scores": list(logits)}
        else:
            best = names[int(logits.argmax())]
            wanted = {"probabilities": list(shares), "best": best}
        for name in wanted.keys() & {"scores", "probabilities"}:
            assert list(line[name]) == names
            line[name] = list(line[name].values())
        check_equal(line, wanted)


def test_bad_input_is_refused_by_name(tmp_path, golden):
    """Before any weight is read."""
    folder, bert = model_folder(tmp_path), tmp_path / "bert"
    encoder(bert)
    sentences = tmp_path / "sentences"
    sentence_folder(sentences)
    for name, options in {
        "weighted": {"mode": "weightedmean_tokens"},
        "sparse": {"layers": ["SpladePooling"]},
    }.items():
        sentence_folder(tmp_path / name, **options)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    output = ("--output", tmp_path / "out.jsonl")

    def scores(line, **options):
        return lambda: hf.score(folder, [line], **options)

    def vector(of, text="w1", **options):
        return lambda: hf.embed(of, [text], **options)

    def command(*asked):
        def refused():
            found = run(*asked, code=2)
            raise ValueError(found.output.strip())

        return refused

    mistakes = {
        "no column": scores({"body": "w1"}),
        "no object": scores("w1"),
        "an empty text": scores({"text": ""}),
        "one token": scores({"text": "w1"}),
        "a prompt without an end": scores({"prompt": "w1"}),
        "no last answer": scores({"messages": turns("w1")}),
        "one choice": scores({"prompt": "w1", "choices": ["w2"]}),
        "choices twice": scores({"prompt": "w1"}, choices=["w2", "w2"]),
        "choices of a text": scores({"text": "w1"}, choices=["w2", "w3"]),
        "a long text": scores({"text": LONG}, max_length=8),
        "a long choice": scores(
            {"prompt": "w1", "choices": ["w2", LONG]}, max_length=8, too_long="truncate"
        ),
        "more than the model has": scores({"text": "w1 w2"}, max_length=64),
        "no head": lambda: hf.score(bert, [{"text": "w1 w2"}]),
        "no text": vector(bert, 7),
        "a long text for a vector": vector(bert, LONG, max_length=8, too_long="error"),
        "no prompt": vector(sentences, prompt_name="passage"),
        "another pooling": vector(tmp_path / "weighted"),
        "another module": vector(tmp_path / "sparse"),
        "no column for a vector": command(
            *("embed", bert, "--data", write(tmp_path / "a.jsonl", [{"text": "w1"}])),
            *("--column", "body", *output),
        ),
        "an empty file": command("score", folder, "--data", empty, *output),
        "another ending": command(
            "embed", bert, "--data", empty, "--output", tmp_path / "out.csv"
        ),
        "a column of the answer": command(
            *("score", folder, *output, "--data"),
            write(tmp_path / "b.jsonl", [{"text": "w1 w2", "num_tokens": 2}]),
        ),
    }
    golden.check("score.txt", refusals(mistakes, tmp_path))
    assert not output[1].exists()
    # What is named is taken in place of the folder's.
    assert read_recipe(tmp_path / "weighted", "last").pooling == "last"


def test_the_chat_template_lays_out_a_prompt_if_that_is_asked_for(tmp_path):
    folder = model_folder(tmp_path)
    line = {"prompt": "w1", "completion": "w2"}
    words = tokenizer(chat_template=CHAT)
    for chat, text in ((False, "w1 w2"), (True, "u: w1 a: w2")):
        with hf.open_scorer(folder, chat=chat) as reader:
            (request,) = reader.read(line, "line 1").requests
        assert (list(request.tokens), request.num_scored) == (words(text).input_ids, 1)


def test_what_is_too_long_is_cut_at_its_beginning(tmp_path):
    folder, words = model_folder(tmp_path), tokenizer()
    line = {"prompt": "w1 w2 w3 w4", "completion": "w5 w6"}
    for most, text, count in ((4, "w3 w4 w5 w6", 2), (2, "w5 w6", 1)):
        how = {"max_length": most, "too_long": "truncate"}
        with hf.open_scorer(folder, **how) as reader:
            (request,) = reader.read(line, "line 1").requests
        tokens = words(text).input_ids
        assert (list(request.tokens), request.num_scored) == (tokens, count)


def test_an_output_of_something_else_is_left_as_it_is(tmp_path):
    output = tmp_path / "out.npy"
    forms = [Vectors(2), JsonLines([{"text": "w1"}], [("score",)], "score")]
    np.save(output, np.zeros((2, 3), np.float32))
    for content in (output.read_bytes(), b"Dear diary", b"\x93NUMP"):
        output.write_bytes(content)
        for form in forms:
            with pytest.raises(ValueError, match="is left as it is"):
                form.found(output)
        assert output.read_bytes() == content
