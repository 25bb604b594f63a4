"""`zinf generate` and `zinf evaluate`: models of transformers, run and not trained."""

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from math import exp
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import jax
import numpy as np

from zinf import hf
from zinf.cli.endings import say_nothing
from zinf.cli.outputs import JsonLines, check_output, resumed
from zinf.core.config import Config
from zinf.core.config.deciding import deciding
from zinf.core.text.complaint import complain, tell
from zinf.distributed import AbstractGroup, Alone
from zinf.inference import ROWS, Drafts, Sampling, bucket

ALONE = Alone()
# Microbatches of `ROWS` samples that pass a layer before the next one is fetched.
MICROBATCHES = 8


@dataclass(frozen=True)
class Drafting:
    """A small model that guesses so many tokens of a large one each time."""

    name: str
    num_tokens: int


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
    chat: bool | None,
    images: Sequence[Path] = (),
    drafting: Drafting | None = None,
    group: AbstractGroup = ALONE,
) -> None:
    """Prints what a model writes after a prompt, as it is made, and nothing else.

    Args:
        images: what the user shows before the prompt.
        group: the processes that make the text together; the first one prints it.
    """
    seen = None
    if images:
        _refuse_beside_images(given, chat, drafting)
        model = hf.in_stored_precision(hf.load_with_images(name, base=base))
        seen = hf.image_prompt(model, line["prompt"], images)
    else:
        model = hf.load_as_stored(name, base=base)
    sampling = hf.settings_of(model, given)
    is_chat = seen is not None or _is_chat(model, chat)
    if seen is None:
        prompt = hf.prompt_tokens(model, line, "--prompt", chat=is_chat)
    else:
        prompt = seen.tokens
    say = _say if group.is_first else say_nothing
    _say_if_endless(sampling.eos_token_ids, max_new_tokens, say)
    length = bucket(len(prompt))
    # A pipe or a file gets the text as it is.
    write = tell if sys.stdout.isatty() else partial(print, flush=True)
    write = write if group.is_first else say_nothing
    longest = len(prompt) + max_new_tokens
    with (
        _guessing(drafting, model, given, config, longest, group, rows=1) as (
            drafts,
            left,
        ),
        hf.open_model(model, left, rows=1, length=length, group=group) as engine,
    ):
        decoder = None if seen is None else hf.decoder_after(engine, seen)
        (text,) = hf.complete_texts(
            engine,
            [prompt],
            sampling,
            max_new_tokens=max_new_tokens,
            keys=_keys(seed, range(1)),
            rows=1,
            drafts=drafts if seen is None else None,
            decoder=decoder,
            on_text=partial(write, end=""),
        )
    write("")
    if not text:
        other = "--raw" if is_chat else "--chat"
        say(f"The model ended the text at once. Is {other} meant?")


def _refuse_beside_images(
    given: Mapping[str, Any],
    chat: bool | None,
    drafting: Drafting | None,
) -> None:
    """Refuse options that have no meaning with images, or are not there yet."""
    if chat is False:
        raise ValueError(
            "--raw with --image: only the chat template of a model says where images "
            "are in a text. Leave --raw out."
        )
    if drafting is not None or given.get("prompt_lookup_num_tokens"):
        option = "--draft" if drafting is not None else "--prompt-lookup-num-tokens"
        raise NotImplementedError(
            f"{option} is not supported with --image. Leave it out."
        )


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
    chat: bool | None,
    batch_size: int,
    allow_changed: Sequence[str] = (),
    drafting: Drafting | None = None,
    group: AbstractGroup = ALONE,
) -> None:
    """Writes each line of a file of prompts with its `completion` to another file.

    Lines that the output has already are left out, so that the command can be given
    again after it was stopped. A line depends on the seed and on its own number.

    Args:
        group: the processes that make them together; the first one writes.

    Raises:
        ValueError: the output has other content, which is left as it is; or its lines
            were made with other settings than now, which `allow_changed` does not name.
        StorageError: another command writes to the output.
    """
    if group.is_first:
        check_output(output, prompts, "the file of prompts")
    say = _say if group.is_first else say_nothing
    model = hf.load_as_stored(name, base=base)
    sampling = hf.settings_of(model, given)
    is_chat = _is_chat(model, chat)
    # All lines are read first: what is wrong with the last is known before the first.
    lines = [
        (line, hf.prompt_tokens(model, line, where, chat=is_chat))
        for line, where in hf.records(prompts)
    ]
    if not lines:
        raise ValueError(f"{prompts}: there is no line to read.")
    settings: dict[str, Any] = {
        "model.weights": model.digest,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "chat": is_chat,
        **{f"sampling.{key}": value for key, value in asdict(sampling).items()},
        **{k: v for k, v in deciding(config).items() if not is_of_training(k)},
    }
    read = [line for line, _ in lines]
    form = JsonLines(read, [("completion",)] * len(read), "completion")
    with resumed(output, form, settings, allow_changed, say, group) as begun:
        if begun.done == len(lines):
            return
        _say_if_endless(sampling.eos_token_ids, max_new_tokens, say)
        longest = max(len(tokens) for _, tokens in lines[begun.done :])
        rows = {"rows": ROWS, "count": min(batch_size, len(lines) - begun.done)}
        most, length = longest + max_new_tokens, bucket(longest)
        with (
            _guessing(drafting, model, given, config, most, group, **rows) as (
                drafts,
                left,
            ),
            hf.open_model(model, left, rows=ROWS, length=length, group=group) as engine,
            begun.appending() as append,
        ):
            _complete(
                engine,
                [tokens for _, tokens in lines],
                append,
                sampling,
                drafts=drafts,
                done=begun.done,
                max_new_tokens=max_new_tokens,
                seed=seed,
                batch_size=batch_size,
                say=say,
            )


