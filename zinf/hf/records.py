"""The forms that lines of fine-tuning files have, as one of three.

A line has a `text`, a `prompt` and its `completion`, or `messages`; and a pair for
preferences has `chosen` and `rejected`. ShareGPT's `conversations` and Alpaca's
`instruction`, `input` and `output` are turned into those.
"""

from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zinf.core.text.json_text import from_json
from zinf.data.extract import json_lines, parquet_records

# Who speaks in ShareGPT's lines, as chat templates name them.
SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
# Fields of a message that say whether it is trained on.
TRAIN_FLAGS = ("train", "weight", "loss")
# The prompts of https://github.com/tatsu-lab/stanford_alpaca, for tokenizers without a
# chat template.
ALPACA = (
    "Below is an instruction that describes a task{with_input}. Write a response that "
    "appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n"
    "{input}### Response:\n"
)
# Fields of a record that are lists of messages.
CONVERSATIONS = ("messages", "prompt", "completion", "chosen", "rejected")
WITH_INPUT = ", paired with an input that provides further context"


def records(path: Path) -> Iterator[tuple[Any, str]]:
    """Each record of a file, and where it is, for messages.

    A file is parquet, a JSON array (`.json`) or JSON lines.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, or a line is no JSON, or it is of another kind.
    """
    suffix = path.suffix.lower()
    if suffix in (".csv", ".tsv"):
        raise ValueError(
            f"{path}: tables of text are not read. Write it as parquet, in pandas with "
            f"read_csv({path.name!r}).to_parquet({path.with_suffix('.parquet').name!r})."
        )
    if suffix == ".parquet":
        yield from parquet_records(path)
        return
    found = _array(path) if suffix == ".json" and _is_array(path) else json_lines(path)
    for record, where in found:
        _check_characters(record, where)
        yield record, where


def _is_array(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(64).removeprefix(BOM_UTF8).lstrip()[:1] == b"["


def _array(path: Path) -> Iterator[tuple[Any, str]]:
    try:
        found = from_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: no JSON: {error}") from None
    yield from ((x, f"{path}, record {i}") for i, x in enumerate(found, 1))


def _check_characters(value: Any, where: str) -> None:
    """Refuse half of a surrogate pair, such as "\\ud83d", which no tokenizer takes.

    JSON may have one where a text was cut within an emoji.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{where}: a text has {value[error.start]!r} as character "
                f"{error.start + 1:,}, which is half of a character. Repair the text, "
                "or leave the line out."
            ) from None
    elif isinstance(value, Mapping):
        for key, below in value.items():
            _check_characters(key, where)
            _check_characters(below, where)
    elif isinstance(value, list):
        for below in value:
            _check_characters(below, where)


def has_images(line: Any) -> bool:
    """Whether a record names images."""
    return bool(given_images(line)) or any(
        is_image(part) for message in messages_of(line) for part in parts_of(message)
    )


def refuse_images(line: Any, where: str) -> None:
    """Refuse a record with images where text alone is read."""
    if has_images(line):
        raise ValueError(
            f"{where}: the line has images, and only text is read here. Fine-tuning "
            "on answers and on preferences reads them: zinf finetune, or data.images "
            "in a config. Else leave them out."
        )


def is_image(part: Any) -> bool:
    """Whether a part of a message stands for an image."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return kind in ("image", "image_url")


def given_images(line: Any) -> list[Any]:
    """The images of a record beside its messages."""
    if not isinstance(line, Mapping):
        return []
    images = line.get("images")
    if images is None:
        images = [] if line.get("image") is None else [line["image"]]
    return list(images) if isinstance(images, list | tuple) else [images]


def messages_of(line: Any) -> Iterator[Any]:
    """The messages of a record, in order."""
    if isinstance(line, Mapping):
        for name in CONVERSATIONS:
            if isinstance(line.get(name), list):
                yield from line[name]


def parts_of(message: Any) -> Sequence[Any]:
    """The parts of a message; none if it is a text."""
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, list) else ()


