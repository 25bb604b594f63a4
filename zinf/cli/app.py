"""The command line: `zinf train`, `plan`, `report`, `plot`, `checkpoint` and more."""

import logging
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from zinf.cli.arguments import (
    ConfigFile,
    IgnoreUnsupported,
    Overrides,
    ShowTraceback,
    settings,
)
from zinf.cli.checkpoint import checkpoint_app
from zinf.cli.compress import merge, prune, quantize
from zinf.cli.data import data_app
from zinf.cli.errors import DIFFERS, USER_ERROR, clean_errors
from zinf.cli.inference import embed, evaluate, generate, score
from zinf.cli.planning import plan
from zinf.cli.training import finetune, grpo, ppo, train
from zinf.cli.trl import FamiliarCommand
from zinf.core.text.complaint import ShownFormatter, tell

# [Note: late imports] Each command imports what it runs inside its function, so that
# help and errors in arguments are fast: importing jax alone takes half a second. The
# imports come before `clean_errors`: until then an interrupt ends the process at once.

app = typer.Typer(
    # Tables of rich cut long names of options in a terminal of 80 columns.
    rich_markup_mode=None,
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    # Rich tracebacks print every local variable, which may be an array of gigabytes.
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(no_args_is_help=True, help="Config files.")
app.add_typer(config_app, name="config")
bench_app = typer.Typer(no_args_is_help=True, help="Measure this machine.")
app.add_typer(bench_app, name="bench")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(data_app, name="data")
for command in (generate, evaluate, score, embed, quantize, prune, merge, train):
    app.command()(command)
for command in (finetune, grpo, ppo):
    app.command(cls=FamiliarCommand)(command)


def show_version(is_asked: bool) -> None:
    if is_asked:
        of = [f"{name} {version(name)}" for name in ("zinf", "jax", "optax")]
        tell(", ".join([*of, f"Python {platform.python_version()}"]))
        raise typer.Exit


@app.callback()
def command_line(
    _: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=show_version,
            is_eager=True,
            help="Say which versions of zinf, jax and Python these are.",
        ),
    ] = False,
) -> None:
    """Train any JAX model, of any size, on the hardware you have."""
    # Records without a handler may have text from outside, such as names of tensors.
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(ShownFormatter())
    # Orbax logs a traceback of every error that it raises.
    logging.getLogger("absl").setLevel(logging.CRITICAL)


@app.command()
def plot(
    trace: Annotated[
        Path, typer.Argument(help="What zinf train --trace wrote, or its run's folder.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="The page; the trace with the ending .html if absent."),
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="The step; the last one of the trace if absent.")
    ] = None,
    traceback: ShowTraceback = False,
) -> None:
    """Draw a step of a trace as an HTML page: a row per link, time across.

    The prediction is below the measurement. Any browser shows the page without a
    network.
    """
    from zinf.observe import read_trace
    from zinf.observe.plot import plot as draw
    from zinf.observe.record import TRACE

    with clean_errors(traceback):
        trace = trace / TRACE if trace.is_dir() else trace
        steps = {traced.number: traced for traced in read_trace(trace)}
        number = max(steps) if step is None else step
        if number not in steps:
            raise ValueError(
                f"{trace} has no step {number}. It has {', '.join(map(str, steps))}."
            )
        path = trace.with_suffix(".html") if output is None else output
        draw(steps[number], path)
        tell(f"Step {number} is drawn in {path}.")


@app.command("report")
def draw_run(
    folder: Annotated[
        Path, typer.Argument(help="What zinf train wrote: run.output of its config.")
    ],
    output: Annotated[
        Path | None, typer.Option(help="The page; FOLDER/report.html if absent.")
    ] = None,
    traceback: ShowTraceback = False,
) -> None:
    """Draw a run as one HTML page: curves, bytes held, a step by link, and the config.

    The page is a single file that any browser shows without a network.
    """
    from zinf.observe.page import run_page, write_page

    with clean_errors(traceback):
        path = folder / "report.html" if output is None else output
        write_page(run_page(folder), path)
        tell(f"The run is drawn in {path}.")


app.command()(plan)


@app.command()
def verify(
    config: Annotated[
        Path,
        typer.Argument(help="A YAML or JSON file, or a folder of a model."),
    ],
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are compared.")] = 3,
    every: Annotated[
        bool, typer.Option("--all", help="Print every leaf, not the worst alone.")
    ] = False,
    traceback: ShowTraceback = False,
) -> None:
    """Train a few steps in zinf and in plain jax, and compare the results by leaf.

    The model is that of the config; the tokens are random. Plain jax needs a model that
    fits on one device: give a large model fewer layers (--set model.num_layers=2).

    Given the folder of a model of transformers, compare a tiny random model of its
    class with torch, logits and gradients; no weight is read.

    The exit code is 1 if the results differ by more than rounding, or if the class
    cannot be compared.
    """
    from zinf.cli.verify import verify_class, verify_config

    with clean_errors(traceback):
        if config.is_dir():
            agrees = verify_class(config)
        else:
            agrees = verify_config(config, overrides or (), steps, every=every)
        if not agrees:
            raise typer.Exit(DIFFERS)


@config_app.command()
def check(
    config: ConfigFile,
    overrides: Overrides = None,
    ignore_unsupported: IgnoreUnsupported = False,
    traceback: ShowTraceback = False,
) -> None:
    """Say what zinf does with each key of a config file."""
    from zinf.cli.report import print_report
    from zinf.core.config import report

    with clean_errors(traceback):
        found = report(config, settings(overrides, ignore_unsupported))
        print_report(found)
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
    """Measure the speed of the drive of a folder, and find its best settings.

    The settings are written to a file in the folder. Every run whose NVMe tier is in
    the folder or below it then uses them.
    """
    from tqdm import tqdm

    from zinf.cli.report import print_measured
    from zinf.core.memory.nvme import measure_drive, save_profile

    with clean_errors(traceback):
        with tqdm(total=100, unit="%", disable=None, leave=False) as bar:
            profile, rows = measure_drive(
                path,
                seconds=seconds,
                progress=lambda part: bar.update(round(100 * part) - bar.n),
            )
        print_measured(rows, profile)
        tell(f"written to {save_profile(profile, path)}")


@bench_app.command()
def step(
    config: ConfigFile,
    overrides: Overrides = None,
    output: Annotated[
        Path, typer.Option(help="File for the rates, for the config's key `rates`.")
    ] = Path("rates.json"),
    steps: Annotated[int, typer.Option(min=1, help="Steps that are measured.")] = 5,
    traceback: ShowTraceback = False,
) -> None:
    """Measure the rates of links, devices and updates in steps of a config.

    The trained parameters are discarded. If the key `rates` of a config names the file,
    plans and predictions use these rates.
    """
    from zinf.cli.bench import measure_steps

    with clean_errors(traceback):
        measure_steps(config, overrides or (), output, steps)
