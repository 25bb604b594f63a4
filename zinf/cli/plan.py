"""`zinf plan`."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from zinf.cli.errors import DOES_NOT_FIT, clean_errors, returning_exit_code
from zinf.cli.report import console
from zinf.cli.task import devices, heading, num_tokens, task_of, title
from zinf.cli.teacher import plan_teacher
from zinf.core.config import Config, grouping
from zinf.core.engine.initialize import make_planner
from zinf.core.machine.devices import group_devices, on_devices
from zinf.core.plan import InfeasibleError, Plan
from zinf.core.program import Link
from zinf.core.step.arrays import describe_state
from zinf.core.step.compiled import compiled_runs
from zinf.core.step.prepared import AbstractPrepared
from zinf.core.text.complaint import tell
from zinf.core.topology import Topology, only_read, parse_topology
from zinf.observe.compiled import executables_table, traffic_table, verdict
from zinf.observe.page import page, write_page
from zinf.observe.record import RunRecord
from zinf.observe.traced import predicted_step


@only_read()
@returning_exit_code
def plan_config(
    path: Path | str,
    overrides: Sequence[str],
    every: bool,
    topology: str | None,
    html: Path | None,
    traceback: bool,
    raw: Mapping[str, Any] | None = None,
) -> int:
    """Prints the plan of one config and returns an exit code.

    Args:
        path: the config file, or with `raw` the name of what is planned.
        raw: the keys and values of the config; None reads them from the file.
        html: file for the plan as an HTML page; None writes no page.
    """
    with clean_errors(traceback):
        source = path if raw is None else raw
        config, mesh, machine = on_machine(source, overrides, topology)
        tell(heading(path, config))
        try:
            with beside_teacher(config, mesh, machine) as config:
                arguments, named = task_of(config).arguments()
                batch = named.pop("batch")
                planner = make_planner(*arguments, **named, mesh=mesh, topology=machine)
                made = planner.plan_batch(batch)
        except InfeasibleError as error:
            tell(f"does not fit: {error}\n")
            return DOES_NOT_FIT
        tell(f"fits: {_shown(made, every)}\n")
        count = task_of(config).num_parameters
        if count is None:
            leaves = jax.tree.leaves(planner.problem.abstract_params)
            count = sum(leaf.size for leaf in leaves)
        tell(
            describe_state(planner.problem, planner.separated, num_parameters=count),
            end="\n\n",
        )
        if raw is not None:
            tell(f"{_wear(made.plan)}\n")
        tell(f"{rates_note(config, topology)}\n")
        if html is not None:
            record = RunRecord.of(
                config,
                made.plan,
                title=title(Path(path).name, config),
                num_tokens=num_tokens(config),
                devices=devices(mesh),
                has_measured_rates=planner.has_measured_rates,
            )
            write_page(page(record, (), predicted_step(made.plan)), html)
            tell(f"The plan is drawn in {html}.\n")
        if machine is not None:
            _print_compiled(made, machine, planner.param_bytes)
    return 0


@contextmanager
def beside_teacher(
    config: Config, mesh: Mesh, machine: Topology | None
) -> Generator[Config, None, None]:
    """Yields a config with the budgets that its teacher leaves, if it has one."""
    if config.distillation is None:
        yield config
        return
    teacher = plan_teacher(config, mesh, machine)
    tell(teacher.summary())
    beside = teacher.beside()
    with teacher.named_in_errors():
        yield beside


def on_machine(
    source: Mapping[str, Any] | Path | str,
    overrides: Sequence[str],
    topology: str | None,
) -> tuple[Config, Mesh, Topology | None]:
    """A config, and the devices to plan for: those of a machine, or those here."""
    machine, mesh = None, None
    if topology is not None:
        machine = parse_topology(topology)
        mesh = group_devices(machine.devices(), grouping(source, overrides))
    return *on_devices(source, mesh, overrides), machine


def rates_note(config: Config, topology: str | None) -> str:
    """A sentence on the rates that the predicted times come from."""
    if topology is not None:
        return (
            f"Times go by half of the peak rates of {topology}; nothing was measured."
        )
    if isinstance(config.rates, Path):
        return f"Times go by the rates in {config.rates}."
    return (
        "Times go by fixed rates, and a drive's if zinf bench io measured it. Unless "
        "the config sets rates, zinf train measures those of its machine first."
    )


def _print_compiled(
    made: AbstractPrepared, machine: Topology, param_bytes: int
) -> None:
    runs = compiled_runs(made)
    out = console()
    for table in (executables_table(runs), traffic_table(runs, param_bytes)):
        table.title_justify = "left"
        out.print(table)
        out.print()
    tell(verdict(made.plan, runs, machine, param_bytes))


def _wear(plan: Plan) -> str:
    """A sentence on the bytes that a plan writes to the drives in a day."""
    written = sum(
        instruction.nbytes
        for instruction in plan.instructions
        if instruction.link == Link.NVME_WRITE
    )
    seconds = plan.timeline.seconds
    a_day = written / seconds * 86_400
    return (
        f"At {seconds:.3g} s a step, {written / 1e9:,.1f} GB a step and "
        f"{a_day / 1e12:,.2f} TB a day are written to the drives."
    )


def _shown(made: AbstractPrepared, every: bool) -> str:
    plan = made.plan
    text = plan.listing() if every else plan.excerpt("--all prints them")
    return "\n\n".join(filter(None, (plan.summary(), made.tiled, text)))
