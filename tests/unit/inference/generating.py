"""Small GPTs that generate, and what tests of generation count."""

import contextlib
import logging
from dataclasses import replace

import jax
import numpy as np
import optax
from flax import nnx

import zinf
from tests.tiers import streamed
from zinf.inference import fused_run, generate
from zinf.inference.plan import PROMPTS as BESIDE
from zinf.models import GPT, GPTConfig, next_token_loss

SHAPE = GPTConfig(num_layers=2, num_heads=2, embed_dim=32, max_length=64, vocab_size=97)
LLAMA = {
    "position": "rope",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "num_kv_heads": 1,
    "tied_embeddings": False,
    "use_bias": False,
}
MIXTURE = {"num_experts": 8, "experts_per_token": 2}
DRAWN = {
    "temperature": 0.9,
    "top_k": 60,
    "top_p": 0.95,
    "min_p": 0.01,
    "repetition_penalty": 1.2,
    "eos_token_ids": (5,),
    "min_new_tokens": 2,
}
RNG = np.random.default_rng(0)
BATCH = {"tokens": RNG.integers(0, 97, (4, 17))}
PROMPTS = [RNG.integers(0, 97, length) for length in (3, 1, 9, 16)]
KEYS = jax.random.split(jax.random.key(0), len(PROMPTS))


def make_engine(settings=None, *, group=None, **shape):
    config = GPTConfig(**{**SHAPE.__dict__, **shape})
    create = lambda: GPT(config, rngs=nnx.Rngs(0))  # noqa: E731
    tx = optax.sgd(1.0)
    rest = {"batch": BATCH, "group": group}
    return zinf.nnx.initialize(next_token_loss, create, tx, settings or {}, **rest)


def on_nvme(folder):
    return streamed("nvme", folder, segment={}, persistence_threshold=0)


def used_bytes(engine):
    """The bytes of each tier that arrays take."""
    return [engine.stores[tier].ledger.used_bytes for tier in engine.stores.tiers]


def programs(engine):
    """The programs that the engine used last: fused ones, or a prefill and a decode."""
    return list(engine._programs.made._made.values())[-1]


def spied(engine, name):
    """A list that gets the arguments of the calls of an executable, as they come."""
    made, found = programs(engine), []
    run = getattr(made.programs, name)

    def called(*arguments):
        result = run(*arguments)
        found.append((arguments, result))
        return result

    key = list(engine._programs.made._made)[-1]
    instead = replace(made, programs=replace(made.programs, **{name: called}))
    engine._programs.made._made[key] = instead
    return found


@contextlib.contextmanager
def counting_compilations():
    """The names of the programs that jax compiles while the body runs."""
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    handler.addFilter(lambda record: "Compiling" in record.getMessage())
    logger = logging.getLogger("jax")
    logger.addHandler(handler)
    try:
        with jax.log_compiles():
            yield found
    finally:
        logger.removeHandler(handler)


@contextlib.contextmanager
def counting_passes():
    """A list that gets an item for each pass over the tokens of open texts, fused.

    The item is the number of open texts before it.
    """
    found, run = [], fused_run._Run.next_tokens

    def counted(run_self, state):
        decode = run_self.programs.decode

        def counted_decode(weights, state, is_open, *rest):
            state, passes = decode(weights, state, is_open, *rest)
            found.extend(int(passes) * [int(is_open.sum())])
            return state, passes

        run_self.programs = replace(run_self.programs, decode=counted_decode)
        try:
            return run(run_self, state)
        finally:
            run_self.programs = replace(run_self.programs, decode=decode)

    fused_run._Run.next_tokens = counted
    try:
        yield found
    finally:
        fused_run._Run.next_tokens = run


@contextlib.contextmanager
def counting_after_prompts():
    """A function that counts the passes so far, of both kinds, but those of prompts."""
    with counting_sweeps() as sweeps, counting_passes() as passes:
        yield lambda: len(passes) + sum(not is_prompt(sweep) for sweep in sweeps)


def is_prompt(sweep):
    """Whether a streamed pass reads prompts, in parts of more than 8 tokens."""
    return sweep[-1][1] > 8


@contextlib.contextmanager
def counting_sweeps():
    """The shapes (B, S) of the tokens that each streamed pass reads."""
    found, run = [], generate._Program.run

    def counted(program, inputs):
        names = "batch/tokens", BESIDE + "batch/tokens"
        found.append([x[n].shape for n in names for x in inputs if n in x])
        return run(program, inputs)

    generate._Program.run = counted
    try:
        yield found
    finally:
        generate._Program.run = run
