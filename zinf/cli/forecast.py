"""`zinf plan --generate`: what generation costs, without weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh
from rich.table import Table

from zinf.cli.errors import DOES_NOT_FIT, clean_errors, returning_exit_code
from zinf.cli.gpt_task import RunningGpt
from zinf.cli.plan import on_machine, rates_note
from zinf.cli.report import console
from zinf.cli.task import task_of
from zinf.core.config import Config
from zinf.core.engine.initialize import measuring
from zinf.core.plan import InfeasibleError, Link, Plan, show_bytes, show_seconds
from zinf.core.program import Tier
from zinf.core.step.planner import Planner
from zinf.core.step.setup import AtRest
from zinf.core.text.complaint import tell
from zinf.core.topology import Topology, only_read
from zinf.inference import (
    Forecast,
    GenerationPlanner,
    Pace,
    Sampling,
    Steps,
    Unfit,
    bucket,
    check_length,
    forecasts,
    saturating,
    weight_bytes,
)

if TYPE_CHECKING:  # It imports torch.
    from zinf.hf.engine import Running

USUAL_PROMPT = 512
USUAL_COMPLETION = 200

COLUMNS = (
    "batch",
    "mode",
    "cache",
    "rests on",
    "prefill",
    "a token",
    "tokens/s",
    "streamed",
    "binds",
    "drive read",
    "at most",
)


@dataclass(frozen=True)
class Asked:
    """What a forecast is for.

    Attributes:
        prompt_length, max_new_tokens: tokens; None: the usual ones, or as many as the
            model has room for.
        batch_sizes: sequences at once.
    """

    prompt_length: int | None
    max_new_tokens: int | None
    batch_sizes: tuple[int, ...]

    def lengths(self, max_length: int | None) -> tuple[int, int]:
        """The tokens of a prompt and of a completion.

        Args:
            max_length: the most tokens that the model was made for, if it has a limit.

        Raises:
            ValueError: the model has no room for them.
        """
        new = self.max_new_tokens or USUAL_COMPLETION
        prompt = self.prompt_length or USUAL_PROMPT
        if max_length is not None:
            if self.max_new_tokens is None:
                new = min(new, max(max_length // 2, 1))
            if self.prompt_length is None:
                prompt = min(prompt, max(max_length - new, 1))
        check_length(prompt, new, max_length, "The prompt")
        return prompt, new


def batch_sizes_of(text: str | None) -> tuple[int, ...]:
    """The sizes in a text such as "1,8,64"; none for None.

    Raises:
        ValueError: the text has another form.
    """
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(
            f"--batch-sizes takes whole numbers of at least 1 with commas between "
            f"them, such as 1,8,64; found {text!r}."
        )
    return tuple(sorted({int(part) for part in parts}))


@only_read()
@returning_exit_code
def plan_generation(
    name: Path | str,
    overrides: Sequence[str],
    asked: Asked,
    *,
    topology: str | None,
    traceback: bool,
    raw: Mapping[str, Any] | None = None,
) -> int:
    """Prints what generation with a model costs, and returns an exit code.

    Args:
        name: the config file, or with `raw` the name of the model.
        raw: the keys and values of the config; None reads them from the file.
    """
    with clean_errors(traceback):
        source = name if raw is None else raw
        config, mesh, machine = on_machine(source, overrides, topology)
        return _print_forecasts(str(name), config, mesh, machine, asked)


def _print_forecasts(
    name: str, config: Config, mesh: Mesh, machine: Topology | None, asked: Asked
) -> int:
    running = task_of(config).running(bucket(asked.prompt_length or USUAL_PROMPT))
    planner = running.planner(mesh=mesh, topology=machine)
    if machine is None:
        planner = measuring(planner)
    lengths = asked.lengths(running.decoder(planner).max_length)
    tell(
        f"{name}: {running.num_parameters:,} parameters, "
        f"{show_bytes(planner.param_bytes)}, "
        f"prompts of {lengths[0]:,} tokens and {lengths[1]:,} new ones",
    )
    try:
        generation, placed = planned_generation(running, planner)
    except InfeasibleError as error:
        tell(f"does not fit: {error}\n")
        return DOES_NOT_FIT
    resting = weight_bytes(placed, generation)
    tell(f"weights at rest: {_by_tier(resting, placed)}")
    found = list(
        forecasts(
            generation,
            asked.batch_sizes,
            prompt_length=lengths[0],
            max_new_tokens=lengths[1],
            pace=pace_of(config, machine, placed),
        )
    )
    _print_table(found, resting)
    tell(f"\n{_note(config, machine)}")
    return 0 if any(isinstance(x, Forecast) for x in found) else DOES_NOT_FIT


def planned_generation(
    running: "Running | RunningGpt", planner: Planner
) -> tuple[GenerationPlanner, Plan]:
    """What plans greedy generation, and the plan that says where weights rest.

    Args:
        planner: that of `running`.

    Raises:
        InfeasibleError: the weights do not fit.
    """
    placed = planner.plan(planner.batch_spec(running.batch))
    decoder, sampling = running.decoder(planner), Sampling(temperature=0.0)
    bound, key = planner.problem.bound, jax.random.key(0)
    generation = GenerationPlanner(
        planner,
        AtRest(placed.plan.homes, placed.layouts),
        Steps(planner.problem, decoder, sampling, bound, key),
        running.execution,
    )
    return generation, placed.plan


def _print_table(
    found: Sequence[Forecast | Unfit], resting: Mapping[Tier, int]
) -> None:
    table = Table(box=None, pad_edge=False)
    for name in COLUMNS:
        is_text = name in ("mode", "rests on", "binds")
        table.add_column(name, justify="left" if is_text else "right")
    fitting = [x for x in found if isinstance(x, Forecast)]
    for each in fitting:
        table.add_row(str(each.batch_size), *_cells(each, resting))
    out = console()
    tell()
    if fitting:
        out.print(table)
        tell(f"\n{_verdict(fitting, resting)}")
        for why in dict.fromkeys(each.why for each in fitting):
            sizes = [str(each.batch_size) for each in fitting if each.why == why]
            tell(f"A batch of {', '.join(sizes)}: {why}")
        for each in fitting:
            if each.experts_note is not None:
                tell(f"A batch of {each.batch_size}: {each.experts_note}")
    for size in (x for x in found if isinstance(x, Unfit)):
        tell(f"a batch of {size.batch_size:,} does not fit: {size.reason}")


def _cells(each: Forecast, resting: Mapping[Tier, int]) -> tuple[str, ...]:
    bound = _bound_seconds(each, resting)
    return (
        each.mode,
        show_bytes(each.cache_bytes),
        ", ".join(map(str, each.cache_tiers)) or str(Tier.HOST),
        show_seconds(each.prefill_seconds),
        show_seconds(each.decode_seconds),
        f"{each.tokens_per_second:,.3g}",
        f"{each.streamed_tokens_per_second:,.3g}",
        str(each.binding_link),
        show_bytes(each.bytes_of(Link.NVME_READ)),
        f"{each.batch_size / bound:,.3g}" if bound else "-",
    )


def _bound_seconds(each: Forecast, resting: Mapping[Tier, int]) -> float:
    """Seconds that the drive takes to read once the weights that rest on nvme."""
    return resting[Tier.NVME] / _drive_rate(each)


def _drive_rate(each: Forecast) -> float:
    """Bytes per second that the drive reads."""
    rates = each.pace.rates_of(each.made.decode.plan)
    return rates.link_bytes_per_second[Link.NVME_READ]


def _verdict(fitting: Sequence[Forecast], resting: Mapping[Tier, int]) -> str:
    best = max(fitting, key=lambda x: x.tokens_per_second)
    enough = saturating(fitting)
    if enough is None:
        most = fitting[-1]
        lines = [f"Tokens/s still rise at a batch of {most.batch_size:,}."]
    else:
        lines = [
            f"A batch of {enough.batch_size:,} saturates: larger ones give less than "
            "a tenth more tokens/s."
        ]
    bound = _bound_seconds(best, resting)
    if bound:
        rate = _drive_rate(best)
        lines.append(
            f"'At most' is the bound of the drive: {show_bytes(resting[Tier.NVME])} of "
            f"weights at {rate / 1e9:.3g} GB/s are {show_seconds(bound)} a token of "
            "all sequences."
        )
    return "\n".join(lines)


def pace_of(
    config: Config, machine: Topology | None, placed: Plan | None = None
) -> Pace:
    """The rates, or the timing here, that predicted times come from.

    Args:
        placed: the plan that says where weights rest, if its rates may be measured: if
            the config asks for that.
    """
    if machine is not None:
        # Half of the peak, as of all rates.
        return Pace(memory_bytes_per_second=machine.chip.memory_bytes_per_second / 2)
    if config.rates == "measured" and placed is not None:
        return Pace(placed.rates, is_measured=True)
    return Pace()


def _note(config: Config, machine: Topology | None) -> str:
    if machine is not None:
        return rates_note(config, machine.text)
    if config.rates == "measured":
        return (
            "Times go by rates of this machine, and by its times of the executables, "
            "which were measured now."
        )
    return (
        f"{rates_note(config, None)} Times count flops and links, and no reading from "
        "device memory. --set rates=measured measures this machine now."
    )


def _by_tier(resting: Mapping[Tier, int], plan: Plan) -> str:
    capacity = plan.capacity_bytes
    return ", ".join(
        f"{show_bytes(nbytes)} on {tier} (budget {show_bytes(capacity[tier])})"
        for tier, nbytes in resting.items()
        if nbytes
    )
