"""Lines of fine-tuning files as tokens and labels, and as batches."""

import json

import numpy as np
import pytest

from tests.unit.hf.models import CHAT, VOCAB, tokenizer

from zinf.hf.dataset import Samples, batches, split_of, tokenized  # isort: skip
from zinf.hf.records import records  # isort: skip
from zinf.hf.samples import Tokenizing  # isort: skip

END = 1


def tokenizing(words=None, **changes):
    settings = {
        "sequence_length": 8,
        "truncates": False,
        "completion_only": True,
        "vocab_size": VOCAB,
    }
    return Tokenizing(words or tokenizer(chat_template=CHAT), **settings | changes)


def turns(*contents):
    roles = ("user", "assistant") * len(contents)
    pairs = zip(roles, contents, strict=False)
    return [{"role": role, "content": content} for role, content in pairs]


SAID = {"from": "gpt", "value": "w1"}
# A line, its tokens, and how many of the first have no label.
LINES = [
    ({"text": "w0 w1"}, [5, 6, END], 0),
    ({"prompt": "w0 w1", "completion": "w2"}, [5, 6, 7, END], 2),
    ({"messages": turns("w0", "w1 w2")}, [4, 5, 3, 6, 7, END], 3),
    (
        {"prompt": turns("w0"), "completion": [turns("", "w1")[1]]},
        [4, 5, 3, 6, END],
        3,
    ),
    (
        {"conversations": [{"from": "human", "value": "w0"}, SAID]},
        [4, 5, 3, 6, END],
        3,
    ),
    ({"instruction": "w0", "input": "", "output": "w1"}, [4, 5, 3, 6, END], 3),
    ({"instruction": "w0", "input": "w2", "output": "w1"}, [4, 5, 7, 3, 6, END], 4),
]


@pytest.mark.parametrize(("line", "ids", "hidden"), LINES)
def test_prompts_have_no_label(line, ids, hidden):
    labels = [-100] * hidden + ids[hidden:]
    assert tokenizing().sample(line, "line 1") == (ids, labels)
    everything = tokenizing(completion_only=False)
    assert everything.sample(line, "line 1") == (ids, ids)


def test_every_answer_is_trained_on_where_the_template_marks_them():
    line = {"messages": turns("w0", "w1", "w2", "w3")}
    ids = [4, 5, 3, 6, END, 4, 7, 3, 8, END]
    found = tokenizing(sequence_length=10).sample(line, "line 1")
    assert found == (ids, [-100, -100, -100, 6, END, -100, -100, -100, 8, END])


def test_without_marks_the_last_answer_is_trained_on():
    words = tokenizer(chat_template=UNTAGGED)
    line = {"messages": turns("w0", "w1", "w2", "w3")}
    _, labels = tokenizing(words, sequence_length=10).sample(line, "line 1")
    assert labels == [-100] * 8 + [8, END]


UNTAGGED = CHAT.replace("{% generation %}", "").replace("{% endgeneration %}", "")
LONG = {"text": " ".join(["w0"] * 9)}
WRONG = [
    ({}, LONG, "line 7: the sample has 10 tokens.*data.sequence_length is 8"),
    ({}, {"text": ""}, "line 7: text must be a text that is not empty"),
    ({}, {"note": "w0"}, "line 7: a line must have text, prompt.*found note"),
    ({}, [1], "line 7: a line must be a JSON object"),
    ({"vocab_size": 6}, {"text": "w0 w3"}, "token 8, and the model has 6 words"),
    (
        {"sequence_length": 2, "truncates": True},
        {"prompt": "w0 w1", "completion": "w2"},
        "line 7: no token of the sample is trained on",
    ),
    ({}, {"messages": []}, "line 7: messages must be a list"),
    ({"words": {}}, {"messages": turns("w0", "w1")}, "has no chat template"),
    (
        {"words": {"chat_template": "{{ raise_exception('odd turns') }}"}},
        {"messages": turns("w0", "w1")},
        "line 7: the chat template refuses the conversation: odd turns",
    ),
    (
        {"words": {"chat_template": "{% for m in messages %}w1 {% endfor %}"}},
        {"messages": turns("w0")},
        "does not show where the last answer begins",
    ),
    (
        {"words": {"chat_template": UNTAGGED}, "assistant_only": True},
        {"messages": turns("w0", "w1")},
        "line 7: the chat template has no {% generation %} tags",
    ),
    (
        {},
        {"conversations": [{"from": "narrator", "value": "w0"}]},
        "line 7: turn 1 of conversations must have a value and be from",
    ),
    ({}, {"instruction": "w0", "output": ""}, "line 7: output must be a text that"),
    ({}, {"chosen": "w0", "rejected": "w1"}, "chosen and rejected are preferences"),
]


