"""Lines of fine-tuning files as tokens and labels, and as batches."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.unit.hf.models import CHAT, END, VOCAB, refusals, tokenizer, turns, write

import transformers  # isort: skip
from tokenizers import Tokenizer  # isort: skip
from tokenizers.models import BPE  # isort: skip
from tokenizers.processors import TemplateProcessing  # isort: skip
from zinf.data.extract import extracted
from zinf.data.files import Kind

from zinf.hf.answers import tokens_within  # isort: skip
from zinf.hf.dataset import Samples, batches, split_of, tokenized  # isort: skip
from zinf.hf.packing import Packed, rows_of  # isort: skip
from zinf.hf.pairs import PairTokenizing  # isort: skip
from zinf.hf.records import records  # isort: skip
from zinf.hf.objectives.classification import ClassTokenizing  # isort: skip
from zinf.hf.samples import Reading, Tokenizing  # isort: skip

SETTINGS = {
    "sequence_length": 8,
    "too_long": "error",
    "completion_only": True,
    "vocab_size": VOCAB,
}


def tokenizing(words=None, **changes):
    return Tokenizing(words or tokenizer(chat_template=CHAT), **SETTINGS | changes)


def only(reading):
    """The sample of a line that has one."""
    (sample,) = reading.samples
    return sample


def pairs(**named):
    return PairTokenizing(tokenizer(**named), **SETTINGS)


SAID = {"from": "gpt", "value": "w1"}
# A line, its tokens, and how many of the first have no label.
LINES = [
    ({"text": "w0 w1"}, [5, 6, END], 0),
    ({"text": "w0 w1 </s>"}, [5, 6, END], 0),
    ({"prompt": "w0 w1", "completion": "w2"}, [5, 6, 7, END], 2),
    ({"messages": turns("w0", "w1 w2")}, [4, 5, 3, 6, 7, END], 3),
    ({"prompt": turns("w0"), "completion": [turns("", "w1")[1]]}, [4, 5, 3, 6, END], 3),
    ({"conversations": [{"from": "human", "value": "w0"}, SAID]}, [4, 5, 3, 6, END], 3),
    ({"instruction": "w0", "input": "", "output": "w1"}, [4, 5, 3, 6, END], 3),
    ({"instruction": "w0", "input": "w2", "output": "w1"}, [4, 5, 7, 3, 6, END], 4),
]


@pytest.mark.parametrize(("line", "ids", "hidden"), LINES)
def test_prompts_have_no_label(line, ids, hidden):
    labels = [-100] * hidden + ids[hidden:]
    assert only(tokenizing().read(line, "line 1")) == (ids, labels)
    everything = tokenizing(completion_only=False)
    assert only(everything.read(line, "line 1")) == (ids, ids)


UNTAGGED = CHAT.replace("{% generation %}", "").replace("{% endgeneration %}", "")


CONVERSATION = turns("w0", "w1", "w2", "w3")
CONVERSED = [4, 5, 3, 6, END, 4, 7, 3, 8, END]
FIRST, LAST = {3, 4}, {8, 9}  # places of the two answers among these tokens


def flagged(**flags):
    question, answer, *rest = CONVERSATION
    return [question, answer | flags, *rest]


# Which answers are trained on, with a template that marks them and with one that does
# not: then they are found by laying out the messages before them.
ANSWERS = [
    ({"messages": CONVERSATION}, FIRST | LAST),
    ({"messages": flagged(train=True)}, FIRST | LAST),
    ({"messages": flagged(train=False)}, LAST),
    ({"messages": flagged(weight=0)}, LAST),
    ({"prompt": CONVERSATION[:3], "completion": CONVERSATION[3:]}, LAST),
    ({"prompt": CONVERSATION[:1], "completion": CONVERSATION[1:]}, FIRST | LAST),
    (
        {"instruction": "w2", "output": "w3", "history": [["w0", "w1"]]},
        FIRST | LAST,
    ),
]


# The chat template of the tests, with what templates do for tools and their calls.
TOOLS = "{% if tools is not none %}w9{% for tool in tools %}{{ tool['name'] }} "
TOOLS += "{% endfor %}{% endif %}" + CHAT
CALLS = [{"type": "function", "function": {"name": "w8", "arguments": {}}}]
CALLING = {"role": "assistant", "tool_calls": CALLS}
TURNS = turns("w0", "w1")
# Lines that are laid out as others are, with or without fields that are null or empty.
ALIKE = [
    ({"messages": None, "text": "w0"}, {"text": "w0"}),
    ({"messages": TURNS, "tools": []}, {"messages": TURNS}),
    ({"messages": TURNS, "tools": "[]"}, {"messages": TURNS}),
    ({"messages": TURNS, "tools": " "}, {"messages": TURNS}),
    (
        {"messages": TURNS, "tools": '[{"name": "w2"}]'},
        {"messages": TURNS, "tools": [{"name": "w2"}]},
    ),
    # OpenAI's files have null as the content of a message that calls tools.
    (
        {"messages": [TURNS[0], {**CALLING, "content": None}, *TURNS]},
        {"messages": [TURNS[0], {**CALLING, "content": ""}, *TURNS]},
    ),
    (
        {"messages": [TURNS[0], CALLING, *TURNS]},
        {"messages": [TURNS[0], {**CALLING, "content": ""}, *TURNS]},
    ),
]


@pytest.mark.parametrize(("line", "alike"), ALIKE)
def test_what_is_null_or_empty_counts_as_absent(line, alike):
    how = tokenizing(tokenizer(chat_template=TOOLS), sequence_length=20)
    assert how.read(line, "line 1") == how.read(alike, "line 1")


# As LLaVA's and SmolVLM's templates: they loop over a content as over parts.
OF_PARTS = CHAT.replace(
    "{{ m.content }}",
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}",
)


@pytest.mark.parametrize(
    "template", [CHAT, UNTAGGED, OF_PARTS], ids=["tags", "no tags", "parts"]
)
@pytest.mark.parametrize(("line", "trained"), ANSWERS)
def test_the_answers_that_a_line_names_are_trained_on(line, trained, template):
    words = tokenizer(chat_template=template)
    ids, labels = only(tokenizing(words, sequence_length=10).read(line, "line 1"))
    assert ids == CONVERSED
    assert {i for i, label in enumerate(labels) if label != -100} == trained


def test_a_large_number_beside_braces_is_no_width():
    template = "{{ '{ %d' % 999999999 }} " + CHAT
    how = tokenizing(tokenizer(chat_template=template))
    assert len(how.read({"messages": turns("w0", "w1")}, "line 7").samples) == 1


def test_answers_that_a_template_changes_later_are_left_out_with_a_warning(caplog):
    """As templates do that drop what a model thought in earlier answers."""
    words = tokenizer(
        chat_template="{% for m in messages %}"
        "{% if m['role'] == 'assistant' and not loop.last %}w4 {% endif %}"
        "{{ m['content'] }} {% endfor %}"
    )
    line = {"messages": CONVERSATION}
    _, labels = only(tokenizing(words, sequence_length=10).read(line, "line 1"))
    assert [label for label in labels if label != -100] == [8]
    assert "earlier answers in another way" in caplog.text


def joining() -> transformers.PreTrainedTokenizerFast:
    """A token a character, but for two spaces, and a space with `x`."""
    letters = ["<unk>", "</s>", "a", "b", "x", ":", " ", "  ", " x"]
    model = BPE({t: i for i, t in enumerate(letters)}, [(" ", " "), (" ", "x")])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(model),
        unk_token="<unk>",
        eos_token="</s>",
        chat_template="{% for m in messages %}{% if m.role == 'assistant' %}"
        "a: {{ m.content }}</s>{% else %}b: {{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}a: {% endif %}",
    )


# Answers after "a: ", and the tokens that are trained on.
BEGINNINGS = [
    (["b"], ["b", "</s>"], False),
    ([" b"], ["b", "</s>"], True),
    (["xb"], ["b", "</s>"], True),
    (["  b"], [" ", "b", "</s>"], True),
    ([" b", "b"], ["b", "</s>", "b", "</s>"], True),
]


@pytest.mark.parametrize(("answers", "trained", "is_inside"), BEGINNINGS)
def test_an_answer_is_trained_on_from_its_first_whole_token(
    answers, trained, is_inside, caplog
):
    how = tokenizing(joining(), sequence_length=40)
    line = {"messages": turns(*(x for answer in answers for x in ("x", answer)))}
    for number in range(2):
        ((_, labels),) = how.read(line, f"line {number}").samples
        found = [how.tokenizer.convert_ids_to_tokens(x) for x in labels if x != -100]
        assert found == trained
    how.begun_inside.warn()
    said = "In 2 samples (the first is line 0) an answer begins inside a token"
    assert (said in caplog.text) == is_inside
    assert len(caplog.records) == is_inside


@pytest.mark.parametrize(
    ("offsets", "inside"),
    [
        # Spaces that begin a token may be left out of its offsets.
        ([(0, 2), (3, 5), (5, 6), (6, 8)], (2, 3)),
        ([(0, 3), (3, 5), (5, 6), (6, 7)], (1, 3)),
        # Several tokens of one character.
        ([(2, 3), (2, 3), (3, 4), (3, 4), (5, 7)], (2, 4)),
        ([(0, 7)], (1, 1)),
    ],
)
def test_tokens_within_have_no_character_from_outside(offsets, inside):
    assert tokens_within(offsets, 3, 6) == inside


def test_a_text_begins_once_and_a_prompt_does_not_end():
    words = tokenizer(bos_token="<s>")
    first = words.bos_token_id
    words._tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", first), ("</s>", END)]
    )
    how = tokenizing(words)
    for text in ("w0 w1", "<s> w0 w1"):
        assert only(how.read({"text": text}, "line 1"))[0] == [first, 5, 6, END]
    line = {"prompt": "w0", "completion": "w1"}
    assert only(how.read(line, "line 1")) == ([first, 5, 6, END], [-100, -100, 6, END])
    line["prompt"] = "w0 </s>"
    assert only(how.read(line, "line 1"))[0] == [first, 5, END, 6, END]


def test_alpaca_without_a_template_has_the_prompt_of_its_authors():
    line = {"instruction": "w0", "input": "w2", "output": "w1"}
    words = tokenizer()
    ids, labels = only(tokenizing(words, sequence_length=60).read(line, "line 1"))
    prompt = words.decode([i for i, x in zip(ids, labels, strict=True) if x == -100])
    assert prompt.count("w0") == prompt.count("w2") == 1 and "w1" not in prompt
    assert labels[-2:] == [6, END]


def test_a_line_is_a_chosen_and_a_rejected_sample():
    line = {"prompt": "w0", "chosen": "w1", "rejected": "w2 w3"}
    chosen, rejected = pairs().read(line, "line 1").samples
    assert chosen == ([5, 6, END], [-100, 6, END])
    assert rejected == ([5, 7, 8, END], [-100, 7, 8, END])
    whole = {"chosen": turns("w0", "w1"), "rejected": turns("w0", "w2")}
    parted = {
        "prompt": turns("w0"),
        "chosen": turns("w0", "w1")[1:],
        "rejected": turns("w0", "w2")[1:],
    }
    how = pairs(chat_template=CHAT)
    assert how.read(whole, "line 1") == how.read(parted, "line 1")


LONG = {"text": " ".join(["w0"] * 9)}


LONG_PROMPT = {"prompt": "w0 " * 9, "completion": "w1"}
LONG_ANSWER = {"prompt": "w0", "chosen": "w1", "rejected": "w2 " * 9}
PROMPTED = {"prompt": "w0 " * 9, "chosen": "w1", "rejected": "w2"}
CLASSED = {"text": "w1 " * 9, "label": 0}
LEFT_OUT = Reading(())
LONG_LINES = [
    (Tokenizing, LONG, "truncate", Reading((([5] * 8, [5] * 8),), is_cut=True)),
    (Tokenizing, LONG, "drop", LEFT_OUT),
    # Nothing to train on remains of a prompt that fills a sample alone.
    (Tokenizing, LONG_PROMPT, "truncate", LEFT_OUT),
    (Tokenizing, LONG_PROMPT, "drop", LEFT_OUT),
    (
        PairTokenizing,
        LONG_ANSWER,
        "truncate",
        Reading(
            (([5, 6, END], [-100, 6, END]), ([5] + [7] * 7, [-100] + [7] * 7)),
            is_cut=True,
        ),
    ),
    # Both answers, or none.
    (PairTokenizing, LONG_ANSWER, "drop", LEFT_OUT),
    (PairTokenizing, PROMPTED, "truncate", LEFT_OUT),
    (
        partial(ClassTokenizing, classes=("bad", "good")),
        CLASSED,
        "truncate",
        Reading((([6] * 8, [-100] * 7 + [0]),), is_cut=True),
    ),
    (partial(ClassTokenizing, classes=("bad", "good")), CLASSED, "drop", LEFT_OUT),
]


@pytest.mark.parametrize(("kind", "line", "too_long", "reading"), LONG_LINES)
def test_a_long_line_is_cut_or_left_out_as_the_config_says(
    kind, line, too_long, reading
):
    how = kind(tokenizer(chat_template=CHAT), **SETTINGS | {"too_long": too_long})
    assert how.read(line, "line 1") == reading


def test_a_sample_that_just_fits_is_whole():
    full = {"text": " ".join(["w0"] * 7)}
    assert only(tokenizing().read(full, "line 1"))[0] == [5] * 7 + [END]


TREATED = {
    "truncate": (
        "data: 2 samples, 10 tokens, 8 of them trained on",
        "data: of the lines with more than 8 tokens 1 cut and 1 left out, as nothing "
        "to train on remains of them.",
    ),
    "drop": (
        "data: 1 samples, 2 tokens, 1 of them trained on",
        "data: of the lines with more than 8 tokens 2 left out.",
    ),
}


@pytest.mark.parametrize("too_long", TREATED)
def test_long_lines_are_counted_and_files_of_them_alone_refused(tmp_path, too_long):
    how, said = tokenizing(too_long=too_long), []
    named = {"tokenizer_files": [], "cache": tmp_path, "say": said.append}
    data = write(tmp_path / "data.jsonl", [LONG, {"text": "w0"}, LONG_PROMPT])
    tokenized([data], how, **named)
    assert tuple(said) == TREATED[too_long]
    data = write(tmp_path / "long.jsonl", [LONG_PROMPT])
    with pytest.raises(ValueError, match="no line is left; .* left out"):
        tokenized([data], how, **named)


# Templates without end: 10 ** 10 steps, 2 ** 99 characters, 10 ** 10 characters.
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLES = (
    "{% set n = namespace(x='w1') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}"
    "{% endfor %}{{ n.x }}"
)
FILLS = "{{ ('x' * 10**5).replace('x', 'y' * 10**5) }}"


def test_a_wrong_line_is_named_with_what_is_wrong(tmp_path, golden):
    chat = {"messages": turns("w0", "w1")}

    def sample(line, template=CHAT, **changes):
        words = tokenizer(chat_template=template) if template else tokenizer()
        return lambda: tokenizing(words, **changes).read(line, "line 7")

    def pair(**line):
        return lambda: pairs().read(line, "line 7")

    refuses = "{{ raise_exception('odd turns') }}"
    mute = "{% for m in messages %}w1 {% endfor %}"
    narrator = [{"from": "narrator", "value": "w0"}]
    mistakes = {
        "too long": sample(LONG),
        "empty": sample({"text": ""}),
        "no known field": sample({"note": "w0"}),
        "no object": sample([1]),
        "a token beyond the words": sample({"text": "w0 w3"}, vocab_size=8),
        "a token alone": sample({"text": "</s>"}),
        "no messages": sample({"messages": []}),
        "no content": sample({"messages": [{"role": "user"}, *turns("w0", "w1")]}),
        "content of null": sample(
            {"messages": [{"role": "user", "content": None}, *turns("w0", "w1")]}
        ),
        "tools that are no JSON": sample(chat | {"tools": "w0"}),
        "tools that are no list": sample(chat | {"tools": '{"name": "w0"}'}),
        "no chat template": sample(chat, template=None),
        "a template that refuses": sample(chat, refuses),
        "a template of loops": sample(chat, LOOPS),
        "a template that doubles": sample(chat, DOUBLES),
        "a template of a product": sample(chat, "{{ 'w1 ' * 10**11 }}"),
        "a template of a wide text": sample(chat, "{{ 'w1'.ljust(10**11) }}"),
        "a template of a wide number": sample(chat, "{{ '%99999999999d' % 3 }}"),
        "a template of a width given": sample(chat, "{{ '%*d' % (10**11, 3) }}"),
        "a template of a wide filter": sample(chat, "{{ '%.99999999999f'|format(3) }}"),
        "a template of wide braces": sample(chat, "{{ '{:>99999999999}'.format(3) }}"),
        "a template of braces in braces": sample(
            chat, "{{ '{:{}}'.format(3, 10**11) }}"
        ),
        "a template that fills in": sample(chat, FILLS),
        "a template without answers": sample({"messages": turns("w0")}, mute),
        "a template without tags": sample(chat, UNTAGGED, assistant_only=True),
        "a turn of nobody": sample({"conversations": narrator}),
        "no output": sample({"instruction": "w0", "output": ""}),
        "preferences": sample({"chosen": "w0", "rejected": "w1"}),
        "no preferences": pair(text="w0"),
        "preferences of no prompt": pair(chosen="w0", rejected="w1"),
        "a weight of a half": sample({"messages": flagged(weight=0.5)}),
        "Alpaca's system without a template": sample(
            {"instruction": "w0", "output": "w1", "system": "w2"}, template=None
        ),
        "a history of no pairs": sample(
            {"instruction": "w0", "output": "w1", "history": ["w2"]}
        ),
        "an image to classify": lambda: ClassTokenizing(
            tokenizer(), **SETTINGS, classes=("a", "b")
        ).read({"text": "w0", "label": "a", "image": "x.png"}, "line 7"),
        "a long answer": pair(prompt="w0", chosen="w1", rejected="w2 " * 9),
    }
    golden.check("samples.txt", refusals(mistakes, tmp_path))


def test_batches_are_the_same_after_resuming_and_padding_has_no_label(tmp_path):
    data = tmp_path / "data.jsonl"
    lines = [json.dumps({"text": "w0" + " w1" * i}) for i in range(5)]
    data.write_text("\n\n".join(lines))
    said, cache = [], tmp_path / "cache"

    def begun():
        how = {"tokenizer_files": [], "cache": cache, "say": said.append}
        folder = tokenized([data], tokenizing(), **how)
        first, last = split_of(5, 0.2, is_training=True)
        rows = Samples(folder, length=8, padding=2, first=first, last=last)
        assert (first, last, rows.lengths.tolist()) == (0, 4, [2, 3, 4, 5])
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
    assert split_of(5, 0.2, is_training=False) == (4, 5)
    # Other samples of the same name, length and time are not confused with them.
    before = data.stat()
    data.write_text(data.read_text().replace("w0", "w7"))
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))
    other = next(begun())["input_ids"]
    assert set(other[:, 0]) == {12} and len(said) == 2


KILLED = """
import os, signal, sys
from pathlib import Path
from zinf.data.unfinished import unfinished
with unfinished(Path(sys.argv[1])) as folder:
    (folder / "ids.int32").write_bytes(b"1234")
    print(folder, flush=True)
    if sys.argv[2:]:
        sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_deleted_and_nothing_else(tmp_path):
    data, cache = tmp_path / "data.jsonl", tmp_path / "cache"
    data.write_text('{"text": "w0"}')
    run = [sys.executable, "-c", KILLED, str(cache / "samples-0")]
    left = subprocess.run(run, stdout=subprocess.PIPE, text=True).stdout.strip()
    assert (Path(left) / "ids.int32").exists()
    foreign = cache / "mine.partial"
    foreign.mkdir()
    (foreign / "zinf.lock").write_text("mine")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([*run, "waits"], **pipes) as writing:
        assert writing.stdout is not None
        held = Path(writing.stdout.readline().strip())
        made = tokenized([data], tokenizing(), tokenizer_files=[], cache=cache)
        assert set(cache.iterdir()) == {foreign, held, made}
        writing.communicate()
    how = {"field": "text", "cache": cache}
    text = extracted(data, Kind.JSON_LINES, **how)
    assert set(cache.iterdir()) == {foreign, made, text}


