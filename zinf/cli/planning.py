"""Declares `zinf plan`, which trains nothing."""

from pathlib import Path
from typing import Annotated, Any

import typer

from zinf.cli.arguments import (
    IgnoreUnsupported,
    Overrides,
    ShowTraceback,
    WeightBits,
    settings,
)
from zinf.cli.errors import clean_errors
from zinf.core.process.uncollected import uncollected


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
    given = settings(overrides, ignore_unsupported)
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
    elif weight_bits is not None:
        raise typer.BadParameter("--weight-bits is of --generate.")
    elif from_rewards:
        common = given, Asked(prompt_length, max_new_tokens, ()), topology, traceback
        codes = [plan_rewards(config, *common) for config in configs]
        if model is not None:
            raw = rewards_config(model, given, samples or REWARDED)
            codes.append(plan_rewards(model, *common, raw))
    else:
        problems: list[tuple[Path | str, dict[str, Any] | None]] = []
        problems += [(config, None) for config in configs]
        if model is not None:
            sizes = {"samples": samples or 1, "sequence_length": sequence_length}
            problems.append((model, model_config(model, **sizes)))
        if longest:
            where = {"topology": topology, "traceback": traceback}
            codes = [plan_longest(x, given, **where, raw=raw) for x, raw in problems]
        else:
            rest = given, every, topology, html, traceback
            codes = [plan_config(name, *rest, raw) for name, raw in problems]
    raise typer.Exit(max(codes))
