"""The command line: `zinf train`, `plan`, `report`, `plot`, `checkpoint` and more."""

import json
import logging
import platform
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from zinf.cli.arguments import (
    AllowChanged,
    Overrides,
    ShowTraceback,
    WeightBits,
    WholeModel,
)
from zinf.cli.checkpoint import checkpoint_app
from zinf.cli.compress import merge, prune, quantize
from zinf.cli.data import data_app
from zinf.cli.errors import DIFFERS, USER_ERROR, clean_errors
from zinf.cli.inference import embed, evaluate, generate, score
from zinf.cli.options import FINETUNE, GRPO, PPO, with_options
from zinf.cli.trl import FamiliarCommand
from zinf.core.process.uncollected import uncollected
from zinf.core.text.complaint import ShownFormatter, tell
from zinf.distributed.options import Place, with_place
from zinf.ray.options import OnCluster, with_cluster

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
app.command()(generate)
app.command()(evaluate)
app.command()(score)
app.command()(embed)
app.command()(quantize)
app.command()(prune)
app.command()(merge)

ConfigFile = Annotated[Path, typer.Argument(help="A YAML or JSON file.")]
TunedModel = Annotated[Path, typer.Option(help="Folder for the tuned model.")]
Prompts = Annotated[
    list[Path],
    typer.Option(
        help="JSON lines or parquet of prompt (a text or messages); other fields go to "
        "the rewards; repeatable."
    ),
]
_REWARD = typer.Option(
    help="FILE.py:FUNCTION of (prompts, completions, **columns), which returns a "
    "number or None for each completion; or a reward model, as a folder or a name; "
    "repeatable."
)
RewardNames = Annotated[list[str], _REWARD]
MaybeRewards = Annotated[list[str] | None, _REWARD]
PromptEpochs = Annotated[float, typer.Option(help="How often each prompt is used.")]
Merge = Annotated[
    bool,
    typer.Option(
        "--merge/--no-merge",
        help="Write the model with its adapters added to OUTPUT, and the adapters to "
        "OUTPUT.adapter; else the adapters alone to OUTPUT.",
    ),
]
IgnoreUnsupported = Annotated[
    bool,
    typer.Option(
        "--ignore-unsupported",
        help="Leave out keys that are not supported, with a line each.",
    ),
]
IGNORE = "ignore_unsupported=true"


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
@with_place
@with_cluster
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    ignore_unsupported: IgnoreUnsupported = False,
    steps: Annotated[
        int | None, typer.Option(help="Optimizer steps, in place of run.steps.")
    ] = None,
    metrics: Annotated[
        Path | None, typer.Option(help="File of metrics, in place of run.metrics.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="File for a trace of the first steps, not in run.output."),
    ] = None,
    trace_steps: Annotated[
        int, typer.Option(min=1, help="Steps that the trace has.")
    ] = 3,
    allow_changed: AllowChanged = None,
    traceback: ShowTraceback = False,
    *,
    place: Place,
    cluster: OnCluster,
) -> None:
    """Train the model of a config file.

    The exit code is 3 if another process ended the run.
    """
    from zinf.cli.placed import run_placed
    from zinf.cli.train import train_config
    from zinf.core.config.load import raw_config

    given = [*(overrides or ()), *[IGNORE] * ignore_unsupported]
    if steps is not None:
        given.append(f"run.steps={steps}")
    if metrics is not None:
        given.append(f"run.metrics={json.dumps(str(metrics))}")
    run = partial(
        train_config,
        config.absolute() if cluster.ray else config,
        trace=trace,
        trace_steps=trace_steps,
        allow_changed=allow_changed or (),
    )
    with clean_errors(traceback):
        raw = raw_config(config) if cluster.ray else {}
    where = {"place": place, "cluster": cluster, "traceback": traceback}
    run_placed(run, raw, given, **where)


@app.command(cls=FamiliarCommand)
@with_place
@with_cluster
@with_options(FINETUNE)
def finetune(
    model: WholeModel,
    data: Annotated[
        list[Path],
        typer.Option(
            help="JSON lines or parquet of text, prompt and completion, messages, "
            "conversations (ShareGPT) or instruction and output (Alpaca); repeatable."
        ),
    ],
    output: TunedModel,
    epochs: Annotated[float, typer.Option(help="How often each sample is used.")] = 1.0,
    samples: Annotated[int, typer.Option(min=1, help="Samples of a step.")] = 8,
    merge: Merge = True,
    allow_changed: AllowChanged = None,
    overrides: Overrides = None,
    traceback: ShowTraceback = False,
    *,
    place: Place,
    cluster: OnCluster,
    **options: Any,
) -> None:
    """Fine-tune a model of transformers, and write it in the form and dtype it came in.

    The config, checkpoints and metrics of the run are in the folder OUTPUT.run. All
    parameters are trained, with masters in float32 and computing in bfloat16; with
    --lora, small adapters beside the frozen parameters.
    """
    from zinf.cli.finetune import model_config

    with clean_errors(traceback):
        raw = model_config(model, data=data, samples=samples, **options)
    run = {"output": output, "merges": merge, "epochs": epochs}
    run |= {"allow_changed": allow_changed or ()}
    where = {"place": place, "cluster": cluster, "traceback": traceback}
    _tune(raw, run, overrides, where)


