"""Trains one GPT with DeepSpeed ZeRO-3 and with zinf, each on host and on NVMe.

    python scripts/bench/bench_vs_deepspeed.py --model 124m --tokens 512 \\
        --deepspeed-python ~/baselines/venv/bin/python --folder /mnt/nvme

All train in float32 with AdamW, on the same tokens in each step, from equal weights (a
hash of name and position, so that neither side needs a file of the other). Each
contender runs in its own process. In each round every contender takes one step, in
random order, so other load on the machine affects all of them alike. All losses must
agree.

"remat" recomputes each block in the backward pass; zinf's streamed steps do where the
device has no room for what they would keep. The two sides have different matmuls, so
each is held against its own step in memory without. Memory is the most anonymous memory
of a process (`anonymous_memory.py`), bytes are what the kernel counts as read from and
written to a drive (/proc/PID/io); both are read from outside. zinf's processes have
malloc set as the command `zinf` does, unless --leave-malloc is given.

Where memory has no room for all contenders at once, --contenders may be given several
times: each time is a group that runs interleaved, with its own table.

zinf-nvme has all state at rest on the drive, like deepspeed-nvme. zinf-budgets has the
same budgets, but the plan decides what rests in memory.

deepspeed-nvme is DeepSpeed with the fastest of the settings tried on two cores;
deepspeed-nvme-serial has the settings that need least memory. deepspeed_gpt.py has both
and describes what had to be fixed in DeepSpeed.
"""

import argparse
import json
import os
import platform
import random
import socket
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from anonymous_memory import MemoryPeak
from rich.console import Console
from rich.table import Table
from served import Served, answer

import zinf
from zinf.models import GPTConfig, init_and_loss

MODELS = {  # GPT-2 small and medium: 124,439,808 and 354,823,168 parameters.
    "124m": {"num_layers": 12, "num_heads": 12, "embed_dim": 768},
    "350m": {"num_layers": 24, "num_heads": 16, "embed_dim": 1024},
}
MODEL = {"vocab_size": 50257, "max_length": 1024}
SEQUENCE = 256
SPREAD = 0.02 * 12**0.5  # Width of uniform weights with GPT-2's standard deviation.
# The step in memory with which each contender is compared.
OWN = {
    "torch": "torch",
    "torch-remat": "torch-remat",
    "deepspeed-cpu": "torch",
    "deepspeed-nvme": "torch",
    "deepspeed-nvme-serial": "torch",
    "deepspeed-cpu-remat": "torch-remat",
    "zinf": "zinf",
    "zinf-remat": "zinf-remat",
    "zinf-host": "zinf",
    "zinf-nvme": "zinf",
    "zinf-budgets": "zinf",
}
DEFAULT = ["torch", "deepspeed-nvme", "zinf", "zinf-nvme", "zinf-budgets"]
WARM_UP = 2  # Steps that compile, fault in memory and create files.
WANTED = 0.25
# Relative difference of losses: the sides add float32 numbers in different orders, and
# AdamW enlarges the difference over the steps.
TOLERANCE = 1e-3
Measures = dict[str, list[float]]


