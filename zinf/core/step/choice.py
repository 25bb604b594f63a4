"""Why `execution: auto` takes or leaves the offloaded step, for people."""

import jax
from jax.sharding import Mesh

from zinf.core.config import Config
from zinf.core.plan import InfeasibleError, Plan
from zinf.core.program import Tier
from zinf.core.sharding import AxisRule
from zinf.core.step.whole.offloaded import not_offloadable
from zinf.core.topology import Topology

# A compiler's message may go on with pages of HLO.
SAID_CHARACTERS = 300

FUSED = "Fused, because everything fits the device."


def computes_elsewhere(mesh: Mesh) -> bool:
    """Whether device memory is not host memory, so that there is something to choose.

    On the CPU both are one memory, and an offloaded step saves nothing.
    """
    return mesh.devices.flat[0].platform != "cpu"


def why_not_offloaded(
    config: Config, rule: AxisRule, num_processes: int, topology: Topology | None
) -> str | None:
    """What in a config, a mesh or a machine asks for another way than offloaded."""
    hosts = 1 if topology is None else topology.num_hosts
    count, found = max(num_processes, hosts), not_offloadable(rule)
    if count > 1:
        # Each process would check and choose by itself, and they might differ.
        return f"with {count} processes it must be asked for (execution: offloaded)"
    if found:
        return f"it does not work yet with {' and '.join(found)}"
    tiers = {
        "offload_param": config.param_tier,
        "offload_optimizer": config.optimizer_tier,
    }
    for key, tier in tiers.items():
        if tier not in (None, Tier.HOST):
            return f"it keeps everything on the host, and {key} asks for {tier}"
    if config.zero_optimization.zero_quantized_weights:
        return "it cannot gather parameters as integers (zero_quantized_weights)"
    if config.pinned == "off":
        return "all its memory is pinned, and memory.pinned is off"
    return None


def in_short(error: Exception) -> str:
    """Why a step was not made, as the end of a sentence."""
    if isinstance(error, InfeasibleError):
        return " and ".join(
            f"{short.what} needs {short.needed_bytes:,} bytes of the {tier}, whose "
            f"budget is {short.capacity_bytes:,}"
            for tier, short in error.shortages.items()
        )
    if isinstance(error, jax.errors.JaxRuntimeError):
        line = str(error).partition("\n")[0]
        return f"its compiler fails with {line[:SAID_CHARACTERS]!r}"
    return str(error).rstrip(".")


def faster(offloaded: Plan, streamed: Plan) -> tuple[bool, str]:
    """`(whether to offload, why)`, by the predicted seconds of a step."""
    ours, others = offloaded.timeline.seconds, streamed.timeline.seconds
    is_faster = ours <= others
    name = "Offloaded" if is_faster else "Streamed"
    return is_faster, (
        f"{name}, because an offloaded step is predicted to take {ours:.3g} s, and a "
        f"streamed one {others:.3g} s."
    )