def test_files_without_samples_are_named_and_nothing_is_left(tmp_path):
    data, cache = tmp_path / "data.jsonl", tmp_path / "cache"
    for content, message in (
        ('{"text": "w0"}\n{"text": \n', "data.jsonl, line 2: no JSON"),
        ("\n", "data.jsonl: there is no line to read"),
    ):
        data.write_text(content)
        with pytest.raises(ValueError, match=message):
            tokenized([data], tokenizing(), tokenizer_files=[], cache=cache)
        assert not list(cache.iterdir())
    with pytest.raises(FileNotFoundError, match="There is no file .*absent"):
        tokenized([tmp_path / "absent"], tokenizing(), tokenizer_files=[], cache=cache)


def test_parquet_and_arrays_of_json_give_the_samples_of_lines(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    lines = [
        {"messages": turns("w0", "w1")},
        {"messages": [*turns("w2", "w3"), {"role": "tool", "content": "w4"}]},
    ]
    write(tmp_path / "lines.jsonl", lines)
    (tmp_path / "array.json").write_text(json.dumps(lines))
    parquet.write_table(pa.Table.from_pylist(lines), tmp_path / "rows.parquet")
    found = [[line for line, _ in records(path)] for path in sorted(tmp_path.iterdir())]
    assert found == [lines] * 3
    # Windows' editors begin a file so.
    marked = tmp_path / "marked.json"
    marked.write_text(json.dumps(lines, indent=1), encoding="utf-8-sig")
    assert [line for line, _ in records(marked)] == lines
    damaged = tmp_path / "damaged.parquet"
    damaged.write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="damaged.parquet is no parquet file"):
        next(records(damaged))


