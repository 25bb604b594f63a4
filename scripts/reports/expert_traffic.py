"""Counts the bytes that devices send each other in a step of a GPT with experts.

    JAX_PLATFORMS=cpu python scripts/reports/expert_traffic.py h200:4 v5p:2x2x2

One block of width 512 with 8 experts, top 1, in bfloat16, is compiled as a fused step
for absent machines, with two devices along `expert`, two along `tensor`, and the rest
along `fsdp`. Rows differ in whether devices with the same tokens send each its part of
them, or all ("duplicate token dropping"), and in what recomputing the block keeps
("communication-aware checkpointing"; DeepSpeed-TED, arXiv:2303.06318). Numbers are the
MiB that one device sends, and how many collectives there are, those below 1 KiB aside.
"""

import argparse
from collections import Counter
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import optax

from zinf.core.engine.initialize import make_planner
from zinf.core.sharding.mesh import TENSOR, make_mesh
from zinf.core.topology import collectives_of, parse_topology
from zinf.models import GPTConfig, init_and_loss
from zinf.moe import exchange

LENGTH, EXAMPLES_A_DEVICE, SMALL_BYTES = 256, 4, 1024
KINDS = ("all-to-all", "all-gather", "all-reduce", "reduce-scatter")
REMAT: dict[str, dict[str, Any]] = {
    "none": {},
    "plain": {"remat": True},
    "aware": {"remat": True, "communication_aware_remat": True},
}
# Whether duplicates are dropped, what is recomputed, whether experts are cut inside.
ROWS = [
    (False, "none", 1),
    (True, "none", 1),
    (True, "plain", 1),
    (True, "aware", 1),
    (True, "none", 2),
]


def step(text: str, remat: str, inside: int) -> Any:
    topology = parse_topology(text)
    config = GPTConfig(
        num_layers=1,
        num_heads=8,
        embed_dim=512,
        vocab_size=256,
        max_length=LENGTH,
        num_experts=8,
        capacity_factor=1.0,
        routing_group_size=LENGTH // 2,
        **REMAT[remat],
    )
    init, loss = init_and_loss(config, seed=0)
    planner = make_planner(
        loss,
        init,
        optax.sgd(1e-3),
        {
            "execution": "fused",
            "bf16": {"enabled": True},
            "expert_parallel": {"expert_tensor_parallel_size": inside},
        },
        mesh=make_mesh(topology.devices(), num_expert=2, num_tensor=2),
        topology=topology,
    )
    batch = EXAMPLES_A_DEVICE * topology.num_devices // 2
    tokens = {"tokens": jax.ShapeDtypeStruct((batch, LENGTH + 1), jnp.int32)}
    with planner.planning():
        return planner.plan_batch(tokens).program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("topologies", nargs="+")
    print(f"jax {jax.__version__}")
    for text in parser.parse_args().topologies:
        for drops, remat, inside in ROWS:
            kept = [name for name in exchange.TOKEN_AXES if drops or name != TENSOR]
            with patch.object(exchange, "TOKEN_AXES", tuple(kept)):
                program = step(text, remat, inside)
            sent, counts = Counter(), Counter()
            for found in collectives_of(program.step):
                if found.sent_bytes >= SMALL_BYTES:
                    sent[found.kind] += found.sent_bytes * found.times
                    counts[found.kind] += found.times
            cells = [f"{k} {float(sent[k]) / 2**20:.2f} ({counts[k]})" for k in KINDS]
            dropping = "dropped" if drops else "sent"
            print(
                f"{text}: duplicates {dropping}, remat {remat}, experts cut in "
                f"{inside}: {', '.join(cells)}; workspace "
                f"{program.workspace_bytes / 2**20:.1f} MiB",
                flush=True,
            )


if __name__ == "__main__":
    main()
