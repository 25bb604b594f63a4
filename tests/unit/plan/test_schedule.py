"""The order of computation: nothing of it depends on where arrays rest."""

from dataclasses import replace

import pytest

from tests.toy.program import Layer, LeafCase, Toy, chain, make_toy
from zinf.plan import (
    Accumulate,
    Decide,
    Pass,
    Run,
    StepOptions,
    SumSquares,
    Transfer,
    Update,
    value,
)
from zinf.plan.job import Job
from zinf.plan.schedule import schedule, schedule_forward
from zinf.program import ArrayId, ArraySpec, Role, RowSum, Tier, Tiling

TIED = make_toy(
    [LeafCase("w")],
    [
        Layer("first", (ArrayId(Role.PARAM, "w"),), ("batch/x",), ("x",)),
        Layer("last", (ArrayId(Role.PARAM, "w"),), ("x",), ()),
    ],
    is_mixed=False,
)


def jobs_of(
    toy: Toy,
    *,
    param: Tier = Tier.NVME,
    state: Tier = Tier.NVME,
    microbatches: int = 1,
    in_backward: bool = True,
    value_tier: Tier = Tier.DEVICE,
    gradient_tier: Tier = Tier.HOST,
) -> list[Job]:
    homes = toy.homes(param, state)
    catalog = toy.catalog(homes, num_microbatches=microbatches)
    options = StepOptions(microbatches, in_backward, value_tier, gradient_tier)
    return schedule(catalog, toy.units(homes), options)


def runs(jobs: list[Job]) -> list[tuple[str, Pass, int]]:
    found = [j.operation for j in jobs if isinstance(j.operation, Run)]
    return [(r.name, r.kind, r.microbatch) for r in found]


def landed(jobs: list[Job]) -> list[Role]:
    """The role under which each pass writes a parameter's gradient."""
    written = [a for j in jobs if isinstance(j.operation, Run) for a, _ in j.writes]
    return [a.role for a in written if a.lies_as.role == Role.GRADIENT]


def words(jobs: list[Job], *kinds: type) -> list[str]:
    return [str(j.operation) for j in jobs if isinstance(j.operation, kinds)]


def test_all_microbatches_go_through_a_segment_before_the_next() -> None:
    assert runs(jobs_of(chain(3), microbatches=2)) == [
        ("layer0", Pass.FORWARD, 0),
        ("layer0", Pass.FORWARD, 1),
        ("layer1", Pass.FORWARD, 0),
        ("layer1", Pass.FORWARD, 1),
        ("layer2", Pass.LOSS, 0),
        ("layer2", Pass.LOSS, 1),
        ("layer1", Pass.BACKWARD, 0),
        ("layer1", Pass.BACKWARD, 1),
        ("layer0", Pass.BACKWARD, 0),
        ("layer0", Pass.BACKWARD, 1),
    ]


@pytest.mark.parametrize("state", list(Tier))
@pytest.mark.parametrize("value_tier", list(Tier))
def test_placement_does_not_change_the_order(state: Tier, value_tier: Tier) -> None:
    toy = chain(3)
    expected = runs(jobs_of(toy, microbatches=2))
    jobs = jobs_of(toy, state=state, value_tier=value_tier, microbatches=2)
    assert runs(jobs) == expected


def test_gradients_accumulate_in_the_order_of_microbatches() -> None:
    jobs = jobs_of(chain(1), microbatches=3)
    kinds = [j.operation for j in jobs if isinstance(j.operation, Run | Accumulate)]
    # The first is the sum's own beginning, the others are added to it one by one.
    assert landed(jobs) == ["gradient", "gradient part", "gradient part"]
    assert [type(k) for k in kinds] == [Run, Run, Accumulate, Run, Accumulate]


