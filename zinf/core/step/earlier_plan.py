"""What an earlier start chose for the same step, so that the search need not run again.

A file has the choices (homes, options, which residuals are kept), and not the plan. The
plan is built from them as the search builds it, and proved as every plan. It is the one
that the search would find, because the file's name is a digest of all that the search
reads. A file that is damaged, or whose choices give another plan than was found then,
is not used, and written anew.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zinf.core.plan import (
    Arrangement,
    Catalog,
    Choices,
    InfeasibleError,
    Resident,
    StepOptions,
    arrange,
)
from zinf.core.plan.choose import UnitsFor
from zinf.core.process.compile_cache import machine_digest, starts_folder
from zinf.core.process.user_cache import recall, remember
from zinf.core.program import ArrayId, Tier
from zinf.core.segment import Segment
from zinf.core.step.updates import Updates

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# The options that the search chooses: tiers, and others.
TIERS = ("value_tier", "gradient_tier", "update_tier")
OTHERS = ("turns", "num_kept", "gradients_by_row")
# What the drive can hold at once is below this many times the bytes of all arrays: one
# copy of each, gradients in float32 and values of each microbatch among them.
AMPLE = 4


@dataclass(frozen=True)
class Step:
    """A step whose arrangement is searched.

    Attributes:
        catalog: its homes are those where arrays rest; empty if they are placed.
        residents: the arrays that are placed; empty if they rest somewhere.
    """

    catalog: Catalog
    residents: Sequence[Resident]
    units_for: UnitsFor
    capacity_bytes: Mapping[Tier, int]
    options: StepOptions
    choices: Choices


@dataclass(frozen=True)
class EarlierPlan:
    """The place of the choices for one step.

    Attributes:
        folder: None keeps nothing.
    """

    folder: Path | None = None
    key: str = ""

    def then(self, *parts: Any) -> "EarlierPlan":
        """A place of choices for the same step with further inputs, `parts`."""
        return replace(self, key=_digest([self.key, *map(repr, parts)]))

    def arranged(self, step: Step, search: Callable[[], Arrangement]) -> Arrangement:
        """The arrangement chosen earlier, or else the one that `search` finds.

        Raises:
            InfeasibleError: no plan fits.
        """
        if self.folder is None:
            return search()
        file = self.folder / f"plan-{self.key[:32]}.json"
        found = _built(recall(file), step)
        if found is None:
            found = search()
            remember(file, _written(found, step))
        return found


def earlier_plan(
    step: Step, segments: Sequence[Segment], updates: Updates, *, mesh: Any
) -> EarlierPlan:
    """The place of the choices for a step, by all that a search for them reads.

    A plan does not depend on the bytes of a drive that has room for everything.
    """
    folder = starts_folder()
    if folder is None:
        return EarlierPlan()
    capacity = dict(step.capacity_bytes)
    most = AMPLE * _most_bytes(step)
    ample = {t: "ample" for t in Tier if not t.row.is_memory and capacity[t] >= most}
    fields = {f: getattr(step.catalog, f) for f in Catalog.__dataclass_fields__}
    choices = {f: getattr(step.choices, f) for f in Choices.__dataclass_fields__}
    choices["keepings"] = len(step.choices.keepings)
    updated = (
        (update, tier, updates.workspace_bytes(update, tier), updates.exchanges[update])
        for tier, steps in updates.steps.items()
        for update in steps
    )
    key = _digest(
        map(
            repr,
            [
                machine_digest(mesh),
                fields,
                step.catalog.program.values,
                list(step.residents),
                capacity | ample,
                step.options,
                choices,
                updates.arrays,
                updates.unit_bytes,
                *updated,
                *_bodies(segments),
            ],
        )
    )
    return EarlierPlan(folder, key)


def _bodies(segments: Sequence[Segment]) -> Iterator[str]:
    """The code of the segments, which decides what residuals they may keep."""
    seen: set[int] = set()
    for segment in segments:
        executables = segment.executables
        if id(executables) not in seen:
            seen.add(id(executables))
            code = ADDRESS.sub("", str(executables.body.jaxpr))
            yield f"{code} {executables.params} {executables.inputs}"


def _most_bytes(step: Step) -> int:
    catalog, each = step.catalog, step.options.num_microbatches
    at_rest = sum(spec.nbytes for spec in catalog.specs.values())
    values = sum(spec.nbytes for spec in catalog.program.values.values())
    return at_rest + each * values


def _digest(parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode(errors="surrogatepass") + b"\0")
    return digest.hexdigest()


def _arrays(catalog: Catalog) -> list[ArrayId]:
    """The arrays that have homes, in an order that is the same at each start."""
    return list(dict.fromkeys([*catalog.specs, *catalog.homes]))


def _written(arranged: Arrangement, step: Step) -> dict[str, Any]:
    """The choices of an arrangement, and figures of its plan, as JSON."""
    number = {array: i for i, array in enumerate(_arrays(step.catalog))}
    homes = arranged.catalog.homes.items()
    options = arranged.options
    chosen = {name: str(getattr(options, name)) for name in TIERS}
    chosen |= {name: getattr(options, name) for name in OTHERS}
    return {
        "homes": [[number[array], str(tier)] for array, tier in homes],
        "options": chosen | {"deferred": sorted(options.deferred)},
        "kept": _kept(arranged.catalog),
        "figures": _figures(arranged),
    }


def _kept(catalog: Catalog) -> dict[str, Any] | None:
    """The residuals that may be kept: the bytes of the largest, and a digest of all."""
    if not catalog.keeping:
        return None
    most = max(keeping.nbytes for keeping in catalog.keeping.values())
    ordered = sorted(catalog.keeping.items())
    return {"most_bytes": most, "digest": _digest([repr(ordered)])}


def _figures(arranged: Arrangement) -> list[Any]:
    """Numbers by which plans are compared: instructions, seconds, bytes by tier."""
    plans = [arranged.plan, arranged.first, arranged.flush]
    return [
        [
            len(plan.instructions),
            plan.timeline.seconds,
            *(
                {str(t): n for t, n in x.items()}
                for x in (plan.home_bytes, plan.peak_bytes)
            ),
        ]
        for plan in plans
        if plan is not None
    ]


def _built(written: Any, step: Step) -> Arrangement | None:
    """The arrangement that a file describes; None if it no longer fits the step."""
    if written is None:
        return None
    arrays = _arrays(step.catalog)
    homes = {arrays[i]: Tier(tier) for i, tier in written["homes"]}
    given, kept = written["options"], written["kept"]
    chosen: dict[str, Any] = {name: Tier(given[name]) for name in TIERS}
    chosen |= {name: given[name] for name in OTHERS}
    options = replace(step.options, **chosen, deferred=frozenset(given["deferred"]))
    at_home = replace(step.catalog, homes=homes)
    found = (x for x in _keeping(at_home, step, kept) if _kept(x) == kept)
    catalog = next(found, None)
    if catalog is None:
        return None
    try:
        built = arrange(catalog, step.units_for, step.capacity_bytes, options)
    except InfeasibleError:
        return None
    return built if _figures(built) == written["figures"] else None


def _keeping(
    catalog: Catalog, step: Step, kept: Mapping[str, Any] | None
) -> Iterator[Catalog]:
    """The catalog, then with each choice of residuals of at most `most_bytes`."""
    yield catalog
    if kept is not None:
        for keeping_in in step.choices.keepings:
            yield replace(catalog, keeping=keeping_in(kept["most_bytes"]))
