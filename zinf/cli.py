"""The command line: `zinf train`, `plan`, `plot`, `config check` and `bench io`."""

import json
import logging
import os
import shlex
import sys
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import grain
import jax
import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from zinf.checkpoint import Checkpoints
from zinf.config import Config, Report, grouping, report
from zinf.data import text_dataset
from zinf.data.text import Split, text_hash
from zinf.distributed import (
    AbstractGroup,
    Alone,
    Flags,
    Limits,
    find_seat,
    flat,
    join,
    leave,
    options,
)
from zinf.executor import NonFiniteError
from zinf.executor.compiled import compiled_runs
from zinf.executor.devices import group_devices, on_devices
from zinf.executor.prepare import Fused, Streamed
from zinf.initialize import initialize, make_planner
from zinf.memory import BudgetExceeded
from zinf.memory.nvme import Measured, Profile, measure_drive, save_profile
from zinf.models import GPTConfig, init_and_loss, num_parameters
from zinf.observe import read_trace
from zinf.observe.compiled import executables_table, traffic_table, verdict
from zinf.observe.plot import plot as draw
from zinf.optim.factory import build_optimizer, build_schedule
from zinf.paper import infinity_table, zero_table
from zinf.plan import InfeasibleError, Plan
from zinf.plan.show import show_instructions
from zinf.topology import Topology, parse_topology
from zinf.trainer import Trainer

DOES_NOT_FIT, USER_ERROR, INTERRUPTED = 1, 2, 130
# What a user can mend, with a message that says how.
USER_ERRORS = (
    ValueError,
    OSError,
    NotImplementedError,
    NonFiniteError,
    BudgetExceeded,
)
SHOWN_INSTRUCTIONS = 40
# What reads a pipe wants a line a key.
PIPE_WIDTH = 1000

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    # Rich tracebacks print every local, which may be an array of gigabytes.
    pretty_exceptions_enable=False,
    help="Train any JAX model, of any size, on the hardware you have.",
)
config_app = typer.Typer(no_args_is_help=True, help="Config files.")
app.add_typer(config_app, name="config")
bench_app = typer.Typer(no_args_is_help=True, help="Measure this machine.")
app.add_typer(bench_app, name="bench")

ConfigFile = Annotated[Path, typer.Argument(help="A YAML or JSON file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Set a key of the config; repeatable."),
]
ShowTraceback = Annotated[
    bool, typer.Option("--traceback", help="Show where an error comes from.")
]
ALONE = Alone()


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    steps: Annotated[
        int | None, typer.Option(help="Optimizer steps, in place of run.steps.")
    ] = None,
    metrics: Annotated[
        Path | None, typer.Option(help="File of metrics, in place of run.metrics.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="File for a trace of the first steps.")
    ] = None,
    trace_steps: Annotated[
        int, typer.Option(min=1, help="Steps that the trace has.")
    ] = 3,
    coordinator: options.Coordinator = None,
    num_processes: options.NumProcesses = None,
    process_id: options.ProcessId = None,
    local_devices: options.LocalDevices = None,
    join_timeout: options.JoinTimeout = options.DEFAULTS.join_seconds,
    silence_timeout: options.SilenceTimeout = options.DEFAULTS.silence_seconds,
    hang_timeout: options.HangTimeout = options.DEFAULTS.hang_seconds,
    traceback: ShowTraceback = False,
) -> None:
    """Train the model of a config file.

    The exit code is 3 if another process ended the run.
    """
    given = list(overrides or ())
    if steps is not None:
        given.append(f"run.steps={steps}")
    if metrics is not None:
        given.append(f"run.metrics={json.dumps(str(metrics))}")
    with _clean_errors(traceback):
        devices = options.device_ids(local_devices)
        flags = Flags(coordinator, num_processes, process_id, devices)
        limits = Limits(join_timeout, silence_timeout, hang_timeout)
        group = join(find_seat(flags, os.environ), limits)
    try:
        with _clean_errors(traceback, group), group:
            _train(config, given, trace, trace_steps, group)
    except typer.Exit as ended:
        if group.count > 1:
            leave(ended.exit_code)
        raise


