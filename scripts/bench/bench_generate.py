"""Generates with weights on a drive, in zinf and with `accelerate`'s disk offload.

    python scripts/bench/bench_generate.py --folder /mnt/nvme \\
        --accelerate-python VENV/bin/python

Both generate greedily with the same Llama of random weights in float32, from the same
prompts; how many texts are the same is printed. Each contender runs in its own process.
In each round all of them generate once, in random order, so other load on the machine
affects them alike; in each round the drive is measured too, by reading the file of
weights with O_DIRECT. The bound is the least of these times for each token: all weights
are read once a token, whatever the batch.

zinf has budgets of --device and --host, and all its weights rest on the drive (--tier
nvme) or on the host. Beside its time is what `zinf plan --generate` predicts for a
token, with rates that are measured before each round.
accelerate has device_map="auto", max_memory={"cpu": --cpu} and an offload_folder. It
reads files through the page cache, in which this model has room; for one that is larger
than memory they are not there, so "accelerate" drops them before each token.
"accelerate-cached" leaves them there.

Memory is the most anonymous memory of a process (`anonymous_memory.py`), bytes are what
the kernel counts as read from a drive (/proc/PID/io). What accelerate keeps in memory
is mapped from the file of weights, and so is not anonymous: --cpu comes on top.

Needs `zinf[hf]`. DeepSpeed is not among the contenders: no version that has
ZeRO-Inference comes as a wheel.
"""

import argparse
import json
import os
import platform
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import transformers
from anonymous_memory import MemoryPeak
from rich.console import Console
from rich.table import Table
from served import Served, answer

import zinf
from zinf import hf
from zinf.cli.forecast import pace_of, planned_generation
from zinf.core.engine.initialize import measuring
from zinf.core.machine.devices import on_devices
from zinf.core.memory import aligned_empty
from zinf.core.step.run import calibrate
from zinf.hf.engine import running
from zinf.inference import Forecast, forecasts

NAMES = ("zinf", "accelerate", "accelerate-cached")
WARM_UP = 1  # Rounds that compile and fault in memory.
PROMPT = 16
BLOCK, THREADS = 2**22, 8


def save_model(folder: Path, options: argparse.Namespace) -> int:
    """Writes a Llama of random weights in one file; returns the bytes of weights."""
    import torch

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=options.vocab_size,
        hidden_size=options.hidden_size,
        intermediate_size=11 * options.hidden_size // 4,
        num_hidden_layers=options.num_layers,
        num_attention_heads=options.hidden_size // 64,
        num_key_value_heads=options.hidden_size // 256,
        max_position_embeddings=1024,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="1TB")
    return sum(p.nbytes for p in model.parameters())


def serve(options: dict[str, Any]) -> None:
    """Generates for every line of stdin; prints seconds and tokens, as JSON."""
    zinf.tune_malloc()
    prompts = np.load(options["prompts"])
    offload = {"device": "cpu" if options["tier"] == "host" else "nvme"}
    budgets = {"device": options["device"], "host": options["host"]}
    config = {
        "memory": budgets | {"nvme": [options["folder"]]},
        "zero_optimization": {"stage": 3, "offload_param": offload},
        "persistence_threshold": 1,
        "rates": "measured",
        "compile_cache": False,
    }
    rows = min(len(prompts), options["rows"])
    model = hf.load(options["model"])
    with hf.open_model(model, config, rows=rows, length=PROMPT) as engine:
        answer({"homes": sorted({t.name for t in engine.residents.homes.values()})})
        for _ in sys.stdin:
            before = moved("self")
            predicted = predict(model, config, len(prompts), rows, options["tokens"])
            aside, began = moved("self") - before, time.perf_counter()
            tokens = engine.generate(
                list(prompts), max_new_tokens=options["tokens"], rows=rows
            )
            seconds = time.perf_counter() - began
            told = {"seconds": seconds, "tokens": tokens}
            answer(told | {"predicted": predicted, "aside": aside})