# Half of an emoji, as JSON has it where a text was cut in between.
HALVES = [
    ("lines.jsonl", '{"text": "w0"}\n{"text": "w1 \\ud83d"}', "lines.jsonl, line 2"),
    ("array.json", '["w0", {"messages": [{"a": "\\udc00"}]}]', "array.json, record 2"),
    ("key.jsonl", '{"\\ud83d": "w1"}', "key.jsonl, line 1"),
]


@pytest.mark.parametrize(("name", "content", "where"), HALVES)
def test_half_a_character_is_named_with_its_line(tmp_path, name, content, where):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"{where}: a text has .* half of a character"):
        list(records(tmp_path / name))


ROOM = 16


def test_rows_hold_each_sample_once_and_no_more_than_fits():
    lengths = np.random.default_rng(0).integers(1, ROOM + 1, 500)
    rows = rows_of(lengths, ROOM)
    assert sorted(i for row in rows for i in row) == list(range(500))
    filled = [sum(int(lengths[i]) for i in row) for row in rows]
    assert max(filled) <= ROOM
    # At most 11/9 of the fewest rows and 6/9 more, which is the bound of fitting the
    # longest first (Johnson 1973); the fewest rows hold all tokens.
    assert len(rows) <= 11 / 9 * np.ceil(lengths.sum() / ROOM) + 6 / 9
    # The longest first, each into the fullest row with room.
    assert rows_of([3, 5, 2, 6, 8], 8) == [[4], [3, 2], [1, 0]]


def test_a_packed_row_numbers_samples_and_positions(tmp_path):
    samples = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    flat = np.concatenate([np.int32(s) for s in samples])
    flat.tofile(tmp_path / "ids.int32")
    flat.tofile(tmp_path / "labels.int32")
    np.save(tmp_path / "ends.npy", np.cumsum([len(s) for s in samples]))
    packed = Packed(Samples(tmp_path, length=8, padding=2, first=0, last=3))
    assert len(packed) == 2 and [packed.num_tokens(i) for i in (0, 1)] == [7, 2]
    first = packed[0]
    assert first["input_ids"].tolist() == [10, 11, 12, 13, 5, 6, 7, 2]
    assert first["labels"].tolist() == [-100, 11, 12, 13, -100, 6, 7, -100]
    assert first["segment_ids"].tolist() == [1] * 4 + [2] * 3 + [0]
    assert first["position_ids"].tolist() == [0, 1, 2, 3, 0, 1, 2, 0]
    assert all(x.dtype == np.int32 for x in first.values())
