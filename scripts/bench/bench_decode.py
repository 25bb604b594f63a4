"""Generates with a model in memory, in zinf (fused and streamed) and transformers.

    python scripts/bench/bench_decode.py [--batches 1 16] [--tokens 48] [--rounds 5]
        [--dtype float32] [--num-layers 30] [--shortest 8] [--rows 4] [--beside TREE]

All generate greedily with the same Llama of random weights in the shape of
SmolLM2-135M, in the same dtype, from the same prompts; how many texts are the same is
printed. Each contender runs in its own process with all cores. In each round all of
them generate once, in random order, so other load on the machine affects them alike;
ratios are of the same round. zinf's rows are the batch, or --rows.

With --shortest, texts end after --shortest to --tokens tokens, in geometric steps and
random order. `transformers` cannot do that. With --beside, zinf of another tree runs
too; contenders of it end in "-beside".

Needs `zinf[hf]`.
"""

import argparse
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import transformers
from rich.console import Console
from rich.table import Table
from served import Served, answer, answer_texts

NAMES = ("zinf", "zinf-streamed", "transformers")
BESIDE = ("zinf-beside", "zinf-streamed-beside")
WARM_UP = 1  # Rounds that compile.
PROMPT = 16
SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


def save_model(folder: Path, dtype: str, num_layers: int) -> None:
    """Writes a Llama of random weights."""
    import torch

    torch.manual_seed(0)
    shape = SHAPE | {"num_hidden_layers": num_layers}
    config = transformers.LlamaConfig(**shape, dtype=dtype)
    model = transformers.LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)


def serve_torch(given: dict[str, Any]) -> None:
    """Generates for every line of stdin; prints seconds and tokens, as JSON."""
    import torch

    dtype = getattr(torch, given["dtype"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        given["model"], dtype=dtype
    ).eval()
    answer_texts(model, torch.tensor(np.load(given["prompts"])), given["tokens"])


def serve_zinf(given: dict[str, Any], execution: str) -> None:
    """`serve_torch`, of zinf."""
    import zinf
    from zinf import hf

    zinf.tune_malloc()
    prompts = np.load(given["prompts"])
    config = {"execution": execution, "bf16": {"enabled": given["dtype"] != "float32"}}
    model, rows = hf.load(given["model"]), given["rows"] or len(prompts)
    lengths = given["lengths"]
    with hf.open_model(model, config, rows=rows, length=PROMPT) as engine:
        for _ in sys.stdin:
            left = list(lengths)

            def is_over(number: int, token: int, left: list[int] = left) -> bool:
                left[number] -= 1
                return left[number] == 0

            on_token = is_over if len(set(lengths)) > 1 else None
            began = time.perf_counter()
            tokens = engine.generate(
                list(prompts),
                max_new_tokens=given["tokens"],
                rows=rows,
                on_token=on_token,
            )
            answer({"seconds": time.perf_counter() - began, "tokens": tokens})


def race(
    names: Sequence[str], given: dict[str, Any], options: argparse.Namespace
) -> dict[str, list[float]]:
    """The seconds of each contender by round, without those of warming up."""
    here, env = Path(__file__), os.environ | {"JAX_PLATFORMS": "cpu"}
    running, seconds, texts = {}, {name: [] for name in names}, {}
    for name in names:
        tree = options.beside if name in BESIDE else here.parents[2]
        kind = name.removesuffix("-beside")
        command = [sys.executable, here, "--serve", kind, json.dumps(given)]
        running[name] = Served(command, env | {"PYTHONPATH": str(tree)})
    for _ in range(options.rounds + WARM_UP):
        for name in random.sample(names, len(names)):
            found = running[name].ask()
            seconds[name].append(found["seconds"])
            texts[name] = found["tokens"]
    for each in running.values():
        each.close()
    for name in names[1:]:
        pairs = zip(texts[names[0]], texts[name], strict=True)
        same = sum(mine == theirs for mine, theirs in pairs)
        print(f"{name}: {same} of {len(texts[name])} texts are those of {names[0]}")
    return {name: found[WARM_UP:] for name, found in seconds.items()}


def report(batch: int, num_tokens: int, seconds: dict[str, list[float]]) -> None:
    """Prints a table.

    Args:
        num_tokens: of all texts.
    """
    last = list(seconds)[-1]
    table = Table(
        *("", "tokens/s", "least-most", "s a text", f"time of {last} / own"),
        box=None,
    )
    theirs = seconds[last]
    for name, found in seconds.items():
        rates = sorted(num_tokens / s for s in found)
        ratios = sorted(b / a for a, b in zip(found, theirs, strict=True))
        table.add_row(
            name,
            f"{median(rates):.1f}",
            f"{rates[0]:.1f}-{rates[-1]:.1f}",
            f"{median(found):.2f}",
            f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
        )
    print(f"\nbatch {batch}, load {os.getloadavg()[0]:.1f} at the end")
    Console(width=100, highlight=False).print(table)


def main() -> None:
    options = parse()
    versions = {name: version(name) for name in ("jax", "torch", "transformers")}
    print(platform.platform(), f"{os.cpu_count()} cores", versions, options.dtype)
    with tempfile.TemporaryDirectory(prefix="zinf-decode-") as place:
        folder = Path(place)
        save_model(folder / "model", options.dtype, options.num_layers)
        for batch in options.batches:
            prompts = folder / f"prompts-{batch}.npy"
            rng = np.random.default_rng(0)
            np.save(prompts, rng.integers(3, SHAPE["vocab_size"], (batch, PROMPT)))
            given = {"model": str(folder / "model"), "prompts": str(prompts)}
            given |= {"tokens": options.tokens, "dtype": options.dtype}
            lengths = batch * [options.tokens]
            if options.shortest is not None:
                steps = np.geomspace(options.shortest, options.tokens, batch)
                lengths = rng.permutation(np.round(steps).astype(int)).tolist()
            given |= {"rows": options.rows, "lengths": lengths}
            report(batch, sum(lengths), race(names_of(options), given, options))


def names_of(options: argparse.Namespace) -> list[str]:
    if options.contenders:
        return options.contenders
    names = NAMES[:2] if options.shortest is not None else NAMES
    return [*names, *(BESIDE if options.beside is not None else ())]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=48, help="new ones of a text")
    parser.add_argument("--rounds", type=int, default=5, help=f"after {WARM_UP} more")
    parser.add_argument("--num-layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--rows", type=int, help="zinf's, of a microbatch")
    parser.add_argument("--shortest", type=int, help="least tokens of a text")
    parser.add_argument("--beside", type=Path, help="another tree of zinf")
    parser.add_argument("--contenders", nargs="+", choices=(*NAMES, *BESIDE))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    return parser.parse_args()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        name, given = sys.argv[2], json.loads(sys.argv[3])
        if name == "transformers":
            serve_torch(given)
        else:
            serve_zinf(given, "streamed" if name == "zinf-streamed" else "auto")
    else:
        main()
