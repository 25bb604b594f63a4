"""A small model that guesses what a large one writes; see `zinf.inference.Drafts`.

The two are engines of the same processes, and the budgets hold for both together: the
small one is placed first, and the large one gets what it leaves.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from zinf.core.config import Config
from zinf.core.machine.devices import on_devices
from zinf.distributed import AbstractGroup, Alone
from zinf.hf.engine import ModelEngine, open_model
from zinf.hf.frozen import place
from zinf.hf.model import Model, load_as_stored
from zinf.inference import ROWS, Drafts

ALONE = Alone()
NUM_TOKENS = 4


@contextmanager
def drafting(
    model: Model,
    name: str,
    config: Config,
    *,
    num_tokens: int = NUM_TOKENS,
    longest: int,
    rows: int = ROWS,
    count: int = 1,
    group: AbstractGroup = ALONE,
) -> Generator[tuple[Drafts, Config], None, None]:
    """Guesses of a small model, and what of the budgets it leaves for the large one.

    Args:
        name: the small model: a folder, or a name on the hub.
        num_tokens: guesses of a pass.
        longest: the most tokens of a text, with its prompt.
        rows, count: sequences of a microbatch, and the most that are written together.
        group: the processes that run both models together.

    Raises:
        ValueError: the two have different vocabularies.
        InfeasibleError: the small model does not fit its share.
        FileNotFoundError, OSError, NotImplementedError: see `load_as_stored`.
    """
    small = load_as_stored(name)
    check_vocabulary(model, small)
    most = longest
    if small.max_length is not None:
        most = min(longest, small.max_length - num_tokens)
    if most < 1:
        raise ValueError(
            f"The draft {name} knows {small.max_length} tokens, which leaves no room "
            f"for {num_tokens} guesses. Ask for fewer."
        )
    _, mesh = on_devices(config)

    def run(own: Config) -> ModelEngine:
        # It is to be fast: it streams only if its share has no room for it.
        fresh = Config.load({})
        where = "weight_quantization", "zero_optimization", "execution"
        own = own.model_copy(update={name: getattr(fresh, name) for name in where})
        engine = open_model(small, own, rows=rows, length=most, group=group)
        _guess(engine, [np.zeros(most, np.int32)] * count, num_tokens, rows, count)
        return engine

    rest = {"number": 1, "group": group}
    frozen = place(f"the draft {name}", config, mesh, run, **rest)
    try:

        def guess(numbers: Sequence[int], texts: Sequence[np.ndarray]) -> list[Any]:
            del numbers
            known = [i for i, text in enumerate(texts) if len(text) <= most]
            if not known:
                return [[]] * len(texts)
            some = [texts[i] for i in known]
            made = _guess(frozen.engine, some, num_tokens, rows, count)
            found: list[Any] = [[] for _ in texts]
            for i, tokens in zip(known, made, strict=True):
                # A model may have rows for more words than its tokenizer.
                unknown = (n for n, x in enumerate(tokens) if x >= model.vocab_size)
                found[i] = tokens[: next(unknown, len(tokens))]
            return found

        yield Drafts(num_tokens, guess), frozen.beside(config)
    finally:
        frozen.close()


def check_vocabulary(model: Model, small: Model) -> None:
    """Raise unless the words of two models have the same numbers."""
    words, others = (x.tokenizer.get_vocab() for x in (model, small))
    if words == others:
        return
    different = next(w for w in {**words, **others} if words.get(w) != others.get(w))
    numbers = words.get(different, "none"), others.get(different, "none")
    raise ValueError(
        f"The draft {small.name} has another vocabulary than {model.name}: their "
        f"tokenizers have {len(others):,} and {len(words):,} words, and {different!r} "
        f"is number {numbers[1]} and {numbers[0]}. A draft must be a smaller model of "
        "the same family."
    )


def _guess(
    engine: ModelEngine,
    texts: Sequence[np.ndarray],
    num_tokens: int,
    rows: int,
    count: int,
) -> list[list[int]]:
    rest = {"rows": rows, "batch_size": count}
    return engine.generate(texts, max_new_tokens=num_tokens, **rest)
