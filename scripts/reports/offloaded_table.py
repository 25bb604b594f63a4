"""Bytes and copies of an offloaded step as the TPU compiler schedules it, beside plain
jax with whole-tree offload.

    python scripts/reports/offloaded_table.py --table      (all rows, minutes each)
    python scripts/reports/offloaded_table.py v5e:1x1
    python scripts/reports/offloaded_table.py v5p:1x1x1 --layers 40 --dim 5120
    python scripts/reports/offloaded_table.py v5e:1x1 --layers 8 --without-clipping

It needs the TPU compiler (`pip install 'zinf[tpu-topology]'`) and no TPU, or the GPU
compiler (`h200:1 --without-plain`, with the extra gpu-topology). Plain jax
keeps masters and Adam's moments of the same model in pinned host memory, moves them to
the device at once, and computes the layers in one scan with remat, as MaxText does.
Bytes are "behind" if the schedule has matmuls between the start and the end of their
copy. Those are "hidden" that the host link moves while these matmuls run, at half of
the peak of both; "in passes" is the hidden share of those behind.
"""

import argparse
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from time import process_time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import zinf
from zinf.core.engine.initialize import make_planner
from zinf.core.topology import HostCopy, Topology, host_copies, memory, parse_topology
from zinf.models import GPTConfig, init_and_loss, num_parameters

GIB = 2**30
LATE = 8
# What scripts/RESULTS.md has: 12.9B on one v5p and on v5e:2x4, 64.9B on v5p:2x2x2, and
# 12.9B on one H200, of which plain jax would hold all arguments on the device.
LARGE = ("--layers", "40", "--dim", "5120")
ROWS = (
    ("v5p:1x1x1", *LARGE, "--batch", "4"),
    ("v5p:1x1x1", *LARGE, "--batch", "8", "--without-clipping"),
    ("v5e:2x4", *LARGE, "--batch", "16", "--without-clipping"),
    (
        *("v5p:2x2x2", "--layers", "80", "--dim", "8192", "--batch", "32"),
        "--without-clipping",
    ),
    ("h200:1", *LARGE, "--batch", "4", "--without-plain"),
    ("h200:1", *LARGE, "--batch", "4", "--without-plain", "--without-clipping"),
)
TX = optax.adamw(1e-4)
COLUMNS = (
    "step",
    "device GiB",
    "host GiB",
    "async",
    "behind",
    "hidden",
    "in passes",
    "compile s",
)


def gpt(layers: int, dim: int, length: int, **options: Any) -> GPTConfig:
    return GPTConfig(
        num_layers=layers,
        num_heads=dim // 128,
        embed_dim=dim,
        vocab_size=50_304,
        max_length=length,
        **options,
    )


def offloaded(
    model: GPTConfig,
    machine: Topology,
    batch: int,
    microbatches: int = 1,
    clip: float = 1.0,
) -> Any:
    """The planned offloaded step of a model.

    Args:
        batch: sequences of a step.
    """
    init, loss = init_and_loss(model, seed=0)
    config = {
        "execution": "offloaded",
        "bf16": {"enabled": True},
        "gradient_clipping": clip,
        "gradient_accumulation_steps": microbatches,
        "zero_optimization": {"stage": 3},
        "memory": {"device": machine.chip.memory_bytes, "host": "16TiB"},
    }
    mesh = zinf.make_mesh(machine.devices())
    planner = make_planner(loss, init, TX, config, mesh=mesh, topology=machine)
    shape = (batch, model.max_length + 1)
    return planner.plan_batch({"tokens": jax.ShapeDtypeStruct(shape, np.int32)})


def whole_tree(model: GPTConfig, machine: Topology, batch: int) -> Any:
    """The compiled step of plain jax whose masters and moments rest on the host."""
    init, loss = init_and_loss(model, seed=0)
    mesh = Mesh(np.array(machine.devices()), ("fsdp",))
    masters = jax.eval_shape(init)
    moments = jax.eval_shape(TX.init, masters)

    def sharding(x: Any, kind: str) -> NamedSharding:
        cuts = [d for d in range(1, len(x.shape)) if x.shape[d] % mesh.size == 0]
        spec = [None] * len(x.shape)
        if cuts:
            spec[cuts[0]] = "fsdp"
        return NamedSharding(mesh, PartitionSpec(*spec), memory_kind=kind)

    def on(kind: str, tree: Any, dtype: Any = None) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, dtype or x.dtype, sharding=sharding(x, kind)
            ),
            tree,
        )

    def step(params: Any, masters: Any, moments: Any, tokens: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, {"tokens": tokens})
        masters, moments = jax.device_put((masters, moments), jax.memory.Space.Device)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        scale = jnp.minimum(1.0, 1.0 / optax.tree.norm(grads))
        grads = jax.tree.map(lambda g: g * scale, grads)
        updates, moments = TX.update(grads, moments, masters)
        masters = optax.apply_updates(masters, updates)
        params = jax.tree.map(lambda m: m.astype(jnp.bfloat16), masters)
        return params, masters, moments, value

    params = on("device", masters, jnp.bfloat16)
    masters, moments = (on("pinned_host", tree) for tree in (masters, moments))
    state = params, masters, moments
    results = (
        *jax.tree.map(lambda x: x.sharding, state),
        NamedSharding(mesh, PartitionSpec()),
    )
    tokens = jax.ShapeDtypeStruct(
        (batch, model.max_length + 1),
        jnp.int32,
        sharding=NamedSharding(mesh, PartitionSpec("fsdp")),
    )
    jitted = jax.jit(step, donate_argnums=(0, 1, 2), out_shardings=results)
    return machine.compile(jitted.lower(*state, tokens))