@app.command()
def plot(
    trace: Annotated[Path, typer.Argument(help="What zinf train --trace wrote.")],
    output: Annotated[
        Path | None,
        typer.Option(help="Picture, PNG unless it ends otherwise; FILE.png if absent."),
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="The step; the last one of the trace if absent.")
    ] = None,
    traceback: ShowTraceback = False,
) -> None:
    """Draw a traced step: links as rows, time across, predicted below measured."""
    with _clean_errors(traceback):
        steps = {traced.number: traced for traced in read_trace(trace)}
        number = max(steps) if step is None else step
        if number not in steps:
            raise ValueError(
                f"{trace} has no step {number}. It has {', '.join(map(str, steps))}."
            )
        picture = trace.with_suffix(".png") if output is None else output
        draw(steps[number], picture)
        print(f"Step {number} is drawn in {picture}.")


@app.command()
def plan(
    configs: Annotated[
        list[Path] | None, typer.Argument(help="YAML or JSON files.")
    ] = None,
    overrides: Overrides = None,
    every: Annotated[
        bool, typer.Option("--all", help="Print every instruction of the plan.")
    ] = False,
    topology: Annotated[
        str | None,
        typer.Option(help="Compile for this machine, such as v5p:8x8x8 or h200:8."),
    ] = None,
    table: Annotated[
        bool, typer.Option("--table", help="Print the tables of the ZeRO papers.")
    ] = False,
    traceback: ShowTraceback = False,
) -> None:
    """Print the plan of each config and whether it fits, without training.

    With --topology for a machine that need not be here, compiled by its real compiler:
    bytes of a device and a host, collectives, and the predicted time of a step.

    The exit code is 1 if a plan does not fit and 2 if there is another error.
    """
    if table:
        _print_tables()
    if not configs:
        if table:
            return
        raise typer.BadParameter("Name at least one config file, or ask for --table.")
    rest = overrides or (), every, topology, traceback
    codes = [_plan(config, *rest) for config in configs]
    raise typer.Exit(max(codes))


@config_app.command()
def check(config: ConfigFile, traceback: ShowTraceback = False) -> None:
    """Say what zinf does with each key of a config file."""
    with _clean_errors(traceback):
        found = report(config)
        _print_report(found)
        if not found.is_valid:
            raise typer.Exit(USER_ERROR)


@bench_app.command()
def io(
    path: Annotated[Path, typer.Argument(help="A folder on the drive.")],
    seconds: Annotated[
        float, typer.Option(help="Start no round of measurements after this time.")
    ] = 30.0,
    traceback: ShowTraceback = False,
) -> None:
    """Measure what the drive of a folder does, and how it is best asked.

    The result is written to a file in the folder, which every run with an NVMe tier in
    the folder or below it then goes by.
    """
    with _clean_errors(traceback):
        with tqdm(total=100, unit="%", disable=None, leave=False) as bar:
            profile, rows = measure_drive(
                path,
                seconds=seconds,
                progress=lambda part: bar.update(round(100 * part) - bar.n),
            )
        _print_measured(rows, profile)
        print(f"written to {save_profile(profile, path)}")


def _print_measured(rows: Sequence[Measured], chosen: Profile) -> None:
    table = Table("block", "threads", "read", "overwrite", "mixed", "", box=None)
    for row in rows:
        profile = row.profile
        speeds = (median(x) / 1e9 for x in (row.reads, row.writes, row.mixed))
        is_chosen = (profile.block_bytes, profile.num_threads) == (
            chosen.block_bytes,
            chosen.num_threads,
        )
        is_default = profile == Profile()
        marks = ["chosen"] * is_chosen + ["without a profile"] * is_default
        table.add_row(
            f"{profile.block_bytes >> 20} MiB",
            str(profile.num_threads),
            *(f"{speed:.2f}" for speed in speeds),
            ", ".join(marks),
        )
    Console(markup=False, highlight=False).print(table)
    print(f"GB/s, medians of {len(rows[0].reads)} rounds in turn")