@contextmanager
def _guessing(
    drafting: Drafting | None,
    model: "hf.Model",
    given: Mapping[str, Any],
    config: Config,
    longest: int,
    group: AbstractGroup,
    **rows: int,
) -> Generator[tuple[Drafts | None, Config], None, None]:
    """Guesses of next tokens, if there are any, and what of the budgets is left.

    Args:
        longest: the most tokens of a text, with its prompt.
        rows: see `hf.drafting`.
    """
    if drafting is None:
        yield hf.lookup_of(model, given), config
        return
    how = {"num_tokens": drafting.num_tokens, "longest": longest, **rows}
    with hf.drafting(model, drafting.name, config, group=group, **how) as found:
        yield found


def _complete(
    engine: "hf.ModelEngine",
    prompts: Sequence[np.ndarray],
    append: Callable[[Sequence[Mapping[str, Any]]], None],
    sampling: Sampling,
    *,
    drafts: Drafts | None,
    done: int,
    max_new_tokens: int,
    seed: int,
    batch_size: int,
    say: Callable[[str], None],
) -> None:
    """Append all completions after the first `done`, a batch at a time."""
    start, count = perf_counter(), 0
    for first in range(done, len(prompts), batch_size):
        some = prompts[first : first + batch_size]
        texts = hf.complete_texts(
            engine,
            some,
            sampling,
            max_new_tokens=max_new_tokens,
            keys=_keys(seed, range(first, first + len(some))),
            rows=ROWS,
            drafts=drafts,
        )
        append([{"completion": text} for text in texts])
        count += len(some)
        rate = 60 * count / (perf_counter() - start)
        say(f"{first + len(some):,} of {len(prompts):,} lines, {rate:.1f} a minute")


def print_evaluation(
    name: str,
    data: Sequence[Path],
    config: Config,
    *,
    base: str | None,
    sequence_length: int,
    too_long: Literal["error", "truncate", "drop"],
    completion_only: bool,
) -> None:
    """Prints the mean loss of the lines of files, in nats a token, and the speed.

    Of a reward model it prints how often chosen answers have the higher score, and by
    how much.
    """
    if hf.is_reward_model(name):
        start, limit = perf_counter(), sequence_length
        given = name, data, config
        found = hf.rate(*given, sequence_length=limit, too_long=too_long, say=tell)
        count, seconds = len(found.scores), perf_counter() - start
        tell(
            f"loss {found.loss:.6g}, accuracy {found.accuracy:.6g}, margin "
            f"{found.margin:.6g}, mean reward {found.scores.mean():.6g}, {count:,} "
            f"pairs, {count / seconds:,.1f} pairs/s"
        )
        return
    model = hf.load_as_stored(name, base=base)
    if model.max_length is not None:
        sequence_length = min(sequence_length, model.max_length)
    how = hf.Tokenizing(
        model.tokenizer,
        sequence_length=sequence_length,
        too_long=too_long,
        completion_only=completion_only,
        vocab_size=model.vocab_size,
    )
    read = [how.read(*line) for path in data for line in hf.records(path)]
    samples = [sample for reading in read for sample in reading.samples]
    num_cut = sum(reading.is_cut for reading in read)
    num_dropped = len(read) - len(samples)
    how.begun_inside.warn()
    if not samples:
        raise ValueError(hf.no_samples(data, how, num_dropped))
    if num_cut or num_dropped:
        tell(f"{hf.treated(how, num_cut, num_dropped)}.")
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
    tell(
        f"loss {loss:.6g}, perplexity {exp(loss) if loss < 700 else float('inf'):.6g}, "
        f"{count:,} tokens of {len(samples):,} samples, {count / seconds:,.1f} tokens/s"
    )


def _padded(
    samples: Sequence[tuple[list[int], list[int]]],
) -> tuple[dict[str, np.ndarray], int]:
    """Samples padded to whole microbatches, and the number of these.

    Padded rows and tokens have no label.
    """
    num_microbatches = -(-len(samples) // ROWS)
    shape = num_microbatches * ROWS, bucket(max(len(ids) for ids, _ in samples))
    tokens, labels = np.zeros(shape, np.int32), np.full(shape, hf.IGNORED, np.int32)
    for row, (ids, found) in enumerate(samples):
        tokens[row, : len(ids)], labels[row, : len(ids)] = ids, found
    return {"input_ids": tokens, "labels": labels}, num_microbatches


def is_of_training(key: str) -> bool:
    """Whether a key, which decides the numbers of training, affects nothing else."""
    return key == "train_batch_size" or key.startswith("data.")


def _keys(seed: int, numbers: range) -> jax.Array:
    key = jax.random.key(seed)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, np.array(numbers, np.uint32))


def _is_chat(model: "hf.Model", asked: bool | None) -> bool:
    """Whether a prompt is laid out by the chat template, if there is one."""
    return model.tokenizer.chat_template is not None if asked is None else asked


def _say_if_endless(
    ends: Sequence[int], max_new_tokens: int, say: Callable[[str], None]
) -> None:
    if not ends:
        say(
            "The model has no token that ends a text (eos_token_id): each completion "
            f"has {max_new_tokens:,} tokens."
        )


def _say(text: str) -> None:
    complain(text)
