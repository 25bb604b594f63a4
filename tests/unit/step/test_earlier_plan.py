"""The next start of the same step does not search for its plan, and has the same."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import optax
import pytest

from tests.equivalence.models import PYTREE
from tests.equivalence.training import streamed_config
from zinf.core.machine.rates_file import save_rates
from zinf.core.plan import Rates
from zinf.core.process import compile_cache
from zinf.core.program import Tier
from zinf.core.step import earlier_plan, setup
from zinf.core.step.batch import batch_spec
from zinf.core.step.planner import Planner
from zinf.core.step.run import streamed
from zinf.core.step.run.streamed import Streamed

SPEC = batch_spec(PYTREE.batches(1)[0], 1)
ADAM = optax.adam(1e-3)
NVME, HOST = ("nvme", "nvme"), ("cpu", "cpu")
# A device so slow that residuals are saved; a drive so slow that updates are deferred.
SLOW_DEVICE = replace(Rates(), flops_per_second=1e3)
SLOW_DRIVE = Rates().on_drive(1e7, 1e7)


def start(folder: Path, tiers: tuple[str, str] = NVME, **settings: Any) -> Planner:
    """The planner of a new start."""
    tx = settings.pop("tx", ADAM)
    config = streamed_config(tiers, str(folder / "tier"))
    config["memory"] |= {"nvme": [str(folder / "tier")], "nvme_capacity": "1GiB"}
    config["memory"] |= settings.pop("memory", {})
    config |= {"segment": {"remat": "auto"}, **settings}
    return PYTREE.start(tx, config).planner


class Searches(NamedTuple):
    """One item for each search so far."""

    placed: list[str]
    retimed: list[str]

    @property
    def counts(self) -> tuple[int, int]:
        return len(self.placed), len(self.retimed)


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> Searches:
    found = Searches([], [])

    def counted(module: Any, name: str, calls: list[str]) -> Callable[..., Any]:
        search = getattr(module, name)

        def call(*arguments: Any) -> Any:
            calls.append(name)
            return search(*arguments)

        return call

    placed = counted(setup, "build_placed", found.placed)
    make = Planner.__init__
    monkeypatch.setattr(
        Planner,
        "__init__",
        lambda self, *some, **named: make(
            self, *some, **{"build_placed": placed, **named}
        ),
    )
    retimed = counted(streamed, "retimed", found.retimed)
    monkeypatch.setattr(streamed, "retimed", retimed)
    return found


def content(made: Any) -> list[Any]:
    """All of a plan, and what it was built from."""
    assert isinstance(made, Streamed)
    arranged = made.arranged
    plans = [arranged.plan, arranged.first, arranged.flush]
    return [
        [None if plan is None else plan.instructions for plan in plans],
        plans,
        arranged.options,
        arranged.pending,
        arranged.units,
        dict(arranged.catalog.homes),
        dict(arranged.catalog.keeping),
        [segment.is_selective for segment in made.segments],
    ]


CASES: dict[str, tuple[tuple[str, str], Rates, dict[str, Any]]] = {
    "residuals": (NVME, Rates(), {"gradient_clipping": 0.05}),
    "deferred": (NVME, SLOW_DRIVE, {"gradient_clipping": 0.05}),
    "microbatches": (HOST, SLOW_DEVICE, {"gradient_accumulation_steps": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_second_start_searches_no_plan_and_has_the_same(
    case: str, starts: Path, tmp_path: Path, searches: Searches
) -> None:
    """Neither before the rates are measured nor with these rates."""
    tiers, rates, settings = CASES[case]
    if case == "residuals":
        save_rates(SLOW_DEVICE, tmp_path / "rates.json", "of no machine")
        settings = {**settings, "rates": str(tmp_path / "rates.json")}
    num_microbatches = settings.get("gradient_accumulation_steps", 1)
    spec = batch_spec(PYTREE.batches(1, num_microbatches)[0], num_microbatches)

    def plan() -> Streamed:
        made = start(tmp_path, tiers, **settings)
        found = replace(made, measure=lambda *_: rates).plan(spec)
        assert isinstance(found, Streamed)
        return found

    first = plan()
    assert (first.arranged.options.num_kept > 0) == (case == "residuals")
    assert bool(first.arranged.options.deferred) == (case == "deferred")
    assert searches.counts == (1, 1)
    assert content(plan()) == content(first)
    assert searches.counts == (1, 1)
    for file in starts.iterdir():
        file.unlink()
    assert content(plan()) == content(first)
    assert searches.counts == (2, 2)


def test_another_step_machine_or_zinf_is_searched_anew(
    starts: Path,
    tmp_path: Path,
    searches: Searches,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"memory": {"device": "64MiB"}},
        {"memory": {"host": "64MiB"}},
        {"memory": {"nvme_capacity": "32KiB"}},
        {"gradient_clipping": 0.1},
        {"tx": optax.sgd(0.1, momentum=0.9)},
        {"persistence_threshold": 64},
        {"segment": {"remat": "always"}},
    )
    for count, change in enumerate(changes, start=1):
        for _ in range(2):
            start(tmp_path, **change).plan(SPEC)
            assert searches.counts == (count, 0), change
    others: dict[str, Any] = {"own_digest": lambda: "", "processor": lambda: ""}
    for count, name in enumerate(others, start=len(changes) + 1):
        with monkeypatch.context() as other:
            other.setattr(compile_cache, name, others[name])
            start(tmp_path).plan(SPEC)
        assert searches.counts == (count, 0), name


def test_a_drive_with_room_for_everything_may_have_more_or_less(
    starts: Path,
    tmp_path: Path,
    searches: Searches,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its free bytes are others at each start."""
    for free in (1 << 40, 1 << 41):
        monkeypatch.setattr(
            "zinf.core.machine.resources.nvme_capacity_bytes", lambda paths, n=free: n
        )
        made = start(tmp_path, memory={"nvme_capacity": None}).plan(SPEC)
        assert made.plan.capacity_bytes[Tier.NVME] == free
    assert searches.counts == (1, 0)


def damages(text: str) -> list[str]:
    moved, unsigned = json.loads(text), json.loads(text)
    moved["content"]["homes"][0][1] = "device"
    unsigned["sha256"] = ""
    others = ["", "[]", "null", "{}", "1" * 9999, "[" * 9999, text[:-9]]
    return [*others, json.dumps(moved), json.dumps(unsigned)]


def test_a_damaged_file_is_not_used_and_written_anew(
    starts: Path, tmp_path: Path, searches: Searches
) -> None:
    planned = start(tmp_path)
    first = content(planned.plan(SPEC))
    (file,) = starts.iterdir()
    text = file.read_text()
    for count, damaged in enumerate(damages(text), start=2):
        file.write_text(damaged)
        assert content(planned.plan(SPEC)) == first
        assert (len(searches.placed), file.read_text()) == (count, text), damaged
    file.unlink()
    file.mkdir()  # So it cannot be written.
    assert content(planned.plan(SPEC)) == first
    assert list(starts.iterdir()) == [file]


def test_choices_that_give_another_plan_than_then_are_not_used(
    starts: Path,
    tmp_path: Path,
    searches: Searches,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if the digest had left out something that the search reads."""
    monkeypatch.setattr(earlier_plan, "_digest", lambda parts: "the same")
    for count, settings in enumerate(({}, {"gradient_clipping": 0.05}), start=1):
        start(tmp_path, **settings).plan(SPEC)
        assert searches.counts == (count, 0)
