"""`zinf bench step`."""

import platform
from collections.abc import Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path
from statistics import median

from rich.table import Table
from tqdm import trange

from zinf.cli.report import console
from zinf.cli.task import heading, refuse_teacher, task_of
from zinf.core.engine.initialize import initialize
from zinf.core.machine.devices import on_devices
from zinf.core.machine.rates_file import save_rates
from zinf.core.plan import (
    Rates,
    bound_seconds,
    measured_rates,
    median_rates,
    predict,
    show_seconds,
)
from zinf.core.text.complaint import tell

# Steps that are not measured: the first has no updates deferred to it, and it touches
# memory for the first time.
WARM_STEPS = 2
# The bound is computed for at most this many instructions: for 4,000 it takes half a
# minute.
MAX_BOUNDED = 2048


def measure_steps(
    path: Path, overrides: Sequence[str], output: Path, num_steps: int
) -> None:
    """Takes steps on the first batch of a config; prints and writes measured rates.

    Raises:
        ValueError: the step is one executable, so no links can be measured.
    """
    config, mesh = on_devices(path, overrides=overrides)
    refuse_teacher(config, "zinf bench step")
    task = task_of(config)
    arguments, named = task.arguments()
    tell(heading(path, config))
    batch = next(iter(task.dataset("train")))
    found: list[Rates] = []
    seconds: list[float] = []
    with closing(initialize(*arguments, **named, mesh=mesh)) as engine:
        engine.prepare(batch)
        if engine.plan.is_one_program:
            raise ValueError(
                "A step of this config is one executable, which has no links to "
                "measure. Give smaller budgets in `memory`, or --set "
                "execution=streamed."
            )
        for number in trange(WARM_STEPS + num_steps, disable=None, leave=False):
            engine.step(batch)
            ran = engine.last_step
            assert ran.plan is not None and ran.timeline is not None
            if number >= WARM_STEPS:
                instructions, usual = ran.plan.instructions, ran.plan.rates
                found.append(measured_rates(instructions, ran.timeline, usual))
                seconds.append(ran.timeline.seconds)
        plan = engine.plan
    rates = median_rates(found)
    _print_rates(plan.rates, rates)
    again = predict(plan.instructions, rates).seconds
    took = show_seconds(median(seconds))
    tell(
        f"a step takes {took} (median of {num_steps}); it was predicted to take "
        f"{show_seconds(plan.timeline.seconds)}, and would be {show_seconds(again)} by "
        "these rates"
    )
    if len(plan.instructions) <= MAX_BOUNDED:
        bound = show_seconds(bound_seconds(plan.instructions, rates))
        tell(f"by them no order of it would take less than {bound}, with any memory")
    when = datetime.now().astimezone().isoformat(timespec="seconds")
    where = f"{mesh.devices.flat[0].device_kind}, {platform.node()}"
    measured = f"{when}, {num_steps} steps of {path.name} on {where}"
    save_rates(rates, output, measured)
    tell(f"written to {output}: name it in the config's key `rates`")


def _print_rates(planned: Rates, measured: Rates) -> None:
    table = Table("", "planned by", "measured", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for link, rate in measured.link_bytes_per_second.items():
        _add(table, str(link), planned.link_bytes_per_second[link], rate, "B/s")
    for tier, rate in measured.update_bytes_per_second.items():
        before = planned.update_bytes_per_second[tier]
        _add(table, f"updates on the {tier}", before, rate, "B/s")
    before = planned.flops_per_second
    _add(table, "computing", before, measured.flops_per_second, "flop/s")
    console().print(table)


def _add(table: Table, name: str, before: float, now: float, unit: str) -> None:
    shown = [f"{rate / 1e9:,.2f} G{unit}" for rate in (before, now)]
    shown[1] = "-" if before == now else shown[1]
    table.add_row(name, *shown)
