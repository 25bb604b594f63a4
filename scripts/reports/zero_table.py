"""Model state per device of each ZeRO stage, from programs compiled for 64 devices.

The paper (Rajbhandari et al. 2020, figure 1) counts 2 + 2 + 12 bytes per parameter for
7.5 billion parameters in mixed precision with Adam. This script adds up the same bytes
from compiled programs: parameters are arguments of segments, gradients are results of
segments, master and moments are arguments of updates. Nothing is run or allocated.
"""

import os

DEVICES = 64
# The number of virtual CPU devices must be set before jax is imported.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} "
    f"--xla_force_host_platform_device_count={DEVICES}"
)

import argparse  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from paper import model_state_bytes  # noqa: E402

import zinf  # noqa: E402
from zinf.core.engine.initialize import make_planner  # noqa: E402
from zinf.core.program import Tier  # noqa: E402
from zinf.models import GPTConfig, init_and_loss, num_parameters  # noqa: E402

# 12 * 36 * 4096^2 = 7.25 billion parameters in the blocks, and 0.25 billion in 60,416
# embeddings.
MODEL = GPTConfig(
    num_layers=36, num_heads=32, embed_dim=4096, vocab_size=60_416, max_length=128
)


def compiled_state_bytes(stage: int) -> tuple[int, int]:
    """Bytes of model state on one device, and the number of parameters."""
    init, loss = init_and_loss(MODEL, seed=0)
    config = {
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "execution": "streamed",
        "segment": {"remat": "always"},
        "memory": {"device": "1TB", "host": "1TB"},
    }
    mesh = zinf.make_mesh(jax.devices())
    planner = make_planner(loss, init, optax.adam(1e-4), config, mesh=mesh)
    shape = (DEVICES, MODEL.max_length + 1)
    made = planner.plan_batch({"tokens": jax.ShapeDtypeStruct(shape, np.int32)})
    params, gradients = {}, {}
    for segment in made.segments:
        is_last = segment is made.segments[-1]
        compiled = segment.executables.backward
        # The forward pass takes all parameters of a segment; a backward pass may not
        # need some of them.
        takes_all = compiled if is_last else segment.executables.forward
        kinds, cuts = argument_kinds(takes_all)
        for array, kind, cut in zip(segment.spec.params, kinds, cuts, strict=False):
            params[array] = device_bytes(kind, cut)
        position = 1 if is_last else 0
        results = compiled.output_shardings[position], compiled.out_info[position]
        pairs = zip(segment.spec.trained_params, *results, strict=True)
        for array, cut, kind in pairs:
            gradients[array] = device_bytes(kind, cut)
    optimizer = 0
    for _, step in made.updates.steps[Tier.DEVICE].items():
        kinds, cuts = argument_kinds(step.executable)
        # The last three arguments are master and moments.
        optimizer += sum(map(device_bytes, kinds[-3:], cuts[-3:]))
    total = sum(params.values()) + sum(gradients.values()) + optimizer
    return total, num_parameters(MODEL)


def argument_kinds(compiled: Any) -> tuple[list[Any], list[Any]]:
    """Shapes and dtypes of an executable's arguments, and their shardings."""
    return jax.tree.leaves(compiled.args_info), jax.tree.leaves(
        compiled.input_shardings
    )


def device_bytes(kind: Any, cut: Any) -> int:
    return int(np.prod(cut.shard_shape(kind.shape))) * kind.dtype.itemsize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    print(f"{DEVICES} devices, bytes of model state on each")
    print("stage  compiled GB  paper GB  ratio")
    for stage in parser.parse_args().stages:
        found, num_params = compiled_state_bytes(stage)
        paper = model_state_bytes(num_params, stage, num_devices=DEVICES)
        figures = f"{found / 1e9:11.2f} {paper / 1e9:9.2f} {found / paper:6.3f}"
        print(f"{stage:5} {figures}", flush=True)


if __name__ == "__main__":
    main()
