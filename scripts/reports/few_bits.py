"""Compares the methods of `zinf quantize` by the perplexity of a small trained model.

    python scripts/reports/few_bits.py [--steps 400] [--bits 4] [--group-size 32]

A Llama of 4 layers of width 128 is trained by torch on the bytes of Python's standard
library, then quantized by each method, which sees 64 rows of these files. The
perplexity is that of 64 rows of other files, by bytes.
"""

import argparse
import math
import sysconfig
import tempfile
from pathlib import Path

import jax
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from zinf import hf
from zinf.hf.rounders import METHODS

LENGTH, ROWS = 128, 64


def rows_of(paths: list[Path]) -> np.ndarray:
    """Rows of bytes, (rows, LENGTH)."""
    data = np.frombuffer(b"".join(path.read_bytes() for path in paths), np.uint8)
    count = len(data) // LENGTH
    return data[: count * LENGTH].reshape(count, LENGTH).astype(np.int32)


def trained(rows: np.ndarray, steps: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
        )
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    draw = np.random.default_rng(0)
    for _ in range(steps):
        ids = torch.tensor(rows[draw.integers(len(rows), size=16)], dtype=torch.long)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def perplexity(folder: Path, rows: np.ndarray) -> float:
    model = hf.load_as_stored(folder)
    files, weights = model.open_weights()
    with files:
        params = {name: np.array(weights.whole(name)) for name in model.specs}
    model.read_buffers()
    logits = jax.jit(model.logits)(params, {"input_ids": rows})
    chances = jax.nn.log_softmax(logits[:, :-1].astype("float32"))
    found = np.take_along_axis(np.asarray(chances), rows[:, 1:, None], axis=2)
    return math.exp(-float(found.mean()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=32)
    args = parser.parse_args()
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    seen, other = rows_of(paths[::2]), rows_of(paths[1::2])
    draw = np.random.default_rng(1)
    calibration = seen[draw.choice(len(seen), ROWS, replace=False)]
    held_out = other[draw.choice(len(other), ROWS, replace=False)]
    with tempfile.TemporaryDirectory() as name:
        plain = Path(name) / "plain"
        trained(seen, args.steps).save_pretrained(plain)
        print(f"plain: {perplexity(plain, held_out):.4f}", flush=True)
        for method in METHODS:
            folder = Path(name) / method
            hf.quantize(
                hf.load_as_stored(plain),
                folder,
                None if method == "rtn" else calibration,
                bits=args.bits,
                method=method,
                group_size=args.group_size,
            )
            print(f"{method}: {perplexity(folder, held_out):.4f}", flush=True)


if __name__ == "__main__":
    main()