def zinf_step(name: str, options: dict[str, Any]) -> Callable[[], float]:
    """Makes an engine; returns a function that takes a step and returns its loss."""
    model = GPTConfig(**options["model"], remat=name == "zinf-remat")
    init, loss = init_and_loss(model, seed=0)
    shapes = jax.eval_shape(init)

    def equal_weights() -> Any:
        return jax.tree_util.tree_map_with_path(weights, shapes)

    batch = {"tokens": np.load(options["batch"])}
    tx = optax.adamw(3e-4, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
    config = zinf_config(name, options)
    engine = zinf.initialize(loss, equal_weights, tx, config, batch=batch)
    return lambda: engine.step(batch)["loss"]


def weights(path: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Weights that depend on name and position, equal to those of deepspeed_gpt.py."""
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    if name.endswith(("scale", "bias")):
        return jnp.full(like.shape, float(name.endswith("scale")), jnp.float32)
    # The finalizer of MurmurHash3. All steps are exact, in integers or floats, except
    # one rounding, so both sides get equal weights.
    x = jax.lax.iota(jnp.uint32, like.size) + jnp.uint32(zlib.crc32(name.encode()))
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    x ^= x >> 16
    uniform = (x >> 8).astype(jnp.float32) * jnp.float32(2**-24)
    return ((uniform - 0.5) * jnp.float32(SPREAD)).reshape(like.shape)


def zinf_config(name: str, options: dict[str, Any]) -> dict[str, Any]:
    if OWN[name] == name:
        return {"execution": "fused"}
    config: dict[str, Any] = {"execution": "streamed"}
    tier = {"zinf-host": "cpu", "zinf-nvme": "nvme"}.get(name)
    if tier is not None:
        offload = {"device": tier}
        zero = {"stage": 3, "offload_param": offload, "offload_optimizer": offload}
        config["zero_optimization"] = zero
    if tier != "cpu":
        budgets = {"device": options["device"], "host": options["host"]}
        config["memory"] = budgets | {"nvme": [options["folder"]]}
    return config


def serve(name: str, options: dict[str, Any]) -> None:
    """Takes a step for every line of stdin and prints its seconds and loss, as JSON."""
    if options["tunes_malloc"]:
        zinf.tune_malloc()
    began = time.perf_counter()
    step = zinf_step(name, options)
    answer({"init_seconds": time.perf_counter() - began})
    for _ in sys.stdin:
        began = time.perf_counter()
        loss = step()
        answer({"seconds": time.perf_counter() - began, "loss": loss})


class Contender(Served):
    """A process that runs `serve` for one contender."""

    def __init__(self, name: str, options: argparse.Namespace, folder: Path) -> None:
        place = folder / name
        place.mkdir()
        given = {
            "model": MODELS[options.model] | MODEL,
            "sequences": max(1, options.tokens // SEQUENCE),
            "threads": os.cpu_count(),
            "batch": str(folder / "batch.npy"),
            "folder": str(place),
            "device": options.device,
            "host": options.host,
            "tunes_malloc": not options.leave_malloc,
        }
        here = Path(__file__)
        command = [options.deepspeed_python, here.with_name("deepspeed_gpt.py")]
        if name.startswith("zinf"):
            command = [sys.executable, here, "--serve"]
        self.name = name
        command += [name, json.dumps(given)]
        super().__init__(command, environment(options.deepspeed_python))
        self.peak = MemoryPeak(self.process.pid)
        self.found: Measures = {"seconds": [], "loss": [], "read": [], "written": []}
        self.ready = self.answer()
        self.init_bytes = self.peak.nbytes()

    def step(self) -> None:
        before = self.moved()
        found, after = self.ask(), self.moved()
        moved = {key: after[key] - before[key] for key in after}
        for key, value in (found | moved).items():
            self.found[key].append(value)

    def moved(self) -> dict[str, int]:
        """Bytes that the process has read from and written to drives, in total."""
        lines = Path(f"/proc/{self.process.pid}/io").read_text().splitlines()
        counts = dict(line.split(": ") for line in lines)
        return {
            "read": int(counts["read_bytes"]),
            "written": int(counts["write_bytes"]),
        }

    def result(self) -> dict[str, Any]:
        sizes = {"init_bytes": self.init_bytes, "peak_bytes": self.peak.nbytes()}
        return sizes | self.ready | self.found

    def close(self) -> None:
        self.peak.stop()
        super().close()


def environment(python: str | None) -> dict[str, str]:
    """Environment of a contender; DeepSpeed needs the variables of a cluster of one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here, threads = Path(__file__), str(os.cpu_count())
    cluster = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    cluster |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    found = os.environ | cluster | {"DS_ACCELERATOR": "cpu", "JAX_PLATFORMS": "cpu"}
    # torch uses huge pages only with this variable; NumPy and zinf do by default.
    found |= {"OMP_NUM_THREADS": threads, "THP_MEM_ALLOC_ENABLE": "1"}
    # DeepSpeed builds its kernels with the ninja of its own environment.
    path = f"{Path(python).parent}:{os.environ['PATH']}" if python else found["PATH"]
    return found | {"PYTHONPATH": str(here.parents[2]), "PATH": path}


def race(names: list[str], options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measures of each contender of an interleaved group, or why it did not run."""
    running: list[Contender] = []
    results: dict[str, Any] = {}
    # Started one at a time, so that compilation and first steps do not slow each other.
    for name in names:
        try:
            running.append(Contender(name, options, folder))
        except RuntimeError as error:
            results[name] = {"failure": str(error)}
    for _ in range(options.rounds + WARM_UP):
        for contender in random.sample(running, len(running)):
            try:
                contender.step()
            except (RuntimeError, BrokenPipeError) as error:
                results[contender.name] = {"failure": str(error)}
                running.remove(contender)
    for contender in running:
        results[contender.name] = contender.result()
        contender.close()
    return results


def check_losses(results: dict[str, Any]) -> None:
    """Raises an AssertionError unless all contenders have equal losses in each step."""
    losses = {name: found["loss"] for name, found in results.items()}
    for step, values in enumerate(zip(*losses.values(), strict=True)):
        if max(values) - min(values) > TOLERANCE * max(values):
            found = dict(zip(losses, values, strict=True))
            raise AssertionError(f"Losses differ at step {step + 1}: {found}")


def overhead(results: dict[str, Any], name: str) -> float | None:
    """Extra time of a step over the same side's step in memory, as a share of that."""
    if name == OWN[name] or not {name, OWN[name]} <= results.keys():
        return None
    return steady(results[name]) / steady(results[OWN[name]]) - 1


def steady(found: dict[str, Any], key: str = "seconds") -> float:
    return median(found[key][WARM_UP:])


def report(results: dict[str, Any], failures: dict[str, str]) -> None:
    columns = "", "s a step", "least-most", "over own", "GiB after init", "GiB peak"
    columns += "GB read", "GB written", "first loss", "last loss"
    table = Table(*columns, box=None)
    for name, found in results.items():
        over, seconds = overhead(results, name), found["seconds"][WARM_UP:]
        table.add_row(
            name,
            f"{median(seconds):.2f}",
            f"{min(seconds):.2f}-{max(seconds):.2f}",
            "" if over is None else f"{over:+.0%}",
            f"{found['init_bytes'] / 2**30:.2f}",
            f"{found['peak_bytes'] / 2**30:.2f}",
            f"{steady(found, 'read') / 1e9:.2f}",
            f"{steady(found, 'written') / 1e9:.2f}",
            f"{found['loss'][0]:.6f}",
            f"{found['loss'][-1]:.6f}",
        )
    console = Console(width=130, highlight=False)
    console.print(table)
    for name, reason in failures.items():
        console.print(f"{name} did not run: {reason}")


def compare(groups: list[dict[str, Any]]) -> None:
    """Prints ratios of zinf on NVMe to DeepSpeed on NVMe, and the project's target.

    An overhead is relative to a step in memory of the same group. If a contender was in
    several groups, the last counts.
    """
    figures: dict[str, dict[str, float]] = {}
    for group in groups:
        for name, found in group["results"].items():
            over = overhead(group["results"], name)
            figure = {"peak": found["peak_bytes"], "step": steady(found)}
            if over is not None:
                own = steady(group["results"][OWN[name]])
                figure |= {"overhead": over, "overhead in seconds": over * own}
            figures[name] = figure
    pairs = product(
        ("zinf-nvme", "zinf-budgets"), ("deepspeed-nvme", "deepspeed-nvme-serial")
    )
    for name, other in pairs:
        if name in figures and other in figures:
            ours, theirs = figures[name], figures[other]
            shared = [key for key in theirs if key in ours]
            parts = (f"{key} {ours[key] / theirs[key]:.2f}" for key in shared)
            wanted = f"(overheads and peak wanted: {WANTED})"
            print(f"{name} / {other}:", ", ".join(parts), wanted)


def main() -> None:
    options = parse()
    groups = options.contenders or [DEFAULT]
    if options.deepspeed_python is None:
        print("No torch and DeepSpeed: name an interpreter with --deepspeed-python.")
        groups = [[x for x in group if x.startswith("zinf")] for group in groups]
    groups = [group for group in groups if group]
    machine = {
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in ("jax", "numpy")},
    }
    print(f"{options.model}, {options.tokens} tokens a step", machine)
    found = [run(group, options) for group in groups]
    if options.json:
        settings = {"model": options.model, "tokens": options.tokens}
        settings |= {"device": options.device, "host": options.host}
        text = json.dumps(settings | {"machine": machine, "groups": found})
        options.json.write_text(text)
    compare(found)
    for group in found:
        check_losses(group["results"])


def run(names: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Measures a group and prints its table."""
    sequences = max(1, options.tokens // SEQUENCE)
    shape = sequences, options.tokens // sequences + 1
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="zinf-vs-") as place:
        tokens = rng.integers(0, MODEL["vocab_size"], shape, np.int32)
        np.save(Path(place) / "batch.npy", tokens)
        results = race(names, options, Path(place))
    failures = {k: v["failure"] for k, v in results.items() if "failure" in v}
    results = {name: results[name] for name in names if name not in failures}
    load = os.getloadavg()
    print(f"\n{options.rounds} rounds, load {load[0]:.1f} at the end")
    report(results, failures)
    return {"load": load, "results": results, "failures": failures}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="124m", choices=MODELS)
    parser.add_argument("--tokens", type=int, default=512, help="of a step")
    parser.add_argument("--rounds", type=int, default=5, help=f"after {WARM_UP} more")
    parser.add_argument("--deepspeed-python", help="interpreter with torch, deepspeed")
    parser.add_argument("--folder", help="on the drive; a temporary folder by default")
    parser.add_argument("--device", default="512MiB", help="zinf's budget")
    parser.add_argument("--host", default="512MiB", help="zinf's budget")
    parser.add_argument(
        "--leave-malloc", action="store_true", help="do not set zinf's malloc"
    )
    parser.add_argument(
        "--contenders",
        nargs="+",
        action="append",
        choices=OWN,
        help=f"of {', '.join(OWN)}; once for each group",
    )
    parser.add_argument("--json", type=Path, help="where to write all measures")
    return parser.parse_args()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], json.loads(sys.argv[3]))
    else:
        main()