@app.command(cls=FamiliarCommand)
@with_place
@with_cluster
@with_options(GRPO)
def grpo(
    model: WholeModel,
    data: Prompts,
    output: TunedModel,
    reward: MaybeRewards = None,
    epochs: PromptEpochs = 1.0,
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Completions of a step; those of a prompt if absent."),
    ] = None,
    merge: Merge = True,
    allow_changed: AllowChanged = None,
    overrides: Overrides = None,
    traceback: ShowTraceback = False,
    *,
    place: Place,
    cluster: OnCluster,
    **options: Any,
) -> None:
    """Train a model of transformers on what it writes itself, by rewards.

    For each prompt it draws several completions, and those that are rewarded more than
    the others become likelier (GRPO, or RLOO). Options have the names of TRL. Metrics,
    completions and checkpoints of the run are in the folder OUTPUT.run.
    """
    given = {"data": data, "rewards": reward or (), "samples": samples, **options}
    run = {"output": output, "merges": merge, "epochs": epochs}
    run |= {"allow_changed": allow_changed or ()}
    where = {"place": place, "cluster": cluster, "traceback": traceback}
    _tune_by_rewards(model, "grpo", given, run, overrides, where)


@app.command(cls=FamiliarCommand)
@with_place
@with_cluster
@with_options(PPO)
def ppo(
    model: WholeModel,
    data: Prompts,
    reward: RewardNames,
    output: TunedModel,
    epochs: PromptEpochs = 1.0,
    samples: Annotated[int, typer.Option(min=1, help="Completions of a step.")] = 8,
    merge: Merge = True,
    allow_changed: AllowChanged = None,
    overrides: Overrides = None,
    traceback: ShowTraceback = False,
    *,
    place: Place,
    cluster: OnCluster,
    **options: Any,
) -> None:
    """Train a model of transformers on what it writes itself, by rewards and a critic.

    The critic foretells the reward at each token, and what is rewarded more than it
    foretold becomes likelier (PPO). Both are trained, beside the model as it was and
    the reward models, within one budget. Options have the names of TRL. Metrics,
    completions and checkpoints of the run are in the folder OUTPUT.run.
    """
    given = {"data": data, "rewards": reward, "samples": samples, **options}
    run = {"output": output, "merges": merge, "epochs": epochs}
    run |= {"allow_changed": allow_changed or ()}
    where = {"place": place, "cluster": cluster, "traceback": traceback}
    _tune_by_rewards(model, "ppo", given, run, overrides, where)


def _tune_by_rewards(
    model: str,
    objective: str,
    given: Mapping[str, Any],
    run: Mapping[str, Any],
    overrides: list[str] | None,
    where: Mapping[str, Any],
) -> None:
    """`zinf grpo` and `zinf ppo`.

    Args:
        given: arguments of `of_rewards`.
        run, where: see `_tune`.
    """
    from zinf.cli.finetune import of_rewards

    with clean_errors(where["traceback"]):
        raw = of_rewards(model, objective, **given)
    _tune(raw, run, overrides, where)


def _tune(
    raw: dict[str, Any],
    run: Mapping[str, Any],
    overrides: list[str] | None,
    where: Mapping[str, Any],
) -> None:
    """Train the model of a config that a command has made.

    Args:
        run, where: arguments of `finetune_model` and of `run_placed`.
    """
    from zinf.cli.finetune import finetune_model, run_folder
    from zinf.cli.placed import run_placed

    tune = partial(finetune_model, raw, **run)
    folder = {"output": str(run_folder(run["output"]))}
    raw = raw | {"run": folder | raw["run"]}
    run_placed(tune, raw, overrides or (), **where)


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