def test_a_narrow_gradient_is_widened_before_anything_is_added() -> None:
    jobs = jobs_of(chain(1, is_mixed=True), microbatches=2)
    assert set(landed(jobs)) == {"gradient part"}
    sums = [j for j in jobs if isinstance(j.operation, Accumulate)]
    target = (ArrayId(Role.GRADIENT, "layer0/w"), Tier.DEVICE)
    assert [target in job.reads for job in sums] == [False, True]


def test_a_tied_parameter_is_complete_after_the_first_of_its_segments() -> None:
    jobs = jobs_of(TIED)
    order = words(jobs, Run, Accumulate, SumSquares, Update)
    assert order == [
        "forward first @0",
        "loss last @0",
        "backward first @0",
        "accumulate gradient/w",
        "norm gradient/w",
        "update first",
    ]


@pytest.mark.parametrize("param", [Tier.DEVICE, Tier.HOST])
@pytest.mark.parametrize("is_tiled", [False, True])
def test_the_gradient_of_a_tied_tile_waits_on_the_host(is_tiled, param) -> None:
    tiling = Tiling("w", 4, 4, (0, 1))
    tilings = (tiling,) if is_tiled else ()
    toy = replace(TIED, program=replace(TIED.program, tilings=tilings))
    order = words(jobs_of(toy, param=param, microbatches=2), Run, Transfer)
    gone = ["offload gradient/w"] if is_tiled and param != Tier.DEVICE else []
    start = order.index("loss last @1")
    passes = ["backward first @0", "backward first @1"]
    moves = [w for w in order[start + 1 :] if w in (*gone, *passes)]
    assert moves[: 1 + len(gone)] == [*gone, passes[0]]


def test_a_gradient_that_is_left_as_rows_is_added_to_what_there_is() -> None:
    rows, numbers = ArraySpec((2, 64), "f4", 4), ArraySpec((2, 1), "i4", 4)
    row_sum = RowSum(ArrayId(Role.PARAM, "w"), rows, numbers)
    segments = list(TIED.program.segments)
    segments[0] = replace(segments[0], row_sums=(row_sum,))
    toy = replace(TIED, program=replace(TIED.program, segments=tuple(segments)))
    jobs = jobs_of(toy, microbatches=2)
    homes = toy.homes(Tier.NVME, Tier.NVME)
    catalog = toy.catalog(homes, num_microbatches=2)
    adds = [j for j in jobs if isinstance(j.operation, Accumulate)]
    gradient = ArrayId(Role.GRADIENT, "w")
    # The second microbatch of the last segment, then both of the first.
    assert [bool(j.operation.row_numbers) for j in adds] == [False, True, True]
    for m, job in enumerate(adds[1:]):
        left = catalog.row_sum(0, 0, m)
        assert job.operation == Accumulate((gradient,), left[:1], (left,))
        assert job.writes == ((gradient, Tier.DEVICE),)
        # Rows by number, their sums, and the sums in float32.
        assert job.workspace == ((Tier.DEVICE, 3 * rows.nbytes),)
        copies = {(array, Tier.DEVICE) for array in left}
        (made,) = [j for j in jobs if copies & {*j.writes}]
        assert copies <= {*made.writes}
    assert [catalog.nbytes(a) for a in left] == [rows.nbytes, numbers.nbytes]


def test_cotangents_of_a_value_that_two_segments_read_add_up() -> None:
    leaves = [LeafCase(f"w{i}") for i in range(3)]
    layers = [
        Layer("s0", (ArrayId(Role.PARAM, "w0"),), ("batch/x",), ("x",)),
        Layer("s1", (ArrayId(Role.PARAM, "w1"),), ("x",), ("y",)),
        Layer("s2", (ArrayId(Role.PARAM, "w2"),), ("x", "y"), ()),
    ]
    jobs = jobs_of(make_toy(leaves, layers))
    assert "accumulate cotangent/x@0" in words(jobs, Accumulate)


def test_an_update_follows_its_own_gradient_when_nothing_holds_it_back() -> None:
    order = words(jobs_of(chain(3)), Run, Update, Decide)
    assert order[3:] == [
        "decide on the update: loss",
        "update layer2",
        "backward layer1 @0",
        "update layer1",
        "backward layer0 @0",
        "update layer0",
        "decide on the update: gradient norm",
    ]