def _train(
    path: Path,
    overrides: Sequence[str],
    trace: Path | None,
    trace_steps: int,
    group: AbstractGroup,
) -> None:
    config, mesh = on_devices(path, overrides=overrides)
    if group.count > 1:
        group.agree(_alike(config))
    # Orbax logs a traceback of every error, which it then raises all the same.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    data = _data(config, "train", group)
    evaluates = config.run.evaluate_every is not None
    evaluation_data = _data(config, "validation", group) if evaluates else None
    arguments, named = _problem(config, group)
    say = _say if group.is_first else _say_nothing
    say(_heading(path, config))
    with closing(initialize(*arguments, **named, mesh=mesh, group=group)) as engine:
        say(f"{engine.plan.summary()}\n")
        folder = config.run.output / "checkpoints"
        if group.is_first and not config.run.resume:
            _set_aside(folder)
        group.barrier("checkpoints of earlier runs are set aside")
        with Checkpoints(folder, keep=config.run.keep_checkpoints) as checkpoints:
            trainer = Trainer(
                engine,
                data,
                steps=config.run.steps,
                evaluation_data=evaluation_data,
                evaluate_every=config.run.evaluate_every,
                evaluate_batches=config.run.evaluate_batches,
                checkpoints=checkpoints,
                checkpoint_every=config.run.checkpoint_every,
                metrics=config.run.metrics,
                tensorboard=config.tensorboard_folder,
                trace=trace,
                trace_steps=trace_steps,
                log_every=config.log_every,
                learning_rate=build_schedule(config),
            )
            try:
                trainer.run()
            except KeyboardInterrupt:
                if checkpoints.latest_step() is not None:
                    say(f"Continue with: {_resume_command(path, overrides)}")
                raise
    if config.run.metrics is not None:
        say(f"The metrics of each step are in {config.run.metrics}.")
    if trace is not None and trace.exists():
        drawn = shlex.join(["zinf", "plot", str(trace)])
        say(f"{trace} opens in https://ui.perfetto.dev; draw it with {drawn}")


def _plan(
    path: Path,
    overrides: Sequence[str],
    every: bool,
    topology: str | None,
    traceback: bool,
) -> int:
    """Prints the plan of one config and returns an exit code."""
    try:
        with _clean_errors(traceback):
            machine, mesh = None, None
            if topology is not None:
                machine = parse_topology(topology)
                asked = grouping(path, overrides)
                mesh = group_devices(machine.devices(), asked)
            config, mesh = on_devices(path, mesh, overrides)
            arguments, named = _problem(config)
            print(_heading(path, config), flush=True)
            planner = make_planner(
                *arguments, rng=named["rng"], mesh=mesh, topology=machine
            )
            try:
                made = planner.plan_batch(named["batch"])
            except InfeasibleError as error:
                print(f"does not fit: {error}\n", flush=True)
                return DOES_NOT_FIT
            print(f"fits: {_shown(made.plan, every)}\n", flush=True)
            if machine is not None:
                _print_compiled(made, machine, planner.param_bytes)
    except typer.Exit as ended:
        if ended.exit_code == INTERRUPTED:
            raise
        return ended.exit_code
    return 0


def _print_compiled(
    made: Streamed | Fused, machine: Topology, param_bytes: int
) -> None:
    runs = compiled_runs(made)
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    console = Console(width=width, markup=False, highlight=False)
    for table in (executables_table(runs), traffic_table(runs, param_bytes)):
        table.title_justify = "left"
        console.print(table)
        console.print()
    print(verdict(made.plan, runs, machine, param_bytes), flush=True)


def _say(text: str) -> None:
    print(text, flush=True)


def _say_nothing(text: str) -> None: ...


def _alike(config: Config) -> dict[str, Any]:
    """What all processes must have alike: every key but a host's own folders."""
    keys = flat(config.model_dump(mode="json"))
    own = ("nvme", "nvme_path")
    return {key: keys[key] for key in keys if key.rpartition(".")[2] not in own}


