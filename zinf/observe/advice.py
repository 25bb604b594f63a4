"""Which link binds a step, and which changes would make the step faster."""

from collections.abc import Sequence
from dataclasses import dataclass

from zinf.core.plan import Link, show_bytes, show_seconds
from zinf.core.program import MOVING, Tier
from zinf.observe.record import RunRecord
from zinf.observe.replay import busy_seconds, replay
from zinf.observe.traced import Span, TracedStep

NVME = (Link.NVME_READ, Link.NVME_WRITE)
COPIES = tuple(link for link in MOVING if link not in NVME)
# Advice for a link is given only if a link twice as fast saves this share of the step.
LEAST_GAIN = 0.05
# A tier whose planned peak is at least this share of its budget is called full.
FULL = 0.9
# A device that is busy for less than this share of a fused step waits for the host.
BUSY = 0.8
# If the relative error of the prediction is larger than this, its rates do not fit this
# machine.
LARGEST_ERROR = 0.25


@dataclass(frozen=True)
class WhatIf:
    """What doubling the speed of one link, or of the two NVMe links, would save.

    Attributes:
        busy_share: share of the step for which the link is busy; of two, the busier.
        gain: share of the step that is saved if the links are twice as fast.
    """

    links: tuple[Link, ...]
    busy_share: float
    gain: float

    @property
    def name(self) -> str:
        return "nvme, both ways" if self.links == NVME else str(self.links[0])


def what_ifs(spans: Sequence[Span]) -> list[WhatIf]:
    """One entry per link that the step uses, and one for both NVMe links together."""
    seconds, busy = replay(spans, {}), busy_seconds(spans)
    used = [link for link in Link if not link.only_frees and link in busy]
    groups: list[tuple[Link, ...]] = [(link,) for link in used]
    if set(NVME) <= set(used):
        groups.append(NVME)
    length = max(span.end for span in spans)
    return [
        WhatIf(
            links,
            max(busy[link] for link in links) / length,
            (seconds - replay(spans, dict.fromkeys(links, 2.0))) / length,
        )
        for links in groups
    ]


def advice(record: RunRecord, step: TracedStep) -> list[str]:
    """Sentences: what binds the step, what would help, and doubts about the rates."""
    spans = step.measured or step.predicted
    found = what_ifs(spans)
    alone = [one for one in found if len(one.links) == 1]
    binding = max(alone, key=lambda one: one.busy_share)
    best = max(found, key=lambda one: one.gain)
    how = "was" if step.measured else "is planned to be"
    said = [
        f"The {binding.name} link binds: it {how} busy for {binding.busy_share:.0%} of "
        "the step."
        if binding.name != Link.DEVICE
        else f"Computing binds: the device {how} busy for {binding.busy_share:.0%} of "
        "the step."
    ]
    if best.gain < LEAST_GAIN:
        said.append(
            "No link alone holds the step up: each of them, twice as fast, would save "
            f"less than {LEAST_GAIN:.0%}. A larger batch spreads what a step costs "
            "over more tokens."
        )
    else:
        said += _helps(best, record, spans)
    return [*said, *_doubts(record, step)]


def _helps(best: WhatIf, record: RunRecord, spans: Sequence[Span]) -> list[str]:
    link, said = best.links[0], []
    if link in NVME:
        said.append(
            f"Drives twice as fast would take {best.gain:.0%} off the step. Name a "
            "folder on each further drive in memory.nvme: their speeds add up."
        )
        said.append(_room(record, Tier.HOST, "less of the state has to rest on nvme"))
    elif link in COPIES:
        said.append(
            f"A copy link twice as fast ({link}) would take {best.gain:.0%} off the "
            "step."
        )
        said.append(_room(record, Tier.DEVICE, "more stays on the device"))
    elif link == Link.HOST:
        said.append(
            f"Updates on the host twice as fast would take {best.gain:.0%} off the "
            "step: more processor cores, or fewer other programs beside this one."
        )
    else:
        rest = "" if _is_fused(spans) else "; the links keep up with it"
        said.append(
            f"A device twice as fast would take {best.gain:.0%} off the step{rest}."
        )
        if _is_fused(spans) and best.busy_share < BUSY:
            said.append(
                "For the rest of the step the device waits for the batch and for "
                "Python. A larger batch has less of both for each token."
            )
        again = _recomputing(spans)
        if again:
            said.append(
                f"{again:.0%} of its time is backward passes that compute forward "
                "again. "
                + _room(record, Tier.DEVICE, "segments keep residuals instead")
            )
        if record.resolved.get("dtype of computing") == "float32":
            said.append(
                "It computes in float32. With bf16.enabled: true accelerators compute "
                "faster, and half the bytes of parameters move."
            )
    if link != Link.DEVICE:
        said.append(
            "More samples in a step (train_batch_size, or gradient_accumulation_steps) "
            "move the same state for more tokens."
        )
    return said


def _is_fused(spans: Sequence[Span]) -> bool:
    """Whether the step is one executable, so that it never waits for a link."""
    return any(span.kind == "whole step" for span in spans)


def _room(record: RunRecord, tier: Tier, gain: str) -> str:
    held = record.held[tier]
    share = held.peak / held.budget if held.budget else 1.0
    used = f"{show_bytes(held.peak)} of {show_bytes(held.budget)} are planned for"
    if share >= FULL:
        return f"The {tier} budget is full ({used}): raise memory.{tier}, and {gain}."
    return (
        f"The {tier} budget is not full ({used}), so a larger memory.{tier} changes "
        "little."
    )


def _recomputing(spans: Sequence[Span]) -> float:
    """Share of the device's busy time that is spent in backward passes with remat."""
    times: dict[str, float] = {}
    for span in spans:
        if span.link == Link.DEVICE:
            times[span.kind] = times.get(span.kind, 0.0) + span.end - span.start
    return times.get("backward", 0.0) / (sum(times.values()) or 1.0)


def _doubts(record: RunRecord, step: TracedStep) -> list[str]:
    if _is_fused(step.predicted):
        # The remedy for doubtful rates is zinf bench step, which measures links; a
        # fused step uses none.
        return []
    predicted = max(span.end for span in step.predicted)
    if not step.measured:
        if record.has_measured_rates:
            return []
        return [
            "The plan goes by fixed rates, not by those of this machine. Unless the "
            "config sets rates, zinf train measures them before its first step; zinf "
            "bench step CONFIG writes a file of them for the config's key rates."
        ]
    measured = max(span.end for span in step.measured)
    error = predicted / measured - 1
    if abs(error) < LARGEST_ERROR or record.has_measured_rates:
        return []
    return [
        f"The plan predicted {show_seconds(predicted)}, {abs(error):.0%} "
        f"{'more' if error > 0 else 'less'} than measured, by fixed rates. zinf bench "
        "step CONFIG measures those of this machine; name its file in the config's key "
        "rates, and plans are chosen by them."
    ]