def moved(process: int | str) -> int:
    """Bytes that a process has read from drives, in total."""
    lines = Path(f"/proc/{process}/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def predict(model: Any, config: Any, batch: int, rows: int, num_tokens: int) -> float:
    """Seconds of a call as `zinf plan --generate` predicts them, measuring anew."""
    calibrate.FOUND.clear()
    run = running(model, config, rows=rows, length=PROMPT)
    _, mesh = on_devices(config)
    planner = measuring(run.planner(mesh=mesh, topology=None))
    generation, placed = planned_generation(run, planner)
    (found,) = forecasts(
        generation,
        (batch,),
        prompt_length=PROMPT,
        max_new_tokens=num_tokens,
        pace=pace_of(run.config, None, placed),
    )
    assert isinstance(found, Forecast)
    return found.prefill_seconds + (num_tokens - 1) * found.decode_seconds


class Contender(Served):
    """A process that generates on request."""

    def __init__(
        self, name: str, options: argparse.Namespace, given: dict[str, Any]
    ) -> None:
        self.name, here = name, Path(__file__)
        place = Path(given["folder"]) / name
        place.mkdir()
        given = given | {"folder": str(place), "evicts": name == "accelerate"}
        command = [options.accelerate_python, here.with_name("accelerate_llama.py")]
        if name == "zinf":
            command = [sys.executable, here, "--serve"]
        threads = str(os.cpu_count())
        env = os.environ | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": threads}
        # torch uses huge pages only with this variable; NumPy and zinf do by default.
        env |= {"THP_MEM_ALLOC_ENABLE": "1", "PYTHONPATH": str(here.parents[2])}
        super().__init__([*command, json.dumps(given)], env)
        self.peak = MemoryPeak(self.process.pid)
        self.ready = self.answer()
        self.seconds: list[float] = []
        self.predicted: list[float] = []
        self.read: list[int] = []
        self.tokens: list[list[int]] = []

    def generate(self) -> None:
        before = moved(self.process.pid)
        found = self.ask()
        aside = found.get("aside", 0)
        self.read.append(moved(self.process.pid) - before - aside)
        self.seconds.append(found["seconds"])
        self.predicted.append(found.get("predicted", float("nan")))
        self.tokens = found["tokens"]

    def close(self) -> None:
        self.peak_bytes = self.peak.nbytes()
        self.peak.stop()
        super().close()


def read_seconds(path: Path) -> float:
    """The time to read a file past the page cache, with several reads at once."""
    size = path.stat().st_size // BLOCK * BLOCK
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    # Private memory, so on huge pages: into small ones, reads are half as fast.
    memory = [aligned_empty((BLOCK,), np.uint8) for _ in range(THREADS)]

    def work(number: int) -> None:
        for start in range(number * BLOCK, size, THREADS * BLOCK):
            os.preadv(file, [memory[number]], start)

    began = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))
    seconds = time.perf_counter() - began
    os.close(file)
    return seconds * path.stat().st_size / max(1, size)


def race(batch: int, options: argparse.Namespace, given: dict[str, Any]) -> Any:
    """The contenders after all rounds, and the seconds of reading the weights."""
    weights = Path(given["model"]) / "model.safetensors"
    names = [n for n in NAMES if n == "zinf" or options.accelerate_python is not None]
    # Started one at a time, so that compilation does not slow others.
    running = [Contender(name, options, given) for name in names]
    drive: list[float] = []
    for _ in range(options.rounds + WARM_UP):
        for contender in random.sample([*running, None], len(running) + 1):
            if contender is None:
                drive.append(read_seconds(weights))
            else:
                contender.generate()
    for contender in running:
        contender.close()
    first = running[0]
    for other in running[1:]:
        pairs = zip(first.tokens, other.tokens, strict=True)
        same = sum(mine == theirs for mine, theirs in pairs)
        print(f"{other.name}: {same} of {batch} texts are those of {first.name}")
    return running, drive[WARM_UP:]


