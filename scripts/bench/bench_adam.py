"""Times one step of AdamW on the host: zinf, DeepSpeed, torch, optax.

With --transform it times other transforms, of zinf and of optax. optax donates all
arrays, in one call ("optax") or in one call per array ("optax_each").

Each contender runs in its own process and keeps its arrays. In each round every
contender takes one step, so other load on the machine affects all of them alike. Only
ratios within a round are compared. Two contenders do no update and are lower bounds:
"reads" reads master, moments and gradient once; "moves" also writes in place all that
an update writes, with one addition per element.

    python scripts/bench/bench_adam.py --baseline-python ~/baselines/venv/bin/python
    python scripts/bench/bench_adam.py --precision bfloat16 --arrays 12 --threads 2
    python scripts/bench/bench_adam.py --transform lion rmsprop

"bfloat16" is the update of mixed precision: it takes a gradient in bfloat16 and also
writes a copy of the new parameters in bfloat16. DeepSpeed and torch need extra passes
for the conversions, as in ZeRO-Offload (arXiv:2101.06840).
"""

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from served import Served, answer
from transform_contenders import (
    TRANSFORMS,
    Stepper,
    donated_each_stepper,
    donated_stepper,
    host_stepper,
)

LEARNING_RATE, B1, B2, EPS, WEIGHT_DECAY = 3e-4, 0.9, 0.95, 1e-8, 0.1
# bfloat16 holds these numbers exactly, so all contenders start from equal values.
MASTER, GRADIENT = 2.0**-6, 2.0**-10
BASELINES = ("deepspeed", "torch")
DONATED = ("optax", "optax_each")
BOUNDS = ("reads", "moves")
CONTENDERS = ("zinf", *BASELINES, *DONATED, *BOUNDS)
# Targets of the project: time of the faster baseline over that of zinf; for transforms
# without such a baseline, time of optax over that of zinf.
WANTED = {"float32": 1.1, "bfloat16": 1.3}
WANTED_OF_DONATED = 0.8
# Relative. The contenders do the same arithmetic up to float32 rounding.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Group:
    """The task of the contenders of one table: `numel` elements in `arrays` arrays."""

    precision: str
    arrays: int
    threads: int
    numel: int
    transform: str = "adamw"

    @property
    def lengths(self) -> list[int]:
        return [self.numel // self.arrays] * self.arrays

    @property
    def is_short(self) -> bool:
        return self.precision == "bfloat16"


# Modules are imported inside functions, by name: contenders run in two interpreters,
# which have different modules installed.
def zinf_stepper(group: Group) -> Stepper:
    return host_stepper(group, MASTER, GRADIENT)


def optax_stepper(group: Group) -> Stepper:
    return donated_stepper(group, MASTER, GRADIENT)


def optax_each_stepper(group: Group) -> Stepper:
    return donated_each_stepper(group, MASTER, GRADIENT)


def reads_stepper(group: Group) -> Stepper:
    np, numba = import_module("numpy"), import_module("numba")
    threads = import_module("zinf_kernels.threads")
    element_bytes = 14 if group.is_short else 16
    # Ones: the pages of a zeroed array all map to one physical page until written.
    words = np.ones(group.numel * element_bytes // 8, np.int64)

    # Integers, because the compiler may reorder their sum and so vectorise the loop.
    @numba.njit("i8(i8[::1])", nogil=True)
    def total(part: Any) -> int:
        found = 0
        for i in range(part.size):
            found += part[i]
        return found

    def step() -> None:
        threads.for_blocks(
            lambda i, j: total(words[i:j]),
            start=0,
            stop=words.size,
            num_threads=group.threads,
        )

    return step, lambda: float("nan")


def moves_stepper(group: Group) -> Stepper:
    np, numba = import_module("numpy"), import_module("numba")
    threads = import_module("zinf_kernels.threads")
    short = "u2" if group.is_short else "f4"
    units = []
    for n in group.lengths:
        arrays = [np.full(n, x, "f4") for x in (MASTER, 0, 0)]
        arrays.append(np.ones(n, short))
        units.append([*arrays, np.zeros(n, short)] if group.is_short else arrays)

    @numba.njit(nogil=True)
    def move(master: Any, m: Any, v: Any, gradient: Any) -> None:
        for i in range(master.size):
            g = gradient[i]
            master[i] += g
            m[i] += g
            v[i] += g

    @numba.njit(nogil=True)
    def move_short(master: Any, m: Any, v: Any, gradient: Any, copy: Any) -> None:
        one = np.float32(1)
        for i in range(master.size):
            copy[i] = gradient[i]
            master[i] += one
            m[i] += one
            v[i] += one

    loop = move_short if group.is_short else move
    loop(*(x[:0] for x in units[0]))  # compile before timing

    def step() -> None:
        for unit in units:
            threads.for_blocks(
                lambda i, j, unit=unit: loop(*(x[i:j] for x in unit)),
                start=0,
                stop=unit[0].size,
                num_threads=group.threads,
            )

    return step, lambda: float("nan")


def deepspeed_stepper(group: Group) -> Stepper:
    adam = import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
    return torch_stepper_of(group, adam, adamw_mode=True)


def torch_stepper(group: Group) -> Stepper:
    return torch_stepper_of(group, import_module("torch").optim.AdamW, fused=True)


def torch_stepper_of(group: Group, optimizer: Any, **options: Any) -> Stepper:
    torch = import_module("torch")
    torch.set_num_threads(group.threads)
    masters = [torch.nn.Parameter(torch.full((n,), MASTER)) for n in group.lengths]
    settings = {"betas": (B1, B2), "eps": EPS, "weight_decay": WEIGHT_DECAY}
    adam = optimizer(masters, lr=LEARNING_RATE, **settings, **options)
    for master in masters:
        master.grad = torch.full_like(master, GRADIENT)
    if not group.is_short:
        return adam.step, lambda: masters[0][0].item()
    shorts = [(x.grad.bfloat16(), x.detach().bfloat16()) for x in masters]

    def step() -> None:
        for master, (gradient, _) in zip(masters, shorts, strict=True):
            master.grad.copy_(gradient)
        adam.step()
        for master, (_, copy) in zip(masters, shorts, strict=True):
            copy.copy_(master.data)

    return step, lambda: masters[0][0].item()


def serve(contender: str, group: Group) -> None:
    """Takes a step for every line of stdin and prints its seconds, as JSON."""
    # Must come before the imports: modules count the cores when they are imported.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: group.threads])
    step, first = globals()[f"{contender}_stepper"](group)
    # Two warm-up steps: the first compiles and touches all pages, the second reuses
    # that memory.
    step()
    step()
    answer({"ready": contender})
    for _ in sys.stdin:
        start = time.perf_counter()
        step()
        seconds = time.perf_counter() - start
        answer({"seconds": seconds, "first": first()})


class Contender(Served):
    """A process that runs `serve` for one contender."""

    def __init__(self, name: str, group: Group, python: str) -> None:
        here = Path(__file__)
        environment = os.environ | {
            "OMP_NUM_THREADS": str(group.threads),
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(here.parents[2]),
            "DS_ACCELERATOR": "cpu",
            # torch uses huge pages only with this variable; NumPy does by default.
            "THP_MEM_ALLOC_ENABLE": "1",
            # DeepSpeed builds its kernels with the ninja of its own environment.
            "PATH": f"{Path(python).parent}:{os.environ['PATH']}",
        }
        command = [python, here, "--serve", name, json.dumps(asdict(group))]
        super().__init__(command, environment)
        self.name = name


def race(group: Group, *, rounds: int, pythons: dict[str, str]) -> dict[str, Any]:
    """Seconds of each step of all contenders of a group, in order of the rounds."""
    running: list[Contender] = []
    missing = {}
    try:
        for name, python in pythons.items():
            contender = Contender(name, group, python)
            try:
                contender.answer()
                running.append(contender)
            except RuntimeError as error:
                missing[name] = str(error)
        answers = {contender.name: [] for contender in running}
        for _ in range(rounds):
            for contender in running:
                answers[contender.name].append(contender.ask())
    finally:
        for contender in running:
            contender.close()
    if "zinf" in missing:
        raise RuntimeError(f"zinf itself did not run: {missing['zinf']}")
    check_alike({name: found[-1]["first"] for name, found in answers.items()})
    seconds = {name: [x["seconds"] for x in found] for name, found in answers.items()}
    return {**asdict(group), "seconds": seconds, "missing": missing}


def check_alike(first: dict[str, float]) -> None:
    expected = first["zinf"]
    for name, value in first.items():
        if abs(value - expected) > TOLERANCE * abs(expected):
            raise AssertionError(f"{name} has parameter {value}, zinf {expected}")


def ratios(seconds: dict[str, list[float]], name: str) -> list[float]:
    """Time of a contender over that of zinf, for each round."""
    return [a / b for a, b in zip(seconds[name], seconds["zinf"], strict=True)]


def report(result: dict[str, Any]) -> None:
    seconds = result["seconds"]
    print(
        f"\n{result['transform']}, {result['precision']}, {result['arrays']} arrays, "
        f"{result['threads']} threads, {result['numel'] / 1e6:g}M elements"
    )
    print(f"{'':10}{'ms':>8}{'least':>8}{'most':>8}{'/ zinf':>8}{'quartiles':>14}")
    for name, times in seconds.items():
        ordered = sorted(ratios(seconds, name))
        quarter = len(ordered) // 4
        low, high = ordered[quarter], ordered[-1 - quarter]
        print(
            f"{name:10}{median(times) * 1e3:8.1f}{min(times) * 1e3:8.1f}"
            f"{max(times) * 1e3:8.1f}{median(ordered):8.2f}{low:8.2f}-{high:.2f}"
        )
    for name, reason in result["missing"].items():
        print(f"{name:10} did not run: {reason}")
    is_adam = result["transform"] == "adamw"
    baselines = BASELINES if is_adam else DONATED
    wanted = WANTED[result["precision"]] if is_adam else WANTED_OF_DONATED
    raced = [ratios(seconds, name) for name in baselines if name in seconds]
    if raced:
        best = min(median(x) for x in raced)
        print(f"faster of {' and '.join(baselines)} / zinf {best:.2f}, wanted {wanted}")


def main() -> None:
    options = parse()
    results = []
    for transform, precision, arrays, threads in product(
        options.transform, options.precision, options.arrays, options.threads
    ):
        group = Group(precision, arrays, threads, options.numel, transform)
        pythons = pythons_of(group, options)
        results.append(race(group, rounds=options.rounds, pythons=pythons))
        report(results[-1])
    if options.json:
        machine = {"platform": platform.platform(), "cores": os.cpu_count()}
        options.json.write_text(json.dumps({"machine": machine, "results": results}))


def pythons_of(group: Group, options: argparse.Namespace) -> dict[str, str]:
    """The interpreter of each contender that can run."""
    # zinf always runs, as the others are compared with it.
    pythons = dict.fromkeys(("zinf", *options.contenders), sys.executable)
    is_adam = group.transform == "adamw"
    if group.arrays == 1:
        pythons.pop("optax_each", None)
    if not is_adam:
        pythons = {k: v for k, v in pythons.items() if k not in BOUNDS}
    for name in BASELINES:
        if not is_adam or options.baseline_python is None:
            pythons.pop(name, None)
        elif name in pythons:
            pythons[name] = options.baseline_python
    if is_adam and options.baseline_python is None:
        print("No torch and DeepSpeed: name an interpreter with --baseline-python.")
    return pythons


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--baseline-python", help="interpreter with torch, deepspeed")
    parser.add_argument("--numel", type=int, default=100_000_000)
    parser.add_argument("--precision", nargs="+", default=[*WANTED], choices=WANTED)
    parser.add_argument("--transform", nargs="+", default=["adamw"], choices=TRANSFORMS)
    parser.add_argument("--arrays", nargs="+", type=int, default=[1, 12])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--contenders", nargs="+", default=[*CONTENDERS], choices=CONTENDERS
    )
    parser.add_argument("--json", type=Path, help="where to write all times")
    return parser.parse_args()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], Group(**json.loads(sys.argv[3])))
    else:
        main()
