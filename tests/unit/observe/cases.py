"""Metrics of a step, as an engine gives them, and a step to trace."""

from functools import partial
from pathlib import Path
from typing import Any

from zinf.core.plan import (
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
from zinf.core.program import ArrayId, Role, Tier
from zinf.observe import TraceFile
from zinf.observe.record import Held, RunRecord
from zinf.observe.traced import TracedStep, measured_step


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
    run, mb = partial(Run, 0, "layer", microbatch=0), 10**6

    def move(
        link: Link, arrays: Any, source: Tier, to: Tier, *after: int, size: int
    ) -> Instruction:
        named = {"allocates": ((to, size),)} if to is not nvme else {}
        made = tuple((array, to) for array in arrays)
        operation = Transfer(arrays, source, to)
        return Instruction(
            operation, link, after, nbytes=size, writes=made, creates=made, **named
        )

    def free(arrays: Any, tier: Tier, *after: int, size: int) -> Instruction:
        return Instruction(
            Free(arrays, tier), Link.FREE_AFTER_DEVICE, after, nbytes=size
        )

    forward, backward = run(kind=Pass.FORWARD), run(kind=Pass.BACKWARD)
    made = {"writes": ((gradient, device),), "allocates": ((device, 3 * mb),)}
    return Plan(
        instructions=(
            move(Link.NVME_READ, (param,), nvme, host, size=3 * mb),
            move(Link.NVME_READ, (state,), nvme, host, size=6 * mb),
            move(Link.H2D, (param,), host, device, 0, size=3 * mb),
            Instruction(
                *(forward, Link.DEVICE, (2,)),
                reads=((param, device),),
                workspace=((device, mb),),
                flops=10**8,
            ),
            Instruction(
                *(backward, Link.DEVICE, (3,)),
                reads=((param, device),),
                flops=2 * 10**8,
                **made,
            ),
            move(Link.D2H, (gradient,), device, host, 4, size=3 * mb),
            free((param, gradient), device, 4, 5, size=6 * mb),
            Instruction(Update(0, "w", host), Link.HOST, (1, 5), nbytes=9 * mb),
            move(Link.NVME_WRITE, (param, state), host, nvme, 7, size=9 * mb),
            free((param, state, gradient), host, 8, size=12 * mb),
            # Left by the step before: nothing in this one makes it.
            free((ArrayId(Role.GRADIENT, "late"),), host, 0, size=2 * mb),
        ),
        homes={},
        home_bytes={device: 0, host: mb, nvme: 9 * mb},
        peak_bytes={device: 7 * mb, host: 15 * mb, nvme: 9 * mb},
        capacity_bytes={device: 10 * mb, host: 100 * mb, nvme: 1000 * mb},
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


def record_of(**changed: Any) -> RunRecord:
    """The record of a run of that plan, whose file is `small.yaml`."""
    plan = plan_of_a_step()
    amounts = plan.home_bytes, plan.peak_bytes, plan.capacity_bytes
    names = "rest", "peak", "budget"
    held = {
        tier: Held(**{n: x[tier] for n, x in zip(names, amounts, strict=True)})
        for tier in Tier
    }
    return RunRecord(
        title="small.yaml: 0.75 million parameters",
        begun="2026-01-02 03:04+00:00",
        num_tokens=64,
        num_steps=5,
        config={"run": {"steps": 5, "seed": 0}, "bf16": {"enabled": False}},
        given=["run.steps"],
        notices=["dump_state: has no effect here."],
        resolved={
            "dtype of computing": "float32",
            "instructions of a step": "11",
            "execution": "streamed by segments",
        },
        held=held,
        predicted_seconds=plan.timeline.seconds,
        versions={"zinf": "0.1.0"},
        machine={"processors": "2"},
        **{"after_step": 0, "has_measured_rates": False} | changed,
    )


def step_of(factor: float = 1.25) -> TracedStep:
    """The step, measured `factor` times slower than it is predicted."""
    plan = plan_of_a_step()
    return measured_step(plan, slower(plan.timeline, factor))