def test_gradients_wait_on_the_device_for_the_updates_of_their_rows() -> None:
    toy = chain(1, leaf=LeafCase("w", 4, 8), block_rows=2, is_fine=True)
    homes = toy.homes(Tier.NVME, Tier.NVME)
    options = StepOptions(1, True, Tier.DEVICE, Tier.HOST, gradients_by_row=True)
    jobs = schedule(toy.catalog(homes), toy.units(homes), options)
    start = words(jobs, Run, Update, Transfer).index("update layer0")
    assert words(jobs, Run, Update, Transfer)[start - 1 : start + 4] == [
        "offload gradient/layer0/w[0:2]",
        "update layer0",
        "offload param/layer0/w[0:2] +2",
        "offload gradient/layer0/w[2:4]",
        "update layer0",
    ]
    whole = ArrayId(Role.GRADIENT, "layer0/w")
    assert not any((whole, Tier.HOST) in (*j.reads, *j.writes) for j in jobs)
    # Taking rows makes an array of them on the device first.
    (rows, *_) = [j for j in jobs if str(j.operation).endswith("layer0/w[0:2]")]
    assert rows.workspace == ((Tier.DEVICE, 4 * 2 * 8),)


def test_updates_on_the_device_have_no_rows_come_to_the_host() -> None:
    toy = chain(1, leaf=LeafCase("w", 4, 8), block_rows=1, is_fine=True)
    homes = toy.homes(Tier.NVME, Tier.NVME)
    units = [
        replace(unit, tier=Tier.DEVICE) if number % 2 else unit
        for number, unit in enumerate(toy.units(homes))
    ]
    options = StepOptions(1, True, Tier.DEVICE, Tier.HOST, gradients_by_row=True)
    jobs = schedule(toy.catalog(homes), units, options)
    moved = [w for w in words(jobs, Transfer) if w.startswith("offload gradient")]
    assert moved == [f"offload gradient/layer0/w[{i}:{i + 1}]" for i in (0, 2)]


def test_updates_wait_for_the_norm_of_the_whole_gradient_when_it_decides() -> None:
    order = words(jobs_of(chain(3), in_backward=False), Run, Update, Decide)
    assert order[3:] == [
        "backward layer1 @0",
        "backward layer0 @0",
        "decide on the update: gradient norm",
        "update layer2",
        "update layer1",
        "update layer0",
    ]


def test_the_decision_reads_every_loss_and_every_norm() -> None:
    jobs = jobs_of(chain(2), microbatches=2, in_backward=False)
    (decision,) = (j for j in jobs if isinstance(j.operation, Decide))
    losses = tuple(value("out/0", m) for m in range(2))
    norms = tuple(ArrayId(Role.NORM, f"layer{k}") for k in (1, 0))
    assert decision.operation == Decide(losses, norms)
    assert decision.reads == tuple((a, Tier.HOST) for a in (*losses, *norms))


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
def test_values_are_offloaded_as_soon_as_they_are_made(tier: Tier) -> None:
    jobs = jobs_of(chain(2), value_tier=tier)
    first = next(i for i, j in enumerate(jobs) if isinstance(j.operation, Run))
    tiers = list(Tier)
    hops = [Tier.DEVICE, *tiers[1 : tiers.index(tier) + 1]]
    for offset, (source, target) in enumerate(zip(hops, hops[1:], strict=False), 1):
        expected = Transfer((value("layer0.0", 0),), source, target)
        assert jobs[first + offset].operation == expected


def test_gradients_go_to_the_host_only_if_they_are_updated_there() -> None:
    on_host = words(jobs_of(chain(2)), Transfer)
    assert "offload norm/layer1 +1" in on_host  # the norm and the gradient
    on_device = words(jobs_of(chain(2), param=Tier.DEVICE, state=Tier.DEVICE), Transfer)
    assert "offload norm/layer1" in on_device


