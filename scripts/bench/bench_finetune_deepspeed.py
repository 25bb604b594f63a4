"""Fine-tunes a model of Qwen3-0.6B's shape by zinf and by DeepSpeed ZeRO-3 on NVMe.

    python scripts/bench/bench_finetune_deepspeed.py --folder /mnt/nvme \\
        --deepspeed-python VENV/bin/python [--layers 28] [--vocab 151936] \\
        [--turns 2] [--steps 3]

The model has random weights, written once, and all contenders train all parameters in
float32 with AdamW on the same tokens, from those weights: their losses must agree. The
contenders:

    zinf                   the step in memory (`execution: fused`)
    zinf-nvme              parameters and optimizer on the drive, within the budgets
    torch                  `transformers` and torch's fused AdamW, in memory
    deepspeed-nvme         `transformers` and ZeRO-3, parameters and optimizer on NVMe
    deepspeed-nvme-serial  the same with half the buffers, and no reading ahead

Memory has no room for all of them at once, so they run one after another, in processes
of their own, and the other way round in every second turn. Each is held against its own
side's step in memory: by seconds on the clock, which other load on the machine changes,
and by seconds of processor, which it hardly changes.

Memory is the most that a process and its children hold at one time, of anonymous pages
and of pages of files, and bytes are what the kernel counts (/proc/PID/io); both are
read from outside. Disk is what the files of the contender occupy after its last step.

The interpreter of DeepSpeed needs `transformers` and `deepspeed`; this one `zinf[hf]`.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
from bench_finetune import SHAPE, write_model
from bench_vs_deepspeed import check_losses, environment
from rich.console import Console
from rich.table import Table
from served import Served, answer

import zinf

# The step in memory with which each contender is compared.
OWN = {
    "zinf": "zinf",
    "zinf-nvme": "zinf",
    "torch": "torch",
    "deepspeed-nvme": "torch",
    "deepspeed-nvme-serial": "torch",
}
WARM_UP = 1  # Steps that compile, fault in memory and create files.
PERIOD_SECONDS = 0.05
KINDS = {"seconds": "s a step", "processor": "processor s a step"}
Found = dict[str, Any]


class TreePeak:
    """The most memory that a process and its children hold at one time, by kind.

    Of children, only pages that nobody else holds. One that is being started has all
    pages of its parent (`fork`) or its very address space (`vfork`), and takes none.
    """

    def __init__(self, process: int) -> None:
        self.anonymous_bytes = self.file_bytes = 0
        self._root = psutil.Process(process)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._is_over.wait(PERIOD_SECONDS):
            try:
                memory = self._root.memory_info()
                anonymous, of_files = memory.rss - memory.shared, memory.shared
                for child in self._root.children(recursive=True):
                    if child.memory_info().vms == memory.vms:
                        continue  # It is being started.
                    own = private_bytes(child.pid)
                    anonymous += own["Private_Dirty"]
                    of_files += own["Private_Clean"]
            # A process has ended; the next sample counts.
            except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                continue
            self.anonymous_bytes = max(self.anonymous_bytes, anonymous)
            self.file_bytes = max(self.file_bytes, of_files)


def private_bytes(process: int) -> Counter[str]:
    """Bytes of a process's pages that no other process holds, by kind."""
    text = Path(f"/proc/{process}/smaps_rollup").read_text()
    found = re.findall(r"^(Private_\w+): +(\d+) kB", text, re.MULTILINE)
    return Counter({kind: int(kib) * 1024 for kind, kib in found})


