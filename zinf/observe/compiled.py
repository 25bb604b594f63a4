"""Tables of bytes, flops and collectives of a step, as its compiler reports them."""

from collections.abc import Sequence

from rich.table import Table

from zinf.core.plan import Link, Plan, show_bytes, show_seconds
from zinf.core.step.compiled import CompiledRun, largest_deviation, step_traffic
from zinf.core.topology import Topology


def executables_table(runs: Sequence[CompiledRun]) -> Table:
    """One row per executable: planned and compiled bytes of one device, and flops."""
    table = Table(box=None, title="executables, bytes of a device", pad_edge=False)
    for name in ("executable", "runs", "planned", "compiled", "temporary", "flops"):
        table.add_column(name, justify="left" if name == "executable" else "right")
    for run in runs:
        planned = run.planned_bytes
        table.add_row(
            run.name,
            str(run.times),
            "-" if planned is None else show_bytes(planned),
            show_bytes(run.compiled_bytes),
            show_bytes(run.memory.temp_bytes),
            f"{run.flops:.3g}",
        )
    return table


def traffic_table(runs: tuple[CompiledRun, ...], param_bytes: int) -> Table:
    """One row per kind of collective: bytes that a device sends, and how many of them
    matmuls overlap."""
    table = Table(box=None, title="collectives of a step, by device", pad_edge=False)
    table.add_column("kind")
    for name in ("count", "sent", "x params", "asynchronous", "behind matmuls"):
        table.add_column(name, justify="right")
    for kind, found in step_traffic(runs).items():
        table.add_row(
            kind,
            str(found.count),
            show_bytes(found.sent_bytes),
            f"{found.sent_bytes / param_bytes:.2f}",
            str(found.async_count),
            f"{found.overlapped_share:.0%}",
        )
    return table


def verdict(
    plan: Plan, runs: tuple[CompiledRun, ...], topology: Topology, param_bytes: int
) -> str:
    """Lines on the whole step: memory error, bytes sent, time and hidden transfers."""
    seconds = plan.timeline.seconds
    flops = sum(i.flops for i in plan.instructions)
    share = flops / seconds / topology.chip.flops_per_second if seconds else 0.0
    busy = plan.timeline.busy_seconds(plan.instructions)
    copies = sum(busy.get(link, 0.0) for link in (Link.H2D, Link.D2H))
    computing = busy.get(Link.DEVICE, 0.0)
    sent = sum(t.sent_bytes for t in step_traffic(runs).values())
    hidden = max(0.0, copies - max(0.0, seconds - computing))
    lines = [
        f"{topology.num_devices} devices on {topology.num_hosts} hosts: device bytes "
        f"are those of one device, host and nvme bytes of one host with "
        f"{topology.devices_per_host}",
        f"compiled bytes are within {largest_deviation(runs):.2%} of the plan's",
        f"a device sends {show_bytes(sent)} a step, {sent / param_bytes:.2f} times the "
        "bytes of all parameters",
        f"predicted {show_seconds(seconds)} a step, {share:.0%} of the peak flops, at "
        "half of each peak rate",
    ]
    if copies:
        lines.append(
            f"host copies take {show_seconds(copies)} on links of their own, "
            f"{hidden / copies:.0%} of it beside computation"
        )
    return "\n".join(lines)
