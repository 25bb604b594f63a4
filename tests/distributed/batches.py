"""`zinf train` in one process of several, which prints the rows of each step."""

import json
from collections.abc import Callable
from typing import Any
from zlib import crc32

import jax
import numpy as np

import zinf.trainer
from zinf.cli import app
from zinf.engine import Engine


def main(folder: str, num_microbatches: str, *arguments: str) -> None:
    """Run `zinf ARGUMENTS`, and print `batch STEP SHAPES HASHES` before each step.

    Hashes are of this process's rows, with all leaves of the batch, by microbatch.

    Args:
        folder: where compiled programs are kept, which runs have in common.
    """
    jax.config.update("jax_compilation_cache_dir", f"{folder}/compiled")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    take: Callable = Engine.step

    def step(engine: Engine, batch: Any) -> object:
        leaves = [np.asarray(batch[name]) for name in sorted(batch)]
        rows = [crc32(b"".join(part.tobytes() for part in r)) for r in zip(*leaves)]  # noqa: B905
        parts = np.split(np.array(rows), int(num_microbatches))
        shapes = [leaf.shape[1:] for leaf in leaves]
        told = [engine.num_steps + 1, shapes, [part.tolist() for part in parts]]
        print("batch", json.dumps(told), flush=True)
        return take(engine, batch)

    zinf.trainer.Engine.step = step
    app(list(arguments))