@app.command()
@uncollected()
def plan(
    configs: Annotated[
        list[Path] | None, typer.Argument(help="YAML or JSON files.")
    ] = None,
    overrides: Overrides = None,
    ignore_unsupported: IgnoreUnsupported = False,
    every: Annotated[
        bool, typer.Option("--all", help="Print every instruction of the plan.")
    ] = False,
    topology: Annotated[
        str | None,
        typer.Option(help="Compile for this machine, such as v5p:8x8x8 or h200:8."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Plan to train this model of transformers: a folder, a config.json or "
            "a name on the Hugging Face hub. No weights are needed."
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1, help="Samples of a step, with --model; 1 if absent, with --rl 8."
        ),
    ] = None,
    sequence_length: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Tokens of a sample, with --model; if absent, 1024, or what the model "
            "was made for if that is less.",
        ),
    ] = None,
    longest: Annotated[
        bool,
        typer.Option(
            "--longest",
            help="Search the longest sequence whose step fits, and plan that.",
        ),
    ] = False,
    generates: Annotated[
        bool,
        typer.Option(
            "--generate",
            help="Plan generation in place of training: tokens/s by batch size.",
        ),
    ] = False,
    from_rewards: Annotated[
        bool,
        typer.Option(
            "--rl",
            help="Plan a run from rewards (grpo, ppo): generation, scores and steps, "
            "with the reference and the reward models.",
        ),
    ] = False,
    prompt_length: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of a prompt, with --generate and --rl; if absent, 512, or as "
            "many as the model has room for.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of a completion, with --generate and --rl; if absent, 200, or "
            "half of what the model was made for if that is less.",
        ),
    ] = None,
    batch_sizes: Annotated[
        str | None,
        typer.Option(
            help="Sequences at once, such as 1,8,64, with --generate; doubled while "
            "that gains, if absent."
        ),
    ] = None,
    weight_bits: WeightBits = None,
    html: Annotated[
        Path | None, typer.Option(help="Draw the plan of one config as an HTML page.")
    ] = None,
    traceback: ShowTraceback = False,
) -> None:
    """Print the plan of each config and whether it fits, without training.

    With --topology, plan for another machine and compile with its real compiler: print
    the bytes of a device and a host, collectives, and the predicted time of a step.

    With --longest, plan for sequences of many lengths, and print the longest that fits.

    With --generate, plan to run the model: where weights and caches rest, whether
    generation is fused or streamed and why, and the predicted time of prompts and
    tokens for batches of several sizes. --set rates=measured times this machine first.

    With --rl, plan a config of zinf grpo or ppo, or GRPO of a --model (PPO by --set
    data.objective=ppo): what each model holds on each tier, and the predicted time of a
    rollout, its scores and its steps.

    The exit code is 1 if a plan does not fit and 2 if there is another error.
    """
    from zinf.cli.finetune import model_config
    from zinf.cli.forecast import Asked, batch_sizes_of, plan_generation
    from zinf.cli.foresight import REWARDED, plan_rewards, rewards_config
    from zinf.cli.generate import in_bits
    from zinf.cli.longest import plan_longest
    from zinf.cli.plan import plan_config

    if from_rewards and (longest or generates or every or html is not None):
        raise typer.BadParameter(
            "--rl prints bytes and times of a run. Leave --longest, --generate, --all "
            "and --html out."
        )
    if longest and (generates or every or html is not None):
        raise typer.BadParameter(
            "--longest searches a length for training, and prints the summary of its "
            "plan. Leave --generate, --all and --html out."
        )
    configs = configs or []
    if not configs and model is None:
        raise typer.BadParameter("Name at least one config file, or a --model.")
    if html is not None and len(configs) + (model is not None) > 1:
        raise typer.BadParameter("--html draws one plan; name one config.")
    given = [*(overrides or ()), *[IGNORE] * ignore_unsupported]
    if generates:
        with clean_errors(traceback):
            sizes = batch_sizes_of(batch_sizes)
        asked = Asked(prompt_length, max_new_tokens, sizes)
        given = [*in_bits(weight_bits), *given]
        where = {"topology": topology, "traceback": traceback}
        codes = [plan_generation(config, given, asked, **where) for config in configs]
        if model is not None:
            raw = {"model": {"huggingface": model}}
            codes.append(plan_generation(model, given, asked, **where, raw=raw))
        raise typer.Exit(max(codes))
    if weight_bits is not None:
        raise typer.BadParameter("--weight-bits is of --generate.")
    if from_rewards:
        common = given, Asked(prompt_length, max_new_tokens, ()), topology, traceback
        codes = [plan_rewards(config, *common) for config in configs]
        if model is not None:
            raw = rewards_config(model, given, samples or REWARDED)
            codes.append(plan_rewards(model, *common, raw))
        raise typer.Exit(max(codes))
    problems: list[tuple[Path | str, dict[str, Any] | None]] = []
    problems += [(config, None) for config in configs]
    if model is not None:
        raw = model_config(model, samples=samples or 1, sequence_length=sequence_length)
        problems.append((model, raw))
    if longest:
        where = {"topology": topology, "traceback": traceback}
        codes = [plan_longest(name, given, **where, raw=raw) for name, raw in problems]
        raise typer.Exit(max(codes))
    rest = given, every, topology, html, traceback
    codes = [plan_config(name, *rest, raw) for name, raw in problems]
    raise typer.Exit(max(codes))


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
        given = [*(overrides or ()), *[IGNORE] * ignore_unsupported]
        found = report(config, given)
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