@pytest.mark.parametrize(("changes", "line", "words"), WRONG)
def test_a_wrong_sample_is_named(changes, line, words):
    changes = dict(changes)
    named = changes.pop("words", {"chat_template": CHAT})
    how = tokenizing(tokenizer(**named), **changes)
    with pytest.raises(ValueError, match=words):
        how.sample(line, "file, line 7")


def test_a_long_sample_may_be_cut():
    ids, labels = tokenizing(truncates=True).sample(LONG, "line 1")
    assert ids == labels == [5] * 8


def test_batches_are_the_same_after_resuming_and_padding_has_no_label(tmp_path):
    data = tmp_path / "data.jsonl"
    lines = [
        json.dumps({"text": " ".join(f"w{j}" for j in range(i + 1))}) for i in range(5)
    ]
    data.write_text("\n\n".join(lines))
    said = []

    def begun():
        folder = tokenized(
            [data],
            tokenizing(),
            tokenizer_files=[],
            cache=tmp_path / "cache",
            say=said.append,
        )
        first, last = split_of(5, 0.2, is_training=True)
        rows = Samples(folder, length=8, padding=2, first=first, last=last)
        return iter(batches(rows, batch_size=2, seed=0))

    first = begun()
    for _ in range(3):
        next(first)
    state = json.loads(json.dumps(first.get_state()))
    again = begun()
    again.set_state(state)
    batch, repeated = next(first), next(again)
    assert batch["input_ids"].dtype == np.int32
    for name in ("input_ids", "labels"):
        assert np.array_equal(batch[name], repeated[name])
        assert batch[name].shape == (2, 8)
    is_padding = batch["labels"] == -100
    assert np.array_equal(is_padding, batch["input_ids"] == 2) and is_padding.any()
    # Five samples of 2 to 6 tokens, each with an end; the second time none is made.
    assert said == ["data: 5 samples, 20 tokens, 15 of them trained on"]


def test_a_line_that_is_no_json_is_named(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "w0"}\n{"text": \n')
    with pytest.raises(ValueError, match="data.jsonl, line 2: no JSON"):
        tokenized([data], tokenizing(), tokenizer_files=[], cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_alpaca_without_a_template_has_the_prompt_of_its_authors():
    line = {"instruction": "w0", "input": "w2", "output": "w1"}
    words = tokenizer()
    ids, labels = tokenizing(words, sequence_length=60).sample(line, "line 1")
    prompt = words.decode([i for i, x in zip(ids, labels, strict=True) if x == -100])
    assert prompt.count("w0") == prompt.count("w2") == 1 and "w1" not in prompt
    assert labels[-2:] == [6, END]


def test_parquet_and_arrays_of_json_give_the_samples_of_lines(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    lines = [
        {"messages": turns("w0", "w1")},
        {"messages": [*turns("w2", "w3"), {"role": "tool", "content": "w4"}]},
    ]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "array.json").write_text(json.dumps(lines))
    parquet.write_table(pa.Table.from_pylist(lines), tmp_path / "rows.parquet")
    found = [[line for line, _ in records(path)] for path in sorted(tmp_path.iterdir())]
    assert found == [lines] * 3
    damaged = tmp_path / "damaged.parquet"
    damaged.write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="damaged.parquet is no parquet file"):
        next(records(damaged))