def hidden(copies: Sequence[HostCopy], machine: Topology) -> tuple[float, ...]:
    """`(asynchronous, behind, hidden, hidden of those behind)` as shares of bytes."""
    link = machine.chip.host_link_bytes_per_second / 2
    flops = machine.chip.flops_per_second / 2
    moved = behind = started = passes = 0.0
    for copy in copies:
        nbytes = copy.nbytes * copy.times
        within = min(nbytes, copy.overlapped_flops / flops * link * copy.times)
        moved += nbytes
        behind += within
        started += nbytes * copy.is_async
        passes += nbytes * (copy.overlapped_matmuls > 0)
    return started / moved, passes / moved, behind / moved, behind / (passes or 1)


def show_late(copies: Sequence[HostCopy]) -> None:
    """The copies without matmuls to hide them that move most, by size and way."""
    moved = sum(copy.nbytes * copy.times for copy in copies)
    kinds: dict[tuple[int, int, bool], list[HostCopy]] = defaultdict(list)
    for copy in copies:
        kinds[copy.nbytes, copy.times, copy.is_to_host].append(copy)
    late = {
        kind: [copy for copy in some if not copy.overlapped_matmuls]
        for kind, some in kinds.items()
    }
    most = sorted(late, key=lambda kind: -kind[0] * kind[1] * len(late[kind]))
    for nbytes, times, is_to_host in [kind for kind in most if late[kind]][:LATE]:
        some = kinds[nbytes, times, is_to_host]
        few = late[nbytes, times, is_to_host]
        way = "to the host" if is_to_host else "to the device"
        share = nbytes * times * len(few) / moved
        size = f"{nbytes / 2**20:,.1f} MiB x {times:,} {way}"
        print(f"  not behind matmuls: {share:.1%}, {len(few)} of {len(some)} of {size}")


def row(name: str, compiled: Any, machine: Topology, seconds: float) -> tuple[str, ...]:
    found = memory(compiled)
    shares = hidden(host_copies(compiled.as_text()), machine)
    nbytes = [f"{n / GIB:.2f}" for n in (found.device_bytes, found.host_bytes)]
    return (name, *nbytes, *[f"{share:.0%}" for share in shares], f"{seconds:.0f}")


def show(cells: Sequence[str]) -> None:
    first, *others = cells
    print(f"{first:22}", *[f"{cell:>10}" for cell in others], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("topology", nargs="?", help="such as v5p:1x1x1")
    parser.add_argument("--table", action="store_true", help="all rows, one by one")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--without-plain", action="store_true")
    parser.add_argument(
        "--without-clipping",
        action="store_true",
        help="loops then update layers in their backward pass",
    )
    asked = parser.parse_args()
    if asked.table:
        # In processes of their own, because the compiler keeps memory.
        for arguments in ROWS:
            print("\n" + " ".join(arguments), flush=True)
            subprocess.run([sys.executable, __file__, *arguments], check=False)
        return
    if asked.topology is None:
        parser.error("name a topology, or give --table")
    machine = parse_topology(asked.topology)
    model = gpt(asked.layers, asked.dim, asked.length)
    start = process_time()
    clip = 0.0 if asked.without_clipping else 1.0
    made = offloaded(model, machine, asked.batch, asked.microbatches, clip)
    seconds = process_time() - start
    print(f"{num_parameters(model) / 1e9:.2f}B parameters on {machine.text}")
    print(made.plan.summary())
    show(COLUMNS)
    show(row("offloaded", made.program.step, machine, seconds))
    show_late(host_copies(made.program.step.as_text()))
    if not asked.without_plain:
        stacked = gpt(
            asked.layers, asked.dim, asked.length, scan_layers=True, remat=True
        )
        start = process_time()
        try:
            # Without accumulation, which would take more.
            compiled = whole_tree(stacked, machine, asked.batch // asked.microbatches)
        except jax.errors.JaxRuntimeError as error:
            print(f"plain jax with whole-tree offload: {str(error)[:600]}")
        else:
            seconds = process_time() - start
            show(row("whole tree, plain jax", compiled, machine, seconds))


if __name__ == "__main__":
    main()
