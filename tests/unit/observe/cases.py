"""Metrics of a step, as an engine gives them, and a step to trace."""

from functools import partial
from pathlib import Path
from typing import Any

from zinf.observe import TraceFile
from zinf.plan import (
    Free,
    Instruction,
    Link,
    Pass,
    Plan,
    Run,
    Timeline,
    Transfer,
    Update,
)
from zinf.program import ArrayId, Role, Tier


def metrics_of(step: int, **changed: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 5.0 - step,
        "grad_norm": 0.5,
        "learning_rate": 1e-3,
        "step_seconds": 2.0,
        "tokens_per_second": 100.0 * step,
        "device_bytes": 10,
        "host_bytes": 20 * step,
        "nvme_bytes": 30,
        "nvme_read_bytes": 1,
        "nvme_write_bytes": 2,
        "h2d_bytes": 3,
        "d2h_bytes": 4,
        "skipped": False,
        **changed,
    }


def plan_of_a_step() -> Plan:
    """A step of one segment: every link, and most kinds of operations."""
    param, state = ArrayId(Role.PARAM, "w"), ArrayId(Role.STATE, "w", slot=0)
    gradient = ArrayId(Role.GRADIENT, "w")
    device, host, nvme = Tier.DEVICE, Tier.HOST, Tier.NVME
    run = partial(Run, 0, "layer", microbatch=0)

    def move(link: Link, *rest: Any, after: tuple[int, ...], nbytes: int) -> Any:
        return Instruction(Transfer(*rest), link, after, nbytes=nbytes)

    return Plan(
        instructions=(
            move(Link.NVME_READ, (param,), nvme, host, after=(), nbytes=3_000_000),
            move(Link.NVME_READ, (state,), nvme, host, after=(), nbytes=6_000_000),
            move(Link.H2D, (param,), host, device, after=(0,), nbytes=3_000_000),
            Instruction(run(kind=Pass.FORWARD), Link.DEVICE, (2,), flops=10**8),
            Instruction(run(kind=Pass.BACKWARD), Link.DEVICE, (3,), flops=2 * 10**8),
            move(Link.D2H, (gradient,), device, host, after=(4,), nbytes=3_000_000),
            Instruction(
                Free((param,), device), Link.FREE_AFTER_DEVICE, (4,), nbytes=3_000_000
            ),
            Instruction(Update(0, "w", host), Link.HOST, (1, 5), nbytes=9_000_000),
            move(
                Link.NVME_WRITE,
                (param, state),
                host,
                nvme,
                after=(7,),
                nbytes=9_000_000,
            ),
        ),
        homes={},
        home_bytes=dict.fromkeys(Tier, 0),
        peak_bytes=dict.fromkeys(Tier, 0),
        capacity_bytes=dict.fromkeys(Tier, 0),
    )


def slower(timeline: Timeline, factor: float) -> Timeline:
    """What would be measured if everything took `factor` times as long."""
    return Timeline(
        tuple(start * factor for start in timeline.start),
        tuple(end * factor for end in timeline.end),
    )


def write_trace(path: Path, *, num_steps: int = 3, factor: float = 1.25) -> Plan:
    """Writes steps 1 to `num_steps` of a plan, each `factor` times slower than it."""
    plan = plan_of_a_step()
    trace = TraceFile(path, num_steps=num_steps)
    for step in range(1, num_steps + 1):
        trace.add(step, plan, slower(plan.timeline, factor))
    trace.close()
    return plan
