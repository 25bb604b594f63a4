"""Small GPTs that generate, and what tests of generation count."""

import contextlib
import logging

import jax
import numpy as np
import optax
from flax import nnx

import zinf
from tests.tiers import streamed
from zinf.inference import generate
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


def make_engine(settings=None, **shape):
    config = GPTConfig(**{**SHAPE.__dict__, **shape})
    create = lambda: GPT(config, rngs=nnx.Rngs(0))  # noqa: E731
    tx = optax.sgd(1.0)
    return zinf.nnx.initialize(next_token_loss, create, tx, settings or {}, batch=BATCH)


def on_nvme(folder):
    return streamed("nvme", folder, segment={}, persistence_threshold=0)


def used_bytes(engine):
    """The bytes of each tier that arrays take."""
    return [engine.stores[tier].ledger.used_bytes for tier in engine.stores.tiers]


def programs(engine):
    """The programs that the engine used last: fused ones, or a prefill and a decode."""
    return list(engine._programs.made._made.values())[-1]


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
def counting_sweeps():
    """The shapes (B, S) of the tokens that each streamed pass reads."""
    found, run = [], generate._Program.run

    def counted(program, inputs):
        found.append([leaves["batch/tokens"].shape for leaves in inputs])
        return run(program, inputs)

    generate._Program.run = counted
    try:
        yield found
    finally:
        generate._Program.run = run