def report(batch: int, running: Any, drive: list[float], num_tokens: int) -> Any:
    """Prints a table; returns its figures."""
    bound = min(drive)
    table = Table(
        *("", "tokens/s", "least-most", "s a token", "over bound", "over zinf"),
        *("GB read a token", "GiB peak", "predicted"),
        box=None,
    )
    zinf_rounds = running[0].seconds[WARM_UP:]
    figures = {}
    for contender in running:
        seconds = contender.seconds[WARM_UP:]
        rates = sorted(batch * num_tokens / s for s in seconds)
        ratio = median(s / own for s, own in zip(seconds, zinf_rounds, strict=True))
        peak = contender.peak_bytes
        read = median(contender.read[WARM_UP:]) / num_tokens
        table.add_row(
            contender.name,
            f"{median(rates):.2f}",
            f"{rates[0]:.2f}-{rates[-1]:.2f}",
            f"{median(seconds) / num_tokens:.2f}",
            f"{median(seconds) / num_tokens / bound:.2f}",
            f"{ratio:.2f}",
            f"{read / 1e9:.2f}",
            f"{peak / 2**30:.2f}",
            ratios(contender.predicted[WARM_UP:], seconds),
        )
        figures[contender.name] = {
            "seconds": seconds,
            "peak": peak,
            "read": read,
            "predicted": contender.predicted[WARM_UP:],
        }
    print(f"\nbatch {batch}, load {os.getloadavg()[0]:.1f} at the end")
    print(f"the drive: {bound:.2f} to {max(drive):.2f} s for all weights")
    Console(width=120, highlight=False).print(table)
    return {"batch": batch, "drive": drive, "contenders": figures}


def ratios(predicted: list[float], seconds: list[float]) -> str:
    """Median, least and most of the prediction over the time of the same round."""
    found = sorted(p / s for p, s in zip(predicted, seconds, strict=True))
    return f"{median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"


def main() -> None:
    options = parse()
    versions = {name: version(name) for name in ("jax", "torch", "transformers")}
    print(platform.platform(), f"{os.cpu_count()} cores", versions)
    found = []
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="zinf-gen-") as place:
        folder = Path(place)
        nbytes = save_model(folder / "model", options)
        print(f"{nbytes // 4:,} parameters, {nbytes / 1e9:.2f} GB in float32")
        for batch in options.batches:
            rng = np.random.default_rng(0)
            own = folder / f"batch-{batch}"
            own.mkdir()
            shape = batch, PROMPT
            np.save(own / "prompts.npy", rng.integers(3, options.vocab_size, shape))
            given = {name: getattr(options, name) for name in SETTINGS} | {
                "prompts": str(own / "prompts.npy"),
                "model": str(folder / "model"),
                "folder": str(own),
            }
            raced = race(batch, options, given)
            found.append(report(batch, *raced, options.tokens))
    if options.json:
        options.json.write_text(json.dumps({"bytes": nbytes, "groups": found}))


SETTINGS = ("tokens", "rows", "device", "host", "cpu", "tier")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", help="on the drive; a temporary folder by default")
    parser.add_argument("--accelerate-python", help="has torch, accelerate")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--rows", type=int, default=32, help="zinf's, of a microbatch")
    parser.add_argument("--tokens", type=int, default=8, help="new ones of a text")
    parser.add_argument("--rounds", type=int, default=5, help=f"after {WARM_UP} more")
    parser.add_argument("--num-layers", type=int, default=12)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--device", default="320MiB", help="zinf's budget")
    parser.add_argument("--tier", default="nvme", choices=("host", "nvme"))
    parser.add_argument("--host", default="192MiB", help="zinf's budget")
    parser.add_argument("--cpu", default="256MiB", help="accelerate's max_memory")
    parser.add_argument("--json", type=Path, help="where to write all measures")
    return parser.parse_args()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(json.loads(sys.argv[2]))
    else:
        main()
