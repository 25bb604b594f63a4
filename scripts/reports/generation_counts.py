"""Counts what generation reads, computes and compiles.

    python scripts/reports/generation_counts.py

Prints a table for scripts/RESULTS.md. Weights of small GPTs rest on the host, so each
pass brings them to the device. All figures are counts: bytes that were moved, passes,
prompts that were read, programs that were compiled. No time is measured.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import zinf
from zinf.core.plan import Link
from zinf.core.step.run import passes
from zinf.inference import Drafts, fused_run, generate
from zinf.models import GPT, GPTConfig, next_token_loss

SHAPE = {
    "num_layers": 4,
    "num_heads": 4,
    "embed_dim": 64,
    "max_length": 128,
    "vocab_size": 256,
    "use_bias": False,
}
MIXTURE = {"num_experts": 128, "experts_per_token": 8, "mlp_dim": 64}
ON_HOST = {
    "execution": "streamed",
    "persistence_threshold": 0,
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "cpu"},
    },
}
NEW = 33  # Tokens of a text: one of a prefill, and 32 passes.
RNG = np.random.default_rng(0)
PROMPT = RNG.integers(0, 256, 24)


def engine_of(config: Mapping[str, Any], **shape: Any) -> Any:
    made = GPTConfig(**{**SHAPE, **shape})
    batch = {"tokens": np.zeros((8, 17), np.int32)}

    def create() -> GPT:
        return GPT(made, rngs=nnx.Rngs(0))

    return zinf.nnx.initialize(
        next_token_loss, create, optax.sgd(0.1), config, batch=batch
    )


@contextlib.contextmanager
def counted() -> Iterator[dict[str, list[Any]]]:
    """The bytes that each pass brings to the device, and the prompts that it reads."""
    found: dict[str, list[Any]] = {"bytes": [], "read": []}
    run_plan, run = passes.run_plan, generate._Program.run

    def with_bytes(plan: Any, work: Any, stores: Any, seeds: Any, record: Any) -> None:
        run_plan(plan, work, stores, seeds, record)
        found["bytes"].append(record.moved_bytes[Link.H2D])

    def with_prompts(program: Any, inputs: Sequence[Mapping[str, Any]]) -> Any:
        parts = [x["batch/is_first"].sum() for x in inputs if "batch/is_first" in x]
        found["read"].append(int(sum(parts)))
        return run(program, inputs)

    passes.run_plan, generate._Program.run = with_bytes, with_prompts
    try:
        yield found
    finally:
        passes.run_plan, generate._Program.run = run_plan, run


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore
    handler.addFilter(lambda record: "Compiling" in record.getMessage())
    logger = logging.getLogger("jax")
    logger.addHandler(handler)
    try:
        with jax.log_compiles():
            yield found
    finally:
        logger.removeHandler(handler)


def bytes_a_token(engine: Any, count: int, **how: Any) -> float:
    """Bytes that passes after prompts bring, over tokens and bytes of the model."""
    prompts = [RNG.integers(0, 256, 24) for _ in range(count)]
    rows = min(8, count)
    with counted() as found:
        engine.generate(prompts, max_new_tokens=NEW, rows=rows, **how)
    moved = [
        n for n, read in zip(found["bytes"], found["read"], strict=True) if not read
    ]
    return sum(moved) / ((NEW - 1) * count) / engine.planner.param_bytes


def drafts_of(text: Sequence[int], share: float) -> Drafts:
    """Four guesses a pass, each right with a probability of its own place."""
    is_right = np.random.default_rng(1).random(len(text)) < share

    def guess(numbers: Sequence[int], texts: Sequence[np.ndarray]) -> list[list[int]]:
        first = len(texts[0]) - len(PROMPT)
        places = range(first, min(first + 4, len(text)))
        return [[text[i] if is_right[i] else (text[i] + 1) % 256 for i in places]]

    return Drafts(4, guess)


def rows() -> Iterator[tuple[str, str]]:
    with engine_of(ON_HOST) as engine:
        for count in (1, 8, 64):
            name = f"weights of a token, {count} sequences (bytes over model bytes)"
            yield name, f"{bytes_a_token(engine, count):.4f}"
        rest = {"max_new_tokens": NEW, "rows": 1}
        (text,) = engine.generate([PROMPT], **rest)
        for share in (0.5, 0.9):
            drafts = drafts_of(text, share)
            with counted() as found:
                assert engine.generate([PROMPT], drafts=drafts, **rest) == [text]
            passes_made = len(found["bytes"]) - 1
            name = f"passes of a token, 4 drafts each right at {share:.0%}"
            yield name, f"{passes_made / (NEW - 1):.2f}"
        with counted() as found:
            engine.generate(8 * [PROMPT], max_new_tokens=4, rows=8)
        name = f"prompt tokens read for 8 completions of {len(PROMPT)} tokens"
        yield name, str(sum(found["read"]) * len(PROMPT))
    for mode, config in (("fused", {}), ("streamed", ON_HOST)):
        with engine_of(config) as engine:
            with compilations() as first:
                engine.generate([PROMPT], max_new_tokens=4)
            with compilations() as later:
                for _ in range(99):
                    engine.generate([PROMPT], max_new_tokens=4)
        name = f"programs compiled by the first of 100 calls, and by the others, {mode}"
        yield name, f"{len(first)}, {len(later)}"
    yield from rows_of_joining()
    yield from rows_of_experts()


@contextlib.contextmanager
def row_tokens() -> Iterator[list[int]]:
    """The tokens that each pass computes after prompts, of all rows; fused ones too."""
    found: list[int] = []
    run, next_tokens = generate._Program.run, fused_run._Run.next_tokens

    def streamed(program: Any, inputs: Sequence[Mapping[str, Any]]) -> Any:
        rows = [len(x["batch/num_tokens"]) for x in inputs if "batch/num_tokens" in x]
        if rows:
            found.append(sum(rows))
        return run(program, inputs)

    def fused(self: Any, state: Any) -> Any:
        made = self.programs

        def decode(*arguments: Any) -> Any:
            state, passes = made.decode(*arguments)
            found.extend(int(passes) * [self.shape.rows])
            return state, passes

        self.programs = replace(made, decode=decode)
        state = next_tokens(self, state)
        self.programs = made
        return state

    generate._Program.run, fused_run._Run.next_tokens = streamed, fused
    try:
        yield found
    finally:
        generate._Program.run, fused_run._Run.next_tokens = run, next_tokens


def rows_of_joining() -> Iterator[tuple[str, str]]:
    """16 texts of 8 to 256 tokens in geometric steps, in random order."""
    steps = np.round(np.geomspace(8, 256, 16)).astype(int)
    lengths = np.random.default_rng(0).permutation(steps).tolist()
    prompts = [RNG.integers(0, 256, 12) for _ in lengths]
    groups = [max(lengths[i : i + 4]) - 1 for i in range(0, 16, 4)]
    name = "passes and row-tokens after the prompts of 16 texts of 8 to 256 tokens, "
    yield name + "needed", f"{max(lengths) - 1}, {sum(lengths) - 16:,}"
    four = f"{sum(groups)}, {4 * sum(groups):,}"
    yield name + "four at a time, until the slowest of four ends", four
    whole = f"{max(lengths) - 1}, {16 * (max(lengths) - 1):,}"
    yield name + "all at a time, until the slowest ends", whole
    for mode, config, how in (
        ("four at a time, fused", {}, {}),
        ("four at a time, streamed", ON_HOST, {"batch_size": 4}),
        ("all at a time, in four microbatches", ON_HOST, {}),
    ):
        left = list(lengths)

        def is_over(number: int, token: int, left: list[int] = left) -> bool:
            left[number] -= 1
            return left[number] == 0

        with engine_of(config, max_length=512) as engine, row_tokens() as found:
            rest = {"max_new_tokens": 256, "rows": 4, "on_token": is_over}
            engine.generate(prompts, **rest, **how)
        yield name + mode, f"{len(found)}, {sum(found):,}"


def rows_of_experts() -> Iterator[tuple[str, str]]:
    """8 of 128 experts at one sequence, with slots for one token and for all."""
    expert_bytes = 2 * 64 * 64 * 4
    shares = {}
    for name, slots in (("off", "off"), ("8 slots", 8 * expert_bytes), ("all", None)):
        config = ON_HOST | {"memory": {"experts": slots}}
        with engine_of(config, **MIXTURE) as engine:
            shares[name] = bytes_a_token(engine, 1)
    for name in ("8 slots", "all"):
        slots = "8 slots" if name == "8 slots" else "a slot for each expert"
        text = f"bytes of a token, 8 of 128 experts, {slots} (over reading all)"
        yield text, f"{shares[name] / shares['off']:.3f}"


def main() -> None:
    print("| counted | |\n|---|---|")
    for name, value in rows():
        print(f"| {name} | {value} |", flush=True)


if __name__ == "__main__":
    main()
