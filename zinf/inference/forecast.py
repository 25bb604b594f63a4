"""Predicts what generation costs for batches of several sizes, from its own plans.

The plans are those that `engine.generate` runs, for arrays that rest where the plan of
an engine puts them. No weight is needed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from zinf.core.plan import FetchChosen, InfeasibleError, Link, Plan, show_bytes
from zinf.core.program import Role, Tier
from zinf.core.step.forward import Forward
from zinf.inference.choose import fused_or_not
from zinf.inference.complete import ROWS
from zinf.inference.fused import FusedPrograms, block_rows
from zinf.inference.pace import Pace
from zinf.inference.plan import Generation, GenerationPlanner
from zinf.inference.prompts import check_length, shape_of
from zinf.inference.rows import Shape

# The sizes that are tried: doubled until that gains less than a tenth.
FIRST_SIZES, LARGEST_SIZE = (1, ROWS), 1024
WORTHWHILE = 1.1


@dataclass(frozen=True)
class Forecast:
    """The predicted cost of generation for one batch of sequences.

    Attributes:
        batch_size: sequences that are completed together.
        made: the streamed programs, for as many microbatches as hold the batch.
        fused: the fused programs; None if generation streams.
        why: why generation is fused, or streams: a sentence.
        pace: what times go by.
    """

    batch_size: int
    made: Generation
    fused: FusedPrograms | None
    why: str
    pace: Pace

    @property
    def mode(self) -> str:
        """How generation would run: "fused" or "streamed"."""
        return "streamed" if self.fused is None else "fused"

    @property
    def prefill_seconds(self) -> float:
        """Seconds until each sequence has its first token."""
        shape, parts = self.made.shape, self.made.parts
        num_parts = shape.prompt // parts.length
        if self.fused is None:
            seconds = self.pace.timeline(self.made.prefill).seconds
            return seconds * num_parts * -(-shape.rows // parts.rows)
        # Prompts are read in blocks, each as a microbatch of fewer rows.
        rows = block_rows(shape)
        seconds = self._fused_seconds(self.made.prefill) * rows / parts.rows
        return seconds * num_parts * -(-self.batch_size // rows)

    @property
    def decode_seconds(self) -> float:
        """Seconds of one more token of each sequence."""
        if self.fused is None:
            return self.streamed_seconds
        return self._fused_seconds(self.made.decode) * self.made.decode.num_microbatches

    @cached_property
    def streamed_seconds(self) -> float:
        """`decode_seconds` if generation streams."""
        return self.pace.timeline(self.made.decode).seconds

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all sequences together, in decode."""
        return self.batch_size / self.decode_seconds

    @property
    def streamed_tokens_per_second(self) -> float:
        """`tokens_per_second` if generation streams."""
        return self.batch_size / self.streamed_seconds

    def _fused_seconds(self, forward: Forward) -> float:
        """Seconds of a microbatch whose segments are one program."""
        return sum(self.pace.by_segment(forward))

    @property
    def cache_tiers(self) -> tuple[Tier, ...]:
        """Where the caches rest; none if all leaves pass through the host."""
        if self.fused is not None:
            return (Tier.DEVICE,)
        used = set(self.made.decode.cache_tiers.values())
        return tuple(tier for tier in Tier if tier in used)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the caches of all sequences; fused, of a microbatch."""
        program = self.made.decode.segmented.program
        once = sum(program.values[name].nbytes for name in program.caches)
        return once * (1 if self.fused else self.made.decode.num_microbatches)

    @property
    def binding_link(self) -> Link:
        """The link that is busy longest while a token is decoded."""
        if self.fused is not None:
            return Link.DEVICE
        plan = self.made.decode.plan
        timeline = self.pace.timeline(self.made.decode)
        busy = timeline.busy_seconds(plan.instructions)
        return max(busy, key=lambda link: busy[link])

    @property
    def experts_note(self) -> str | None:
        """What is assumed of experts that are read on demand; None if none are."""
        if self.fused is not None:
            return None
        chosen = self.made.decode.segmented.program.chosen
        if not chosen:
            return None
        number = self.made.decode.num_microbatches
        reads = sum(each.expected_reads(m) for each in chosen for m in range(number))
        whole = sum(each.num_experts for each in chosen)
        fetches = [
            each.operation
            for each in self.made.decode.plan.instructions
            if isinstance(each.operation, FetchChosen)
        ]
        nbytes = sum(each.expected_bytes for each in fetches)
        slots = {each.slots: each.num_slots for each in chosen}
        return (
            f"{show_bytes(nbytes)} of experts are assumed to be read for a token of "
            f"each sequence: {reads:,.1f} of the {whole:,} experts of {len(chosen)} "
            f"layers, with {sum(slots.values()):,} slots for those used last. All "
            "experts are assumed to be equally likely, and slots in use for long. Text "
            "about one subject reads less, the first tokens more."
        )

    def bytes_of(self, link: Link) -> int:
        """Bytes that one decoded token of each sequence moves over a link."""
        if self.fused is not None:
            return 0
        return self.made.decode.plan.link_bytes(link)


@dataclass(frozen=True)
class Unfit:
    """A batch size for which no plan keeps within the budgets."""

    batch_size: int
    reason: InfeasibleError


def forecasts(
    planner: GenerationPlanner,
    batch_sizes: Sequence[int] = (),
    *,
    prompt_length: int,
    max_new_tokens: int,
    pace: Pace | None = None,
) -> Iterator[Forecast | Unfit]:
    """The predicted cost of each batch size, in turn.

    Sequences have prompts of equal lengths.

    Args:
        batch_sizes: none: 1, then 8 doubled until tokens/s rise by less than a tenth,
            or nothing fits.
        prompt_length: tokens of a prompt.
        pace: what times go by; None: the rates of the plans, which count no reading
            from device memory.

    Raises:
        ValueError: the sequences are longer than the model allows.
    """
    longest = planner.steps.decoder.max_length
    check_length(prompt_length, max_new_tokens, longest, "The prompt")
    made: dict[Shape, Generation | InfeasibleError] = {}
    whole: dict[Shape, Generation] = {}
    modes: dict[Shape, tuple[FusedPrograms | None, str]] = {}
    pace = pace or Pace()

    def plan_whole(shape: Shape, other: GenerationPlanner) -> Generation:
        if shape not in whole:
            whole[shape] = other.plan(shape)
        return whole[shape]

    def forecast(batch_size: int) -> Forecast | Unfit:
        # As `zinf generate`: a single prompt is a row, and lines of a file are ROWS.
        rows = planner.whole_rows(1 if batch_size == 1 else ROWS)
        shape = shape_of(rows, prompt_length, max_new_tokens)
        try:
            if shape not in made:
                made[shape] = planner.plan(shape)
            found = made[shape]
            if isinstance(found, InfeasibleError):
                return Unfit(batch_size, found)
            count = -(-batch_size // rows)
            if count > 1:
                found = planner.repeated(found, count)
            found = planner.suited(found, partial(plan_whole, shape))
            if shape not in modes:
                modes[shape] = fused_or_not(planner, shape)
            return Forecast(batch_size, found, *modes[shape], pace)
        except InfeasibleError as error:
            made.setdefault(shape, error)
            return Unfit(batch_size, error)

    if batch_sizes:
        yield from map(forecast, batch_sizes)
        return
    for size in FIRST_SIZES:
        last = forecast(size)
        yield last
    while isinstance(last, Forecast) and last.batch_size < LARGEST_SIZE:
        before, last = last, forecast(2 * last.batch_size)
        yield last
        if isinstance(last, Forecast) and not _gains(last, before):
            return


def saturating(found: Sequence[Forecast]) -> Forecast | None:
    """The smallest batch that no larger one exceeds by a tenth in tokens/s.

    None if that is the largest: then larger ones may give more.
    """
    for each in found[:-1]:
        if not any(_gains(large, each) for large in found):
            return each
    return None


def weight_bytes(plan: Plan, planner: GenerationPlanner) -> dict[Tier, int]:
    """Bytes of weights at rest on each tier.

    Args:
        plan: that says where the weights rest.
    """
    layouts = planner.at_rest.layouts
    found = dict.fromkeys(Tier, 0)
    for array, tier in plan.homes.items():
        if array.role == Role.PARAM:
            found[tier] += layouts.share(array).nbytes
    return found


def _gains(large: Forecast, small: Forecast) -> bool:
    return large.tokens_per_second > WORTHWHILE * small.tokens_per_second
