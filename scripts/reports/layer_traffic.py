"""Compiles a ZeRO-3 layer for absent machines and prints the bytes that it sends.

    python scripts/reports/layer_traffic.py v5p:8x8x8 h200:8
    python scripts/reports/layer_traffic.py v5p:8x8x8 --stages 64x8

The layer is an MLP of h x 4h in bfloat16: sharded matrices are gathered, gradients are
reduce-scattered. With `--stages` the devices also form a mesh of that shape, in which
each array is gathered, and each gradient reduced, one axis after the other. The paper's
figure for each gather and reduce-scatter is (n - 1) / n of the bytes of the matrices.
"""

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zinf.core.topology import Topology, collectives, memory, parse_topology, traffic

TOKENS = 2048


class Layer:
    """The shardings of the layer's arrays over a topology, and its two passes."""

    def __init__(self, topology: Topology, stages: tuple[int, ...]) -> None:
        devices = np.array(topology.devices())
        flat = Mesh(devices, ("fsdp",), axis_types=(AxisType.Auto,))
        names = tuple(f"stage{i}" for i in range(len(stages)))
        kinds = (AxisType.Auto,) * len(names)
        staged = Mesh(devices.reshape(stages), names, axis_types=kinds)
        self.parts = NamedSharding(flat, P("fsdp"))
        between = [
            NamedSharding(staged, P(names[:count])) for count in range(1, len(names))
        ]
        self.whole = [*reversed(between), NamedSharding(flat, P())]
        self.reduced = [*between, self.parts]

    def forward(self, up, down, x):
        return mlp(constrain(up, self.whole), constrain(down, self.whole), x)

    def backward(self, up, down, x, dy):
        whole = constrain(up, self.whole), constrain(down, self.whole)
        up_grad, down_grad, dx = jax.vjp(mlp, *whole, x)[1](dy)
        reduced = constrain(up_grad, self.reduced), constrain(down_grad, self.reduced)
        return *reduced, dx


def constrain(x, shardings):
    for sharding in shardings:
        x = jax.lax.with_sharding_constraint(x, sharding)
    return x


def mlp(up, down, x):
    return x + jax.nn.gelu(x @ up) @ down


def show(
    topology: Topology, layer: Layer, function: Callable, shapes: list[tuple[int, ...]]
) -> None:
    args = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=layer.parts)
        for shape in shapes
    ]
    start = time.perf_counter()
    lowered = jax.jit(function, out_shardings=layer.parts).lower(*args)
    made = topology.compile(lowered)
    seconds = time.perf_counter() - start
    matrices = sum(a.size * a.dtype.itemsize for a in args[:2])
    sums = traffic(collectives(made.as_text()))
    sent = sum(t.sent_bytes for t in sums.values()) / matrices
    temp = memory(made).temp_bytes / 2**30
    print(
        f"{topology.text} {function.__name__}: sent {sent:.3f} of the matrices, "
        f"{temp:.2f} GiB of temporaries, compiled in {seconds:.0f} s"
    )
    for kind, t in sums.items():
        print(
            f"  {kind}: {t.count} of {t.sent_bytes / matrices:.3f}, "
            f"{t.async_count} asynchronous, {t.overlapped_share:.1%} behind matmuls"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("topologies", nargs="+")
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--stages", help="such as 64x8, outermost first")
    given = parser.parse_args()
    print(f"jax {jax.__version__}")
    for text in given.topologies:
        topology = parse_topology(text)
        n, h = topology.num_devices, given.hidden
        stages = tuple(map(int, given.stages.split("x"))) if given.stages else (n,)
        layer = Layer(topology, stages)
        matrices, x = [(h, 4 * h), (4 * h, h)], (n, TOKENS, h)
        show(topology, layer, layer.forward, [*matrices, x])
        show(topology, layer, layer.backward, [*matrices, x, x])


if __name__ == "__main__":
    main()
