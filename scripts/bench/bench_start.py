"""The first minute of a run by part, with an empty and with a warm compile cache.

    python scripts/bench/bench_start.py [--cases quickstart llama] [--turns 3]

Each case starts in a process of its own, and takes two steps, after which it ends. In
each turn the first start has an empty folder of compiled programs, and the second has
what the first left.

* `quickstart`: `configs/quickstart.yaml`;
* `llama`: a Llama of two layers of width 64 on four virtual devices;
* `qwen3`: the shape of Qwen3-0.6B within 2 GiB (see `bench_finetune.py`).

Printed are seconds, the median of the turns: imports, the config and the model
described, planned (`Planner.plan`), all until the engine is there, the first step, and
the second one. "compiled" is the sum over the threads that compile or read compiled
programs, so it is no part of a sum. `llama` and `qwen3` need `zinf[hf]`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from bench_finetune import write_model, write_texts

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("imports", "described", "planned", "engine", "first", "second", "compiled")
COMPILES = "/jax/core/compile/backend_compile_duration"
TINY = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="zinf-start-") as name:
        for case in options.cases:
            place = Path(name) / case
            place.mkdir()
            prepare(case, place)
            found = {"cold": [], "warm": []}
            for turn in range(options.turns):
                for rows in found.values():
                    rows.append(start(case, place, place / f"compiled-{turn}"))
            report(case, found)


def prepare(case: str, place: Path) -> None:
    """Writes what the case reads."""
    if case == "quickstart":
        return
    command = [sys.executable, __file__, "--write", case, str(place / "model")]
    subprocess.run(command, check=True, env=environment(case, place))
    texts = argparse.Namespace(samples=4, steps=4, tokens=64)
    write_texts(place / "texts.jsonl", texts)


def environment(case: str, compiled: Path) -> dict[str, str]:
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(compiled)}
    env.pop("JAX_COMPILATION_CACHE_DIR", None)
    if case == "llama":
        env["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    env["PYTHONPATH"] = str(ROOT)
    return env


def start(case: str, place: Path, compiled: Path) -> dict[str, float]:
    """The seconds of each part of one start."""
    command = [sys.executable, __file__, "--start", case, str(place)]
    env = environment(case, compiled) | {"BEGAN": str(time.time())}
    ran = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


def report(case: str, found: dict[str, list[dict[str, float]]]) -> None:
    print(f"\n{case}, load {os.getloadavg()[0]:.1f}")
    print("".join(f"{name:>11}" for name in ("", *PARTS, "to step 1")))
    for state, rows in found.items():
        until = [r["imports"] + r["described"] + r["engine"] + r["first"] for r in rows]
        columns = [[row[part] for row in rows] for part in PARTS]
        values = "".join(f"{median(column):11.2f}" for column in [*columns, until])
        spread = f"({min(until):.1f} to {max(until):.1f})"
        print(f"{state:>11}{values}  {spread}", flush=True)


def run_case(case: str, place: Path) -> None:
    """In a process of its own: prints the parts as a line of JSON."""
    spent = Counter({"imports": 0.0})
    import zinf.cli.task as tasks

    if case != "quickstart":
        import zinf.hf.engine
    import jax

    import zinf.core.step.planner
    from zinf.cli.finetune import model_config
    from zinf.core.machine.devices import on_devices

    spent["imports"] = time.time() - float(os.environ["BEGAN"])

    def listen(event: str, seconds: float, **_: Any) -> None:
        spent["compiled"] += seconds if event == COMPILES else 0.0

    jax.monitoring.register_event_duration_secs_listener(listen)
    planner: Any = zinf.core.step.planner.Planner
    planner.plan = timed(planner.plan, "planned", spent)
    own = [f"run.output={place / 'run'}", f"memory.nvme=[{place / 'tier'}]"]
    source: Any = ROOT / "configs" / "quickstart.yaml"
    if case != "quickstart":
        source = model_config(
            str(place / "model"),
            data=[place / "texts.jsonl"],
            samples=4 if case == "llama" else 1,
            sequence_length=64,
            steps=2,
        )
    if case == "llama":
        own.append("mesh.fsdp=4")
    if case == "qwen3":
        own += ["memory.device=1280MiB", "memory.host=720MiB"]

    def described() -> Any:
        config, mesh = on_devices(source, overrides=own)
        tasks.task_of(config).arguments()
        return config, mesh

    config, mesh = timed(described, "described", spent)()
    batch = next(iter(tasks.task_of(config).dataset("train")))
    engine = timed(tasks.make_engine, "engine", spent)(config, mesh)
    for part in ("first", "second"):
        timed(engine.step, part, spent)(batch)
    engine.close()
    print(json.dumps(dict.fromkeys(PARTS, 0.0) | spent))


def timed(function: Callable, part: str, spent: Counter) -> Callable:
    def call(*args: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **named)
        finally:
            spent[part] += time.perf_counter() - began

    return call


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cases = ("quickstart", "llama", "qwen3")
    parser.add_argument("--cases", nargs="+", default=cases, choices=cases)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--folder", help="on the drive; a temporary folder by default")
    return parser.parse_args()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--start"]:
        run_case(sys.argv[2], Path(sys.argv[3]))
    elif sys.argv[1:2] == ["--write"]:
        changed = TINY if sys.argv[2] == "llama" else {}
        write_model(Path(sys.argv[3]), **changed)
    else:
        main()
