"""`zinf plan --rl`: what a run from rewards costs, without weights."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from zinf import hf
from zinf.cli.errors import DOES_NOT_FIT, clean_errors, returning_exit_code
from zinf.cli.finetune import model_config
from zinf.cli.forecast import Asked, pace_of
from zinf.cli.plan import on_machine, rates_note
from zinf.cli.report import console
from zinf.cli.task import heading
from zinf.core.config.load import override, raw_config
from zinf.core.plan import InfeasibleError, show_bytes, show_seconds
from zinf.core.program import Tier
from zinf.core.text.complaint import tell
from zinf.core.topology import only_read

# Completions of a step: a group of GRPO.
REWARDED = 8


def rewards_config(
    model: str,
    overrides: Sequence[str],
    samples: int,
) -> dict[str, Any]:
    """The config of a run from rewards, for `zinf plan --rl --model`.

    It is GRPO, or with the override `data.objective=ppo` PPO.
    """
    objective = "ppo" if "data.objective=ppo" in overrides else "grpo"
    return model_config(model, objective=objective, samples=samples)


@only_read()
@returning_exit_code
def plan_rewards(
    name: Path | str,
    overrides: Sequence[str],
    asked: Asked,
    topology: str | None,
    traceback: bool,
    raw: Mapping[str, Any] | None = None,
) -> int:
    """Prints what a run from rewards costs, and returns an exit code.

    Args:
        name: the config file, or with `raw` the name of the model.
        asked: tokens of a prompt, if the config has no data.sequence_length, and with
            `raw` those of a completion.
        raw: the keys and values of the config; None reads them from the file.
    """
    with clean_errors(traceback):
        source = raw_config(name if raw is None else raw)
        config, _, _ = on_machine(source, overrides, topology)
        if not config.data.traits.is_drawn:
            raise ValueError(
                f"--rl is for a config with data.objective grpo or ppo, and {name} has "
                f"{config.data.objective}. Leave --rl out."
            )
        settings, longest = config.completions, hf.Task(config).model.max_length
        is_given = raw is None or settings.LENGTH in settings.model_fields_set
        new = settings.max_new_tokens if is_given else asked.max_new_tokens
        prompt, new = Asked(asked.prompt_length, new, ()).lengths(longest)
        length = config.data.sequence_length or prompt + new
        given = [f"{settings.KEY}.{settings.LENGTH}={new}"]
        source = override(source, [*given, f"data.sequence_length={length}"])
        config, mesh, machine = on_machine(source, overrides, topology)
        task = hf.Task(config)
        prompt = task.length - config.completions.max_new_tokens
        tell(heading(name, config))
        try:
            found = hf.foresee(
                task, mesh, machine, pace_of(config, machine), prompt_length=prompt
            )
        except InfeasibleError as error:
            tell(f"does not fit: {error}\n")
            return DOES_NOT_FIT
        _print(found, prompt)
        tell(f"\n{rates_note(config, topology)}")
    return 0


def _print(found: "hf.Foresight", prompt_length: int) -> None:
    plan, generation = found.made.plan, found.generation
    table = Table(box=None, pad_edge=False)
    table.add_column("holds at most")
    for tier in Tier:
        table.add_column(str(tier), justify="right")
    rows = {held.title: held.held_bytes for held in found.frozen}
    rows["the model in training"] = plan.peak_bytes
    rows["budget of all"] = {
        tier: n + sum(held.held_bytes[tier] for held in found.frozen)
        for tier, n in plan.capacity_bytes.items()
    }
    for title, nbytes in rows.items():
        cells = (nbytes[tier] for tier in Tier)
        # A machine that is absent has drives without a limit.
        table.add_row(
            title, *("-" if n >= sys.maxsize else show_bytes(n) for n in cells)
        )
    tell("fits:")
    console().print(table)
    times = Table(box=None, pad_edge=False)
    times.add_column("a rollout")
    times.add_column("seconds", justify="right")
    times.add_row("generation", show_seconds(found.generation_seconds))
    for scoring in found.scorings:
        times.add_row(f"scores of {scoring.title}", show_seconds(scoring.seconds))
    steps = f"{found.num_steps} step{'s' * (found.num_steps != 1)}"
    times.add_row(steps, show_seconds(found.steps_seconds))
    times.add_row("all", show_seconds(found.seconds))
    tell()
    console().print(times)
    tokens = found.drawn * found.num_tokens
    tell(
        f"\nA rollout draws {found.drawn:,} completions of {found.num_tokens:,} tokens "
        f"after prompts of {prompt_length:,}, {generation.batch_size:,} together "
        f"({generation.mode}, {generation.tokens_per_second:,.3g} tokens/s). "
        f"{generation.why}"
    )
    tell(
        f"Of rollouts with their steps: {tokens / found.seconds:,.3g} tokens/s. "
        "Generation counts each prompt as often as it is completed, and each "
        "completion with all of its tokens; reward functions are not counted."
    )
