"""`zinf plan --longest`: the longest sequence whose training step fits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import jax

from zinf import hf
from zinf.cli.errors import DOES_NOT_FIT, clean_errors, returning_exit_code
from zinf.cli.plan import on_machine, rates_note
from zinf.cli.task import heading, refuse_teacher, task_of
from zinf.core.config import Config
from zinf.core.engine.initialize import make_planner
from zinf.core.plan import InfeasibleError, Plan, show_bytes, show_seconds
from zinf.core.program import Tier
from zinf.core.sharding.mesh import SEQ
from zinf.core.step.choice import in_short
from zinf.core.text.complaint import tell
from zinf.core.topology import only_read

# Lengths that are tried, from one power of two to the next. All have many divisors, for
# blocks of rows.
LENGTHS_PER_DOUBLING = 8
# The search first goes up (or down) by so many doublings at once.
DOUBLINGS = 2
MAX_DOUBLINGS = 24


@only_read()
@returning_exit_code
def plan_longest(
    name: Path | str,
    overrides: Sequence[str],
    *,
    topology: str | None,
    traceback: bool,
    raw: Mapping[str, Any] | None = None,
) -> int:
    """Prints the longest sequence that fits and its plan, and returns an exit code.

    Args:
        name: the config file, or with `raw` the name of the model.
        raw: the keys and values of the config; None reads them from the file.
    """
    with clean_errors(traceback):
        source = name if raw is None else raw
        config, mesh, _ = on_machine(source, overrides, topology)
        _check(config)
        tell(heading(name, config))
        if config.execution == "auto":
            # Of all steps the streamed one needs the least memory.
            overrides = [*overrides, "execution=streamed"]
        lengths = candidates(mesh.shape.get(SEQ, 1), *_limit(config))
        attempts = _Attempts(source, overrides, topology)
        return _search(config, attempts, lengths)


def _check(config: Config) -> None:
    refuse_teacher(config, "zinf plan --longest")
    if config.dynamic_batching is not None:
        raise NotImplementedError(
            "With dynamic_batching a batch has max_tokens tokens, however long its "
            "samples are. Leave --longest out, or turn dynamic_batching off."
        )


@dataclass
class _Attempts:
    """Plans of one config for sequences of several lengths.

    Attributes:
        plans: those that fit, by length.
        reasons: why other lengths do not fit.
    """

    source: Mapping[str, Any] | Path | str
    overrides: Sequence[str]
    topology: str | None
    plans: dict[int, Plan] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)

    def fits(self, length: int) -> bool:
        """Whether a step on sequences of a length fits; prints what it takes."""
        more = f"data.sequence_length={length}"
        where = [*self.overrides, more], self.topology
        config, mesh, machine = on_machine(self.source, *where)
        arguments, named = task_of(config).arguments()
        batch = named.pop("batch")
        planner = make_planner(*arguments, **named, mesh=mesh, topology=machine)
        try:
            plan = planner.plan_batch(batch).plan
        except InfeasibleError as error:
            self.reasons[length] = in_short(error)
        except (NotImplementedError, jax.errors.JaxRuntimeError) as error:
            # Compilers have limits of their own. What fails at every length is a fault
            # of the config, which is not hidden.
            if not self.plans:
                raise
            self.reasons[length] = in_short(error)
        else:
            self.plans[length] = plan
            tell(f"{length:,} tokens fit: {_in_short(plan)}")
            return True
        tell(f"{length:,} tokens do not fit: {self.reasons[length]}")
        return False


def _in_short(plan: Plan) -> str:
    peaks = [
        f"{show_bytes(plan.peak_bytes[tier])} on {tier}"
        for tier in Tier
        if plan.peak_bytes[tier]
    ]
    return f"{', '.join(peaks)}; {show_seconds(plan.timeline.seconds)} a step"


def _search(config: Config, attempts: _Attempts, lengths: Sequence[int]) -> int:
    begin = perf_counter()
    first = max(
        (i for i, n in enumerate(lengths) if n <= config.sequence_length), default=0
    )
    found = last_fitting(attempts.fits, lengths, first)
    count = len(attempts.plans) + len(attempts.reasons)
    effort = f"{count} plans in {perf_counter() - begin:.0f} s."
    if found < 0:
        tell(f"\nNo sequence fits, not even one of {lengths[0]:,} tokens. {effort}")
        return DOES_NOT_FIT
    longest = lengths[found]
    tell(f"\nThe longest sequence that fits has {longest:,} tokens.")
    if found + 1 < len(lengths):
        tell(f"The next length that was tried is {lengths[found + 1]:,}. {effort}")
    else:
        tell(f"{_limit(config)[1]} allows no more. {effort}")
    tell(f"\n{attempts.plans[longest].summary()}")
    tell(f"\n{rates_note(config, attempts.topology)}")
    return 0


def _limit(config: Config) -> tuple[int | None, str]:
    """The longest sequence that a model takes, and the setting that says so."""
    model = config.model
    if model is not None and model.huggingface is not None:
        return hf.Task(config).model.max_length, "max_position_embeddings"
    return None if model is None else model.max_length, "model.max_length"


def candidates(unit: int, limit: int | None, key: str) -> list[int]:
    """The lengths of sequences to try, ascending; all are multiples of `unit`.

    Args:
        limit: the longest one; None is no limit.
        key: the setting that has the limit, for errors.

    Raises:
        ValueError: the limit is below `unit`.
    """
    per, doublings = LENGTHS_PER_DOUBLING, range(MAX_DOUBLINGS)
    found = [unit * (per + i) << doubling for doubling in doublings for i in range(per)]
    if limit is None:
        return found
    if limit < unit:
        raise ValueError(
            f"{key} allows {limit:,} tokens, which mesh.seq = {unit} devices cannot "
            "divide. Lower mesh.seq."
        )
    longest = limit - limit % unit
    return [n for n in found if n < longest] + [longest]


def last_fitting(
    fits: Callable[[int], bool], lengths: Sequence[int], first: int
) -> int:
    """The index of the last length that fits, where all before it fit; -1: none.

    Asks for `lengths[first]` first, then for lengths farther and farther away until one
    fits and one does not, and halves the distance between these.
    """
    low, high, at = -1, len(lengths), first
    step = DOUBLINGS * LENGTHS_PER_DOUBLING
    while high - low > 1:
        if fits(lengths[at]):
            low = at
        else:
            high = at
        if high == len(lengths):
            at = min(low + step, high - 1)
        elif low < 0:
            at = max(high - step, 0)
        else:
            at = (low + high) // 2
    return low