def as_parts(message: Any) -> Any:
    """The message, with a text as its only part; an empty text stays."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, str) or not content:
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def standard(line: Any, where: str, *, has_template: bool) -> Any:
    """A line in the form of `messages`, or of `prompt` and `completion`.

    What has neither ShareGPT's nor Alpaca's form stays as it is. A field that is null
    counts as absent.

    Args:
        has_template: whether the tokenizer lays out conversations; else Alpaca's lines
            become a prompt of text.
    """
    if not isinstance(line, Mapping):
        return line
    line = {key: value for key, value in line.items() if value is not None}
    if "conversations" in line and "messages" not in line:
        return _from_sharegpt(line, where)
    is_alpaca = "instruction" in line and "output" in line
    if is_alpaca and not {"messages", "prompt", "text"} & line.keys():
        return _from_alpaca(line, where, has_template)
    return line


def _from_sharegpt(line: Mapping[str, Any], where: str) -> dict[str, Any]:
    turns = line["conversations"]
    if not isinstance(turns, list) or not turns:
        raise ValueError(
            f"{where}: conversations must be a list of objects with from and value; "
            f"found {turns!r:.60}."
        )
    messages: list[dict[str, Any]] = []
    if line.get("system"):
        messages.append({"role": "system", "content": line["system"]})
    for number, turn in enumerate(turns, 1):
        if isinstance(turn, Mapping) and "role" in turn:
            messages.append(dict(turn))
            continue
        speaker = turn.get("from") if isinstance(turn, Mapping) else None
        if speaker not in SPEAKERS or not isinstance(turn.get("value"), str):
            raise ValueError(
                f"{where}: turn {number} of conversations must have a value and be "
                f"from one of {', '.join(SPEAKERS)}; found {turn!r:.60}."
            )
        flags = {name: turn[name] for name in TRAIN_FLAGS if name in turn}
        content = {"role": SPEAKERS[speaker], "content": turn["value"]}
        messages.append(content | flags)
    found: dict[str, Any] = {"messages": messages}
    if "tools" in line:
        found["tools"] = line["tools"]
    return found


def tools_of(line: Mapping[str, Any], where: str) -> list[Any] | None:
    """The tools of a line, for a chat template; None if there are none.

    A list, or JSON text of a list, as ShareGPT's files have it. Templates lay out a
    header for an empty list, so that counts as absent.

    Raises:
        ValueError: it is neither.
    """
    tools = line.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = from_json(tools)
        except ValueError as error:
            raise ValueError(f"{where}: tools is no JSON: {error}") from None
    if not tools or isinstance(tools, str):
        return None
    if not isinstance(tools, list) or not all(isinstance(t, Mapping) for t in tools):
        raise ValueError(
            f"{where}: tools must be a list of objects, or JSON text of one; found "
            f"{tools!r:.60}."
        )
    return tools


def with_content(messages: Sequence[Any], where: str) -> list[Any]:
    """The messages, with an empty text as content of those that only call tools.

    OpenAI writes null there, and parquet leaves it out. Templates expect a text.

    Raises:
        ValueError: another message has no content.
    """
    found = list(messages)
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.get("content") is not None:
            continue
        given = {key for key, value in message.items() if value is not None}
        if message.get("tool_calls"):
            found[number] = {**message, "content": ""}
        elif given <= {"role", "name", *TRAIN_FLAGS}:
            raise ValueError(
                f"{where}: message {number + 1} has neither content nor tool_calls. "
                "Give it a text, or leave it out."
            )
    return found


def _from_alpaca(
    line: Mapping[str, Any], where: str, has_template: bool
) -> dict[str, Any]:
    earlier = _earlier_of_alpaca(line, where)
    if earlier and not has_template:
        raise ValueError(
            f"{where}: the line has a system text or a history, which Alpaca's prompt "
            "has no place for, and the tokenizer has no chat template. Put "
            "chat_template.jinja beside the tokenizer, or leave both out of the line."
        )
    texts = {key: line.get(key) or "" for key in ("instruction", "input", "output")}
    for key, text in texts.items():
        if not isinstance(text, str) or (not text and key != "input"):
            raise ValueError(
                f"{where}: {key} must be a text that is not empty; found {text!r:.40}."
            )
    instruction, given, output = texts.values()
    if has_template:
        asked = f"{instruction}\n\n{given}" if given else instruction
        question = {"role": "user", "content": asked}
        answer = {"role": "assistant", "content": output}
        return {"messages": [*earlier, question, answer]}
    prompt = ALPACA.format(
        with_input=WITH_INPUT if given else "",
        instruction=instruction,
        input=f"### Input:\n{given}\n\n" if given else "",
    )
    return {"prompt": prompt, "completion": output}


def _earlier_of_alpaca(line: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The messages before the instruction: `system`, and pairs in `history`."""
    messages: list[dict[str, Any]] = []
    if line.get("system"):
        messages.append({"role": "system", "content": line["system"]})
    for pair in line.get("history") or ():
        is_pair = isinstance(pair, (list, tuple)) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) for text in pair):
            raise ValueError(
                f"{where}: history must be a list of pairs, an instruction and its "
                f"output; found {pair!r:.60}."
            )
        for role, text in zip(("user", "assistant"), pair, strict=True):
            messages.append({"role": role, "content": text})
    return messages