def _problem(
    config: Config, group: AbstractGroup = ALONE
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `initialize` for the model, data and optimizer of a config."""
    model = _model(config)
    init, loss = init_and_loss(model, seed=config.run.seed)
    rows = _batch_size(config) // group.count
    shape = (rows, config.data.sequence_length + 1)
    named = {
        "rng": jax.random.key(config.run.seed) if model.dropout else None,
        "batch": {"tokens": jax.ShapeDtypeStruct(shape, np.int32)},
    }
    return (loss, init, build_optimizer(config), config), named


def _model(config: Config) -> GPTConfig:
    if config.model is None:
        raise ValueError(
            "The config has no model section, which zinf train and zinf plan need. "
            "Add one, such as model: {num_layers: 8, num_heads: 5, embed_dim: 320, "
            "max_length: 256}, or pass a loss function to zinf.initialize in Python."
        )
    return GPTConfig(**config.model.model_dump(exclude={"name"}))


def _batch_size(config: Config) -> int:
    if config.batch_size is None:
        raise ValueError(
            "The config does not say how many samples a step has. Set train_batch_size "
            "or train_micro_batch_size_per_gpu."
        )
    return config.batch_size


def _data(config: Config, split: Split, group: AbstractGroup) -> grain.IterDataset:
    data = config.data
    # A folder that is named stdlib is not the standard library: hence absolute paths.
    paths = data.paths
    names = [paths] if isinstance(paths, str) else [str(p.absolute()) for p in paths]
    if group.count > 1:
        group.agree({"text of the files": text_hash(names, glob=data.glob)})
    return text_dataset(
        names,
        glob=data.glob,
        sequence_length=data.sequence_length,
        batch_size=_batch_size(config),
        seed=data.seed,
        split=split,
        validation_fraction=data.validation_fraction,
        process=(group.index, group.count),
        num_microbatches=config.num_microbatches,
    )


def _set_aside(folder: Path) -> None:
    """Renames the checkpoints of an earlier run, which a new one would replace."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    number = 1
    while (kept := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(kept)
    print(
        f"Checkpoints of an earlier run are kept in {kept}. To continue a run instead "
        "of starting anew, use --set run.resume=true.",
        flush=True,
    )


def _resume_command(path: Path, overrides: Sequence[str]) -> str:
    settings = [o for o in overrides if not o.startswith("run.resume=")]
    options = [part for o in [*settings, "run.resume=true"] for part in ("--set", o)]
    return shlex.join(["zinf", "train", str(path), *options])


def _heading(path: Path, config: Config) -> str:
    tokens = _batch_size(config) * config.data.sequence_length
    return (
        f"{path}: {num_parameters(_model(config)):,} parameters, {tokens:,} tokens a "
        f"step, {config.compute_dtype}"
    )


def _shown(made: Plan, every: bool) -> str:
    count = len(made.instructions) if every else SHOWN_INSTRUCTIONS
    text = show_instructions(made.instructions[:count], made.timeline)
    left = len(made.instructions) - count
    more = f"\n... and {left:,} more instructions (--all prints them)" * (left > 0)
    return f"{made.summary()}\n\n{text}{more}"


def _print_tables() -> None:
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    console = Console(width=width, markup=False, highlight=False)
    for table in (zero_table(), infinity_table()):
        table.title_justify = table.caption_justify = "left"
        console.print(table)
        console.print()


def _print_report(found: Report) -> None:
    table = Table("key", "value", "status", "reason", box=None, pad_edge=False)
    for column in table.columns[:3]:
        column.no_wrap = True
    for row in found.rows:
        table.add_row(row.key, row.value, str(row.status), row.reason)
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    console = Console(width=width, markup=False, highlight=False)
    console.print(table)
    for note in found.notes:
        console.print(f"note: {note}", soft_wrap=True)
    for problem in found.problems:
        print(f"error: {problem}", file=sys.stderr)


@contextmanager
def _clean_errors(
    traceback: bool, group: AbstractGroup = ALONE
) -> Generator[None, None, None]:
    """Prints a user's error as one message and ends with its exit code."""
    prefix = f"[process {group.index}] " if group.count > 1 else ""
    try:
        yield
    except KeyboardInterrupt:
        print(f"{prefix}Interrupted.", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    except USER_ERRORS as error:
        if traceback:
            raise
        lines = [str(error), *getattr(error, "__notes__", ())]
        print(f"{prefix}error:", "\n".join(lines), file=sys.stderr)
        is_infeasible = isinstance(error, InfeasibleError)
        raise typer.Exit(DOES_NOT_FIT if is_infeasible else USER_ERROR) from None