def test_complete_gradients_wait_on_nvme_only_if_updates_are_late() -> None:
    def to_nvme(**options: object) -> list[str]:
        jobs = jobs_of(chain(2), gradient_tier=Tier.NVME, **options)
        return [
            str(j.operation)
            for j in jobs
            if isinstance(j.operation, Transfer)
            and j.operation.target == Tier.NVME
            and j.operation.arrays[0].role == Role.GRADIENT
        ]

    assert to_nvme(in_backward=True) == []
    expected = ["offload gradient/layer1/w", "offload gradient/layer0/w"]
    assert to_nvme(in_backward=False) == expected


def test_new_values_go_home_once_per_tier() -> None:
    toy = chain(1, is_mixed=True)
    jobs = jobs_of(toy, param=Tier.DEVICE, state=Tier.NVME)
    home = [j.operation for j in jobs[-3:] if isinstance(j.operation, Transfer)]
    moved = {op.target: {a.kind for a in op.arrays} for op in home}
    assert moved == {Tier.NVME: {"master", "state0", "state1"}, Tier.DEVICE: {"param"}}


def test_every_update_is_scheduled_once_whatever_its_blocks() -> None:
    toy = chain(2, leaf=LeafCase("w", num_rows=5), block_rows=2)
    jobs = jobs_of(toy)
    updated = [a for j in jobs if isinstance(j.operation, Update) for a, _ in j.writes]
    masters = [a.rows for a in updated if (a.role, a.path) == ("param", "layer0/w")]
    assert masters == [(0, 2), (2, 4), (4, 5)]
    assert len(updated) == len(set(updated))


def test_a_frozen_segment_runs_forward_only() -> None:
    layers = [
        Layer("frozen", (ArrayId(Role.PARAM, "f"),), ("batch/x",), ("x",)),
        Layer("last", (ArrayId(Role.PARAM, "w"),), ("x",), ()),
    ]
    leaves = [LeafCase("f", is_trainable=False), LeafCase("w")]
    jobs = jobs_of(make_toy(leaves, layers))
    assert runs(jobs) == [("frozen", Pass.FORWARD, 0), ("last", Pass.LOSS, 0)]
    assert words(jobs, Update) == ["update last"]


def test_an_evaluation_runs_forward_and_brings_its_results_to_the_host() -> None:
    toy = chain(2, num_aux=1)
    catalog = toy.catalog(toy.homes(Tier.NVME, Tier.NVME), num_microbatches=2)
    options = StepOptions(2, False, Tier.DEVICE, Tier.HOST)
    jobs = schedule_forward(catalog, options)
    assert {kind for _, kind, _ in runs(jobs)} == {Pass.FORWARD}
    results = {
        a for j in jobs if isinstance(j.operation, Transfer) for a, _ in j.writes
    }
    assert results == {value(f"out/{i}", m) for i in range(2) for m in range(2)}


def test_an_output_goes_to_the_host_before_the_next_segment_runs() -> None:
    toy = chain(3)
    first = toy.program.segments[0].outputs
    returned = (*first, *toy.program.outputs)
    program = replace(toy.program, outputs=returned, is_trained=False)
    toy = replace(toy, program=program)
    catalog = toy.catalog(toy.homes(Tier.NVME, Tier.NVME), num_microbatches=2)
    for tier in Tier:
        jobs = schedule_forward(catalog, StepOptions(2, False, tier, Tier.HOST))
        moved = [
            (a.path, i)
            for i, job in enumerate(jobs)
            if isinstance(job.operation, Transfer)
            for a, target in job.writes
            if target == Tier.HOST and a.path in returned
        ]
        assert sorted(name for name, _ in moved) == sorted(2 * returned)
        second = next(
            i
            for i, job in enumerate(jobs)
            if isinstance(job.operation, Run) and job.operation.segment == 1
        )
        assert all(i < second for name, i in moved if name in first)
