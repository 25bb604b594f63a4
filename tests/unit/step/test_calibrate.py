"""Rates are measured on a few instructions of a plan; they change no bit, no home."""

from collections import Counter
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from tests.equivalence.models import LINEN, NNX, PYTREE, Model
from tests.equivalence.training import OPTIMIZERS, SETTINGS, streamed_config
from tests.marks import slow
from zinf import Engine
from zinf.core.machine.rates_file import save_rates
from zinf.core.memory import open_stores
from zinf.core.plan import (
    Instruction,
    Link,
    Plan,
    Rates,
    Run,
    SumSquares,
    Timeline,
    Transfer,
    Update,
)
from zinf.core.plan.instruction import FusedStep
from zinf.core.process.user_cache import recall
from zinf.core.program import ArrayId, Role, Tier
from zinf.core.step.batch import batch_spec
from zinf.core.step.run import calibrate
from zinf.core.step.run.calibrate import (
    REMEMBERED_SECONDS,
    StepsBesideRates,
    free_copies,
    measure_rates,
    said_of_rates,
    samples,
)
from zinf.core.step.run.run import StepRecord

NUM_STEPS = 4
SPEC = batch_spec(PYTREE.batches(1)[0], 1)


def engine(
    folder: Path, tiers: tuple[str, str] = ("nvme", "nvme"), **settings: Any
) -> Engine:
    config = streamed_config(tiers, str(folder))
    config |= {"gradient_clipping": 0.05, "segment": {"remat": "auto"}, **settings}
    return PYTREE.start(OPTIMIZERS["adam"], config)


def losses(made: Engine) -> list[float]:
    batches = PYTREE.batches(NUM_STEPS)
    found = [made.step(batch)["loss"] for batch in batches]
    made.close()
    return found


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """The most bytes of each tier while rates are measured."""
    found: Counter = Counter()
    run_alone = calibrate.run_alone

    def note(*arguments: Any) -> None:
        run_alone(*arguments)
        stores = arguments[3]
        for tier in stores.tiers:
            found[tier] = max(found[tier], stores.peak_bytes(tier))

    monkeypatch.setattr(calibrate, "run_alone", note)
    monkeypatch.setattr(calibrate, "FOUND", {})
    return found


def test_measuring_changes_no_loss_and_no_home(tmp_path: Path, peaks: Counter) -> None:
    plain = engine(tmp_path / "plain")
    timed = engine(tmp_path / "timed")
    assert timed.planner.measure is None
    timed.planner = replace(timed.planner, measure=measure_rates)
    for each in (plain, timed):
        each.prepare(PYTREE.batches(1)[0])
    assert timed.plan.homes == plain.plan.homes
    assert timed.plan.rates != plain.plan.rates
    # Its folders are gone, and so is all that it held.
    assert {x.name for x in tmp_path.iterdir()} == {"plain", "timed"}
    assert losses(timed) == losses(plain)
    assert peaks[Tier.NVME] > 0


@pytest.mark.parametrize(
    ("tiers", "variant"),
    [(("none", "none"), "plain"), slow((("none", "nvme"), "fp16"))],
)
def test_state_may_rest_anywhere_and_be_updated_in_place(
    tiers: tuple[str, str], variant: str, tmp_path: Path, peaks: Counter
) -> None:
    with engine(tmp_path, tiers, rates="measured", **SETTINGS[variant]) as made:
        assert made.planner.measure is measure_rates
        made.prepare(PYTREE.batches(1)[0])
    assert peaks


@pytest.mark.parametrize("model", [LINEN, NNX], ids=lambda model: model.name)
def test_engines_of_any_framework_measure_if_asked_to(
    model: Model, tmp_path: Path
) -> None:
    """`zinf.hf` likewise: `tests/unit/hf/test_model.py`."""
    for rates, measure in (("measured", measure_rates), ("fixed", None)):
        config = streamed_config(("none", "none"), str(tmp_path)) | {"rates": rates}
        with model.start(OPTIMIZERS["adam"], config) as made:
            assert made.planner.measure is measure


def test_residuals_are_saved_by_fixed_rates_or_those_of_a_file(tmp_path: Path) -> None:
    """They may round differently, so that a run has to save the same ones each time."""
    slow = replace(Rates(), flops_per_second=1e3)
    save_rates(slow, tmp_path / "rates.json", "of no machine")
    planner = engine(tmp_path / "nvme").planner
    by_file = engine(tmp_path / "nvme", rates=str(tmp_path / "rates.json")).planner
    fixed, measured, of_file = (
        each.plan(SPEC)
        for each in (planner, replace(planner, measure=lambda *_: slow), by_file)
    )
    assert measured.plan.rates == of_file.plan.rates == slow
    assert of_file.arranged.options.num_kept > 0
    assert measured.arranged.options.num_kept == 0
    assert fixed.arranged.options.num_kept == 0


def test_it_holds_no_more_than_the_plan_does(tmp_path: Path, peaks: Counter) -> None:
    peak = engine(tmp_path / "ample").planner.plan(SPEC).plan.peak_bytes
    budgets = {"device": peak[Tier.DEVICE], "host": peak[Tier.HOST]}
    tight = engine(tmp_path / "tight", memory={"nvme": [str(tmp_path)], **budgets})
    plan = replace(tight.planner, measure=measure_rates).plan(SPEC).plan
    for tier in Tier:
        assert 0 < peaks[tier] <= plan.capacity_bytes[tier]