def zinf_step(name: str, options: Found) -> Callable[[], float]:
    """Makes an engine; returns a function that takes a step and returns its loss."""
    import optax

    from zinf import hf

    # By default an engine takes less than half of the memory, and this needs more.
    memory = {"device": psutil.virtual_memory().available}
    config: Found = {"execution": "fused", "memory": memory}
    if name == "zinf-nvme":
        offload = {"device": "nvme"}
        config = {
            "execution": "streamed",
            "zero_optimization": {
                "stage": 3,
                "offload_param": offload,
                "offload_optimizer": offload,
            },
            "memory": {
                "device": options["device"],
                "host": options["host"],
                "nvme": [options["folder"]],
            },
        }
    batch = {"input_ids": np.load(options["batch"])}
    tx = optax.adamw(3e-4, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
    engine = hf.initialize(hf.load(options["model"]), tx, config, batch=batch)
    return lambda: engine.step(batch)["loss"]


def serve(name: str, options: Found) -> None:
    """Takes a step for every line of stdin; prints its seconds and loss, as JSON."""
    zinf.tune_malloc()
    began = time.perf_counter()
    step = zinf_step(name, options)
    answer({"init_seconds": time.perf_counter() - began})
    for _ in sys.stdin:
        began, spent = time.perf_counter(), time.process_time()
        loss = step()
        seconds = time.perf_counter() - began
        processor = time.process_time() - spent
        answer({"seconds": seconds, "processor": processor, "loss": loss})


def measured(name: str, options: argparse.Namespace, place: Path) -> Found:
    """The steps of one contender in one turn, in a process that ends with it."""
    with tempfile.TemporaryDirectory(dir=place, prefix=f"{name}-") as folder:
        given = {
            "model": str(place / "model"),
            "batch": str(place / "batch.npy"),
            "samples": options.samples,
            "threads": os.cpu_count(),
            "folder": folder,
            "device": options.device,
            "host": options.host,
            "largest": options.vocab * SHAPE["hidden_size"],
            "layer": layer_numel(),
        }
        here = Path(__file__)
        command: list[str | Path] = [sys.executable, here, "--serve"]
        if not name.startswith("zinf"):
            command = [options.deepspeed_python]
            command += [here.with_name("deepspeed_finetune.py")]
        command += [name, json.dumps(given)]
        began = time.perf_counter()
        env = environment(options.deepspeed_python)
        # Threads of torch that wait for each other do not spin, as other processes
        # want the cores.
        contender = Served(command, env | {"OMP_WAIT_POLICY": "PASSIVE"})
        peak = TreePeak(contender.process.pid)
        try:
            found: Found = {"versions": {}} | contender.answer()
            found["start_seconds"] = time.perf_counter() - began
            steps = [moved(contender) for _ in range(WARM_UP + options.steps)]
            for key in steps[0]:
                found[key] = [step[key] for step in steps]
            files = [x.stat() for x in Path(folder).rglob("*") if x.is_file()]
            found["disk_bytes"] = sum(file.st_blocks * 512 for file in files)
        finally:
            peak.stop()
            contender.close()
        found["anonymous_bytes"] = peak.anonymous_bytes
        found["file_bytes"] = peak.file_bytes
    return found


def moved(contender: Served) -> Found:
    """A step of a contender, with the bytes it read and wrote and the load of then."""

    def counts() -> dict[str, int]:
        lines = Path(f"/proc/{contender.process.pid}/io").read_text().splitlines()
        named = dict(line.split(": ") for line in lines)
        return {"read": int(named["read_bytes"]), "written": int(named["write_bytes"])}

    before = counts()
    found = contender.ask()
    after = counts()
    bytes_moved = {key: after[key] - before[key] for key in after}
    return found | bytes_moved | {"load": os.getloadavg()[0]}


def layer_numel() -> int:
    """Number of weights in the matrices of a layer."""
    dim, inner = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    queries = SHAPE["num_attention_heads"] * SHAPE["head_dim"]
    keys = SHAPE["num_key_value_heads"] * SHAPE["head_dim"]
    return dim * (2 * queries + 2 * keys + 3 * inner)


def main() -> None:
    options = parse()
    names = options.contenders
    if options.deepspeed_python is None:
        print("No torch and DeepSpeed: name an interpreter with --deepspeed-python.")
        names = [name for name in names if name.startswith("zinf")]
    turns: dict[str, list[Found]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="zinf-tune-") as folder:
        place = Path(folder)
        # In a process of its own, so that none of its memory is there later.
        command = [sys.executable, __file__, "--write", str(place / "model")]
        command += [str(options.layers), str(options.vocab)]
        subprocess.run(command, check=True)
        shape = options.samples, options.tokens
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, options.vocab, shape, np.int32)
        np.save(place / "batch.npy", tokens)
        for turn in range(options.turns):
            for name in names if turn % 2 == 0 else names[::-1]:
                try:
                    found = measured(name, options, place)
                except RuntimeError as error:
                    print(f"{name} did not run: {error}", flush=True)
                    continue
                turns[name].append(found)
                say(turn, name, found)
                if options.json:
                    options.json.write_text(json.dumps(turns))
    turns = {name: found for name, found in turns.items() if found}
    report(turns, options)
    check_losses({name: {"loss": found[0]["loss"]} for name, found in turns.items()})


