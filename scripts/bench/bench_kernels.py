"""Times every op of zinf_kernels on the device: kernels, XLA's version, lower bounds.

    python scripts/bench/bench_kernels.py [--output FILE] [--rounds 20] [--op NAME]
    python scripts/bench/bench_kernels.py --dry-run      (small cases, on any device)

In each round every implementation that can run here is called once, so other load on
the machine affects all of them alike; medians are compared. The floor is a lower bound
of the time: the bytes that must be moved at the speed of a copy measured in the same
rounds, or the flops of matrix products at the speed of the data sheet, whichever takes
longer. XLA's version is the last implementation of an op; it uses cuBLAS for products.
The deviation of the others from its results is printed, relative to the largest element
of each array. After `--most-seconds` no further case begins; the results so far are in
the file. Only `--dry-run` is tested without a GPU.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from kernel_cases import FULL, SMALL, Problem, problems

from zinf_kernels.absent_gpu import GPUS
from zinf_kernels.device import device_for

WARM_UPS = 2
# Large enough that a copy does not fit any cache and takes far longer than its launch.
COPY_NUMEL = {True: 1 << 12, False: 1 << 28}
HEADS = ("milliseconds", "of floor", "of XLA's", "spread", "deviation")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, help="where to write rows as JSON")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--op", help="only this one")
    parser.add_argument("--most-seconds", type=float, default=540)
    parser.add_argument("--dry-run", action="store_true", help="a small case of each")
    options = parser.parse_args()
    device = device_for()
    about = {"device": device.kind, "jax": jax.__version__, "rounds": options.rounds}
    print(*(f"{name} {value}" for name, value in about.items()), sep=", ")
    print(f"{'op and case':38}{'':12}", *(f"{head:>13}" for head in HEADS))
    rows = []
    every = problems(SMALL if options.dry_run else FULL)
    if options.dry_run:
        every = {problem.op: problem for problem in every}.values()
    begun = time.perf_counter()
    for problem in every:
        if options.op not in (None, problem.op):
            continue
        if time.perf_counter() - begun > options.most_seconds:
            row = {"op": problem.op, "case": problem.case, "implementation": "all"}
            found = [row | {"not_run": f"after {options.most_seconds:g} s"}]
        else:
            found = measured(problem, options.rounds, is_dry=options.dry_run)
        for row in found:
            rows.append(row)
            print(line(row), flush=True)
        if options.output:
            options.output.write_text(json.dumps(about | {"rows": rows}, indent=1))


def measured(
    problem: Problem, rounds: int, *, is_dry: bool
) -> Iterator[dict[str, Any]]:
    """One row per implementation, with its times or the reason why it cannot run."""
    obstacles = problem.obstacles(device_for())
    arguments = problem.make()
    contenders: dict[str, Callable[[], Any]] = {}
    failed: dict[str, str] = {}
    for name in problem.existing:
        if name not in obstacles:
            try:
                contenders[name] = compiled(problem.run(name), arguments)
            except jax.errors.JaxRuntimeError as error:
                # Usually out of memory: XLA's cross-entropy keeps all logits.
                failed[name] = str(error).partition("\n")[0]
    of_xla, deviations = problem.existing[-1], {}
    if of_xla in contenders:
        expected = contenders[of_xla]()
        deviations = {name: deviation(f(), expected) for name, f in contenders.items()}
        # Frees device memory for the timed calls.
        del expected
    source = jnp.ones(COPY_NUMEL[is_dry], jnp.float32)
    contenders["copy"] = compiled(copied, (source,))
    seconds = in_rounds(contenders, rounds)
    bytes_per_second = 2 * source.nbytes / median(seconds.pop("copy"))
    floor = floor_seconds(problem, bytes_per_second)
    head = {"op": problem.op, "case": problem.case, "floor_seconds": floor}
    head["copy_bytes_per_second"] = bytes_per_second
    for name in problem.existing:
        row = head | {"implementation": name}
        if name not in seconds:
            yield row | {"not_run": obstacles.get(name) or failed[name]}
            continue
        row |= {"seconds": median(seconds[name]), "all_seconds": seconds[name]}
        row["floor_over_seconds"] = floor / row["seconds"]
        if of_xla in seconds:
            row["xla_over_seconds"] = median(seconds[of_xla]) / row["seconds"]
            row["deviation"] = deviations[name]
        yield row


def deviation(made: Any, expected: Any) -> float:
    """Largest absolute difference of an array over its largest element; the maximum."""

    def of_one(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = (x.astype(jnp.float32) for x in (a, b))
        largest = jnp.max(abs(b), initial=0)
        return jnp.max(abs(a - b), initial=0) / jnp.where(largest > 0, largest, 1)

    found = jax.jit(lambda a, b: jax.tree.map(of_one, a, b))(made, expected)
    return max(map(float, jax.tree.leaves(found)))


def copied(x: jax.Array) -> jax.Array:
    """Moves the bytes of a copy; XLA could optimize a plain copy away."""
    return x + 1


def compiled(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """A function that calls the compiled, warmed-up function and waits for results."""
    run = jax.jit(function)

    def call() -> Any:
        return jax.block_until_ready(run(*arguments))

    for _ in range(WARM_UPS):
        call()
    return call


def in_rounds(
    contenders: dict[str, Callable[[], Any]], rounds: int
) -> dict[str, list[float]]:
    """Seconds of each call, by contender; in each round every contender has a call."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def floor_seconds(problem: Problem, bytes_per_second: float) -> float:
    """Lower bound of the op's time; flops count only on GPUs whose speed is known."""
    kind = device_for().kind
    known = [gpu for gpu in GPUS.values() if gpu.kind == kind]
    computing = problem.floor_flops / known[0].flops_per_second if known else 0.0
    return max(problem.floor_bytes / bytes_per_second, computing)


def line(row: dict[str, Any]) -> str:
    name = f"{row['op']} {row['case']}"
    head = f"{name:38}{row['implementation']:12}"
    if "not_run" in row:
        return f"{head} {row['not_run']}"
    times = sorted(row["all_seconds"])
    spread = (times[-1] - times[0]) / row["seconds"]
    xla_s = row.get("xla_over_seconds")
    cells = [f"{row['seconds'] * 1e3:.3f}", f"{row['floor_over_seconds']:.2f}"]
    cells += ["-" if xla_s is None else f"{xla_s:.2f}", f"{spread:.2f}"]
    found = row.get("deviation")
    cells.append("-" if found is None else f"{found:.1e}")
    return " ".join([head, *(f"{cell:>13}" for cell in cells)])


if __name__ == "__main__":
    main()
