"""`zinf generate` and `zinf evaluate`: models of transformers, run and not trained."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from math import exp
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import numpy as np

from zinf import hf
from zinf.config import Config
from zinf.data.extract import json_lines
from zinf.inference import ROWS, bucket

# Microbatches of `ROWS` samples that pass a layer before the next one is fetched.
MICROBATCHES = 8


def budgets(
    overrides: Sequence[str], nvme: Path | None, weight_bits: int | None
) -> Config:
    raw: dict[str, Any] = {} if nvme is None else {"memory": {"nvme": str(nvme)}}
    return Config.load(raw, [*in_bits(weight_bits), *overrides])


def in_bits(weight_bits: int | None) -> list[str]:
    """The overrides that keep weights of linear layers in so many bits."""
    if weight_bits is None:
        return []
    key = "weight_quantization.quantized_initialization.num_bits"
    return [f"{key}={weight_bits}"]


def print_completion(
    name: str,
    line: Mapping[str, Any],
    given: Mapping[str, Any],
    config: Config,
    *,
    base: str | None,
    max_new_tokens: int,
    seed: int,
    chat: bool,
) -> None:
    """Prints what a model writes after a prompt, as it is made, and nothing else."""
    model = hf.load_as_stored(name, base=base)
    sampling = hf.settings_of(model, given)
    prompt = hf.prompt_tokens(model, line, "--prompt", chat=chat)
    _say_if_endless(sampling.eos_token_ids, max_new_tokens)
    length = bucket(len(prompt))
    with hf.open_model(model, config, rows=1, length=length) as engine:
        hf.complete_texts(
            engine,
            [prompt],
            sampling,
            max_new_tokens=max_new_tokens,
            keys=_keys(seed, range(1)),
            rows=1,
            on_text=lambda text: print(text, end="", flush=True),
        )
    print()


def write_completions(
    name: str,
    prompts: Path,
    output: Path,
    given: Mapping[str, Any],
    config: Config,
    *,
    base: str | None,
    max_new_tokens: int,
    seed: int,
    chat: bool,
    batch_size: int,
) -> None:
    """Writes each line of a file of prompts with its `completion` to another file.

    Lines that the output has already are left out, so that the command can be given
    again after it was stopped. A line depends on the seed and on its own number.
    """
    model = hf.load_as_stored(name, base=base)
    sampling = hf.settings_of(model, given)
    # All lines are read first: what is wrong with the last is known before the first.
    lines = [
        (line, hf.prompt_tokens(model, line, where, chat=chat))
        for line, where in json_lines(prompts)
    ]
    if not lines:
        raise ValueError(f"{prompts}: there is no line to read.")
    done = _num_complete(output, [line for line, _ in lines])
    if done:
        _say(f"{output} has {done:,} of {len(lines):,} lines already.")
    if done == len(lines):
        return
    _say_if_endless(sampling.eos_token_ids, max_new_tokens)
    longest = max(len(tokens) for _, tokens in lines[done:])
    start, count = perf_counter(), 0
    with (
        hf.open_model(model, config, rows=ROWS, length=bucket(longest)) as engine,
        output.open("a", encoding="utf-8") as stream,
    ):
        for first in range(done, len(lines), batch_size):
            some = lines[first : first + batch_size]
            texts = hf.complete_texts(
                engine,
                [tokens for _, tokens in some],
                sampling,
                max_new_tokens=max_new_tokens,
                keys=_keys(seed, range(first, first + len(some))),
                rows=ROWS,
            )
            for (line, _), text in zip(some, texts, strict=True):
                full = {**line, "completion": text}
                stream.write(json.dumps(full, ensure_ascii=False) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
            count += len(some)
            rate = 60 * count / (perf_counter() - start)
            _say(f"{first + len(some):,} of {len(lines):,} lines, {rate:.1f} a minute")


def print_evaluation(
    name: str,
    data: Sequence[Path],
    config: Config,
    *,
    base: str | None,
    sequence_length: int,
    truncates: bool,
    completion_only: bool,
) -> None:
    """Prints the mean loss of the lines of files, in nats a token, and the speed."""
    model = hf.load_as_stored(name, base=base)
    if model.max_length is not None:
        sequence_length = min(sequence_length, model.max_length)
    how = hf.Tokenizing(
        model.tokenizer,
        sequence_length=sequence_length,
        truncates=truncates,
        completion_only=completion_only,
        vocab_size=model.vocab_size,
    )
    samples = [how.sample(*line) for path in data for line in json_lines(path)]
    if not samples:
        raise ValueError(f"{', '.join(map(str, data))}: there is no line to read.")
    # Samples of equal length lie together, so little is padded.
    samples.sort(key=lambda sample: len(sample[0]))
    most = bucket(len(samples[-1][0]))
    total, count, start = 0.0, 0, perf_counter()
    with hf.open_model(model, config, rows=ROWS, length=most) as engine:
        rest = iter(samples)
        while some := list(islice(rest, ROWS * MICROBATCHES)):
            batch, num_microbatches = _padded(some)
            scores = engine.log_probabilities(batch, num_microbatches=num_microbatches)
            total -= float(scores.sum(dtype=np.float64))
            count += int(np.count_nonzero(batch["labels"][:, 1:] != hf.IGNORED))
    loss, seconds = total / count, perf_counter() - start
    print(
        f"loss {loss:.6g}, perplexity {exp(loss) if loss < 700 else float('inf'):.6g}, "
        f"{count:,} tokens of {len(samples):,} samples, {count / seconds:,.1f} tokens/s"
    )


def _padded(
    samples: Sequence[tuple[list[int], list[int]]],
) -> tuple[dict[str, np.ndarray], int]:
    """A batch of whole microbatches, and how many; what is filled has no label."""
    num_microbatches = -(-len(samples) // ROWS)
    shape = num_microbatches * ROWS, bucket(max(len(ids) for ids, _ in samples))
    tokens, labels = np.zeros(shape, np.int32), np.full(shape, hf.IGNORED, np.int32)
    for row, (ids, found) in enumerate(samples):
        tokens[row, : len(ids)], labels[row, : len(ids)] = ids, found
    return {"input_ids": tokens, "labels": labels}, num_microbatches


def _num_complete(output: Path, lines: Sequence[Mapping[str, Any]]) -> int:
    """The lines that the output has; a last one without its end is cut off.

    Raises:
        ValueError: the output has a line that is not the prompt's of that number.
    """
    if not output.exists():
        return 0
    content = output.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with output.open("r+b") as stream:
            stream.truncate(len(whole))
    found = [line for line, _ in json_lines(output)]
    for number, line in enumerate(found):
        is_known = number < len(lines) and isinstance(line, dict)
        if not is_known or line != {
            **lines[number],
            "completion": line.get("completion"),
        }:
            raise ValueError(
                f"{output}, line {number + 1}: it is no completion of line "
                f"{number + 1} of the prompts. Name another output, or delete it."
            )
    return len(found)


def _keys(seed: int, numbers: range) -> jax.Array:
    key = jax.random.key(seed)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, np.array(numbers, np.uint32))


def _say_if_endless(ends: Sequence[int], max_new_tokens: int) -> None:
    if not ends:
        _say(
            "The model has no token that ends a text (eos_token_id): each completion "
            f"has {max_new_tokens:,} tokens."
        )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