def test_each_kind_of_work_is_measured_and_is_so_once_in_a_process(
    tmp_path: Path, peaks: Counter
) -> None:
    planner = engine(tmp_path).planner
    made = planner.plan(SPEC)
    chosen = [x for some in samples(made.plan) for x in some]
    links = {x.link for x in chosen if isinstance(x.operation, Transfer)}
    assert links == {Link.NVME_READ, Link.NVME_WRITE, Link.H2D, Link.D2H}
    kinds = {type(x.operation) for x in chosen}
    assert kinds == {Transfer, Update, Run, SumSquares}
    rates, assumed = measure_rates(made, planner, SPEC), made.plan.rates
    assert peaks
    assert rates.flops_per_second != assumed.flops_per_second
    # No update runs on the device, so that rate stays.
    pairs = [x.update_bytes_per_second for x in (rates, assumed)]
    assert {t for t in pairs[0] if pairs[0][t] != pairs[1][t]} == {Tier.HOST}
    peaks.clear()
    assert measure_rates(made, planner, SPEC) == rates
    assert not peaks


@pytest.fixture
def restart(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Forgets all that this process knows of rates, as a new process does."""

    def forget() -> None:
        monkeypatch.setattr(calibrate, "FOUND", {})
        monkeypatch.setattr(calibrate, "_KNOWN", {})

    return forget


def test_the_next_start_measures_nothing_within_a_week(
    tmp_path: Path,
    peaks: Counter,
    starts: Path,
    restart: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planner = engine(tmp_path).planner
    made = planner.plan(SPEC)
    (plan,) = starts.iterdir()

    def start() -> tuple[Rates, bool]:
        """The rates, and whether they were measured."""
        restart()
        peaks.clear()
        rates = measure_rates(made, planner, SPEC)
        said = said_of_rates(replace(made.plan, rates=rates))
        assert bool(said) != bool(peaks)
        return rates, bool(peaks)

    first, is_measured = start()
    assert is_measured and start() == (first, False)
    (file,) = set(starts.iterdir()) - {plan}
    for damaged in ("", "[]", file.read_text().replace("1", "2", 1)):
        file.write_text(damaged)
        assert start()[1] and not start()[1]
    others: dict[str, Any] = {
        "machine_digest": lambda mesh: "another",
        "_drive": lambda path: "another",
    }
    for name, value in others.items():
        with monkeypatch.context() as other:
            other.setattr(calibrate, name, value)
            assert start()[1] and not start()[1]
    measured_at = recall(file)["at"]
    for seconds, is_too_old in ((REMEMBERED_SECONDS - 1, False), (-1, True)):
        monkeypatch.setattr(calibrate, "time", lambda s=seconds: measured_at + s)
        assert start()[1] == is_too_old
    later = measured_at + 2 * REMEMBERED_SECONDS
    monkeypatch.setattr(calibrate, "time", lambda: later)
    assert start()[1] and not start()[1]


@pytest.mark.parametrize(
    ("part", "is_forgotten"), [(0.7, True), (0.9, False), (1.2, False), (1.3, True)]
)
def test_rates_that_steps_show_to_be_off_are_forgotten(
    part: float, is_forgotten: bool, tmp_path: Path
) -> None:
    """The first step does not count, nor does one that is far off among three."""
    file = tmp_path / "rates"
    file.touch()
    rates = replace(Rates(), flops_per_second=part)
    plan = Plan(
        (Instruction(FusedStep(), Link.DEVICE, (), flops=1),), {}, {}, {}, {}, rates
    )
    calibrate._KNOWN[repr(rates)] = calibrate._Known(rates, file, 0.0)
    steps = StepsBesideRates()
    for step in (9.0, part, 99.0, part):
        assert file.exists()
        took = Timeline((0.0,), (step * plan.timeline.seconds,))
        steps.see(StepRecord(plan=plan, timeline=took))
    assert file.exists() != is_forgotten


def test_rows_of_an_array_that_is_there_whole_are_freed_with_it() -> None:
    """As of a parameter whose first update makes it, and writes some of its rows."""
    whole = ArrayId(Role.PARAM, "kernel")
    rows = ArrayId(Role.PARAM, "kernel", (0, 2))
    one_device = jax.devices()[:1]
    with closing(open_stores(one_device, capacity_bytes={Tier.HOST: 96})) as stores:
        for array, count in ((rows, 2), (whole, 4)):
            stores[Tier.HOST].write(array, np.zeros((count, 4), np.float32)).result()
            free_copies(stores, [(rows, Tier.HOST)])
            assert stores[Tier.HOST].contains(array) == (array == whole)
        free_copies(stores, [(rows, Tier.HOST), (whole, Tier.HOST)])
        assert not stores[Tier.HOST].ledger.used_bytes


def test_rates_are_those_of_the_mix_of_instructions_that_a_plan_has(monkeypatch):
    """Nine transfers of 10 bytes take a second each, and one of 100 takes two."""
    kinds = {10: 9, 100: 1}
    small, large = (
        Instruction(Transfer((), Tier.HOST, Tier.DEVICE), Link.H2D, (), nbytes=nbytes)
        for nbytes in kinds
    )
    took = {10: 1.0, 100: 2.0}
    bench = SimpleNamespace(seconds=lambda some: [took[x.nbytes] for x in some])
    monkeypatch.setattr(calibrate, "_bench", lambda *_: nullcontext(bench))
    made = SimpleNamespace(plan=SimpleNamespace(rates=Rates(overhead_seconds=0.0)))
    counts = {calibrate._kind(x): kinds[x.nbytes] for x in (small, large)}
    found = calibrate._measured([(small,), (large,)], counts, made, None, None)
    assert found.link_bytes_per_second[Link.H2D] == (9 * 10 + 100) / (9 * 1 + 2)