def say(turn: int, name: str, found: Found) -> None:
    took = " ".join(
        f"{seconds:.1f} ({processor:.1f})"
        for seconds, processor in zip(found["seconds"], found["processor"], strict=True)
    )
    print(
        f"turn {turn + 1}, {name}: started in {found['start_seconds']:.0f} s; steps, "
        f"s (of processor): {took}; load {found['load'][-1]:.0f}",
        flush=True,
    )


def steady(turns: list[Found], key: str) -> list[float]:
    """Values of all steps of all turns but the first steps."""
    return [value for found in turns for value in found[key][WARM_UP:]]


def report(turns: dict[str, list[Found]], options: argparse.Namespace) -> None:
    print(
        f"\nQwen3-0.6B with {options.layers} layers and {options.vocab:,} words, "
        f"{options.samples} x "
        f"{options.tokens} tokens a step; budgets of {options.device} and "
        f"{options.host}; {options.turns} turns of {options.steps} steps after "
        f"{WARM_UP}; {platform.platform()}, {os.cpu_count()} cores"
    )
    versions = {name: version(name) for name in ("jax", "numpy", "transformers")}
    print("zinf:", versions)
    others = [name for name in turns if turns[name][0]["versions"]]
    for name in others[:1]:
        print("the other side:", turns[name][0]["versions"])
    table = Table(box=None)
    for title in ("", *KINDS.values()):
        table.add_column(title)
        if title:
            table.add_column("over own")
    for title in ("anonymous GiB", "of files", "GB on disk", "read", "written", "loss"):
        table.add_column(title)
    for name, found in turns.items():
        cells = []
        for key in KINDS:
            values = steady(found, key)
            cells.append(f"{median(values):.1f} ({min(values):.1f}-{max(values):.1f})")
            own = turns.get(OWN[name])
            if own is None or OWN[name] == name:
                cells.append("")
            else:
                cells.append(f"{median(values) / median(steady(own, key)):.2f}")
        sizes = [
            max(x[key] for x in found) / 2**30
            for key in ("anonymous_bytes", "file_bytes")
        ]
        moved_bytes = [median(steady(found, key)) for key in ("read", "written")]
        table.add_row(
            name,
            *cells,
            *(f"{size:.2f}" for size in sizes),
            f"{max(x['disk_bytes'] for x in found) / 1e9:.2f}",
            *(f"{nbytes / 1e9:.2f}" for nbytes in moved_bytes),
            f"{found[0]['loss'][-1]:.5f}",
        )
    Console(width=150, highlight=False).print(table)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", help="on the drive; a temporary folder by default")
    parser.add_argument("--deepspeed-python", help="interpreter with deepspeed")
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--vocab", type=int, default=SHAPE["vocab_size"])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help=f"after {WARM_UP} more")
    parser.add_argument("--samples", type=int, default=1, help="of a step")
    parser.add_argument("--tokens", type=int, default=64, help="of a sample")
    parser.add_argument("--device", default="1280MiB", help="zinf's budget")
    parser.add_argument("--host", default="720MiB", help="zinf's budget")
    parser.add_argument("--contenders", nargs="+", choices=OWN, default=list(OWN)[:-1])
    parser.add_argument("--json", type=Path, help="where to write all measures")
    return parser.parse_args()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], json.loads(sys.argv[3]))
    elif sys.argv[1:2] == ["--write"]:
        layers, vocab = map(int, sys.argv[3:])
        changed = {"num_hidden_layers": layers, "vocab_size": vocab}
        written = write_model(Path(sys.argv[2]), **changed)
        print(f"{written:,} parameters", flush=True)
    else:
        main()
