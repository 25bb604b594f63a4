"""Which updates run where, in which blocks, and which of them jointly."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zinf.core.engine.initialize import make_planner
from zinf.core.optim.decision import Decision, Pending
from zinf.core.plan import Arrangement, Instruction, Link, Plan, Update
from zinf.core.program import ArrayId, Role, Tier
from zinf.core.step import updates
from zinf.core.step.joint import grouped, jointly_and_singly
from zinf.core.step.shrink import cut
from zinf_kernels.elementwise import cpu

ROWS, COLUMNS = 10, 4
ROW_BYTES = 4 * COLUMNS


WIDTH = 64
NAMES = ("bias", "kernel", "scale", "shift")


def params():
    return {"a": jnp.ones((ROWS, COLUMNS)), "b": jnp.ones((3, COLUMNS))}


def loss(p, batch):
    x = jnp.tanh(batch @ p["a"])
    return jnp.mean((x @ p["b"].T) ** 2)


def wide_params():
    vectors = {name: jnp.ones(WIDTH) for name in NAMES if name != "kernel"}
    return vectors | {"kernel": jnp.ones((WIDTH, WIDTH))}


def wide_loss(p, batch):
    x = jnp.tanh(batch @ p["kernel"] + p["bias"][None])
    return jnp.mean((x * p["scale"][None] + p["shift"][None]) ** 2)


def compiled(tx=None, problem=(loss, params, ROWS), **config):
    """The updates of a problem: its loss, parameters, and the width of its batch."""
    config = {"execution": "streamed", **config}
    planner = make_planner(*problem[:2], tx or optax.adam(0.1), config)
    batch = jax.ShapeDtypeStruct((2, problem[2]), jnp.float32)
    source = planner.trace(batch, None)
    layouts = planner.layouts(source)
    return updates.compile_program_updates(
        cut(planner, source, layouts, None).program,
        planner.problem,
        planner.separated,
        accumulates=(),
        layouts=layouts,
    )


def all_updates(found):
    return [u for _, group in found.arrays for u in group]


def rows_of_a(found):
    return [u.block for u in all_updates(found) if u.gradient.path == "a"]


def homes_of(found, tiers=None, others=Tier.HOST):
    """Homes on the host, but for leaves in `tiers`."""
    arrays = {a for u in all_updates(found) for a in u.results}
    return {a.whole: (tiers or {}).get(a.path, others) for a in arrays}


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of three rows of `a`; `b` is one block."""
    monkeypatch.setattr(updates, "BLOCK_BYTES", 3 * ROW_BYTES)


def test_blocks_cover_every_row_once_and_equal_ones_share_an_executable(small_blocks):
    program = compiled()
    # Three rows of `a`, the last one, and the three of `b`.
    assert program.num_executables == 2
    found = all_updates(program)
    assert sorted(rows_of_a(program)) == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert [u.block for u in found if u.gradient.path == "b"] == [None]
    for update in found:
        assert {a.rows for a in update.results} == {update.block}
        assert update.gradient.rows is None


def test_an_update_that_is_not_element_wise_keeps_its_leaf_whole(small_blocks):
    assert rows_of_a(compiled(optax.lamb(0.1))) == [None]


def test_blocks_of_a_large_model_are_larger(monkeypatch):
    monkeypatch.setattr(updates, "BLOCK_BYTES", 1)
    monkeypatch.setattr(updates, "MAX_BLOCKS", 2)
    # Half of the 13 rows of both leaves: six whole rows, and then four.
    assert rows_of_a(compiled()) == [(0, 6), (6, 10)]


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DEVICE])
def test_a_unit_has_the_blocks_of_one_segment_up_to_a_number_of_bytes(
    small_blocks, monkeypatch, tier
):
    monkeypatch.setattr(updates, "UNIT_BLOCKS", 6)
    found = compiled()
    units = found.units(homes_of(found), tier)
    assert {unit.tier for unit in units} == {tier}
    assert [u for unit in units for u in unit.arrays] == all_updates(found)
    for unit in units:
        steps = found.steps[tier]
        nbytes = sum(steps[u].output_bytes for u in unit.arrays)
        assert nbytes <= found.unit_bytes or len(unit.arrays) == 1
        # On the host a loop does Adam in place.
        in_place = {found.is_in_place(u, tier) for u in unit.arrays}
        assert in_place == {tier == Tier.HOST}
        spaces = [steps[u].workspace_bytes for u in unit.arrays]
        assert unit.workspace_bytes == (0 if tier == Tier.HOST else max(spaces))
    # Results of a block are a parameter and two moments: two blocks are a unit.
    assert max(len(unit.arrays) for unit in units) == 2
    assert len({unit.name for unit in units}) == len(units)


def test_an_update_runs_on_the_device_if_all_of_it_rests_there():
    found = compiled()

    def tiers(homes):
        units = found.units(homes)
        return {u.gradient.path: unit.tier for unit in units for u in unit.arrays}

    on_host, on_device = Tier.HOST, Tier.DEVICE
    homes = homes_of(found, {"a": on_device, "b": on_host})
    assert tiers(homes) == {"a": on_device, "b": on_host}
    homes = homes_of(found, {"a": Tier.NVME, "b": on_device})
    assert tiers(homes) == {"a": on_host, "b": on_device}
    homes = dict.fromkeys(homes, on_device)
    homes[ArrayId(Role.STATE, "a", slot=0)] = Tier.NVME
    assert tiers(homes) == {"a": on_host, "b": on_device}


def test_steps_compile_no_loop_that_was_compiled_before_them(small_blocks):
    found = compiled()
    found.compile_in_place(found.units(homes_of(found)))
    before = cpu.compiled.cache_info().misses
    pending = Pending(Decision(0.0, 1.0, 1.0, False), [0.5, 0.5])
    for update in all_updates(found):
        shape = (update.block[1] - update.block[0] if update.block else 3, COLUMNS)
        gradient, *arrays = np.ones((1 + len(update.results), *shape), np.float32)
        found.apply_in_place(update, gradient, pending, *arrays)
        assert (arrays[0] < 1).all()
    assert cpu.compiled.cache_info().misses == before


def test_blocks_together_are_the_update_of_the_whole(small_blocks):
    found = compiled(optax.sgd(0.5, momentum=0.9))
    random = np.random.default_rng(0)
    grad, master, trace = random.standard_normal((3, ROWS, COLUMNS), np.float32)
    result, pending = (
        np.zeros_like(master),
        Pending(Decision(0.0, 1.0, 0.25, False), ()),
    )
    for update in all_updates(found):
        if update.gradient.path == "a":
            block = slice(*update.block)
            arrays = [master[block], trace[block]]
            given = update, Tier.HOST, grad[block], arrays, pending
            result[block], _ = found.apply(*given)
    expected = master - 0.5 * (0.25 * grad + 0.9 * trace)
    np.testing.assert_allclose(result, expected, rtol=1e-6)


# Updates that run jointly: those at rest on the devices, within the same memory.

WIDE = wide_loss, wide_params, WIDTH


def parts_of(found, homes, update_tier=Tier.HOST):
    """The units, and what each runs jointly and singly."""
    units = tuple(found.units(homes, update_tier))
    instructions = tuple(
        Instruction(
            Update(number, unit.name, unit.tier),
            Link.DEVICE,
            (),
            writes=tuple((a, unit.tier) for u in unit.arrays for a in u.results),
            workspace=((unit.tier, unit.workspace_bytes),),
        )
        for number, unit in enumerate(units)
    )
    zeros = dict.fromkeys(Tier, 0)
    plan = Plan(instructions, homes, zeros, zeros, zeros)
    arranged, joint = grouped(Arrangement(plan, None, units, None), found)
    operations = [i.operation for i in arranged.plan.instructions]
    return units, [jointly_and_singly(x, units, joint) for x in operations]


def paths(updates):
    return sorted(u.gradient.path for u in updates)


def test_all_that_rests_on_the_device_is_updated_by_few_executables():
    found = compiled(problem=WIDE)
    (unit,), ((joint, single),) = parts_of(found, homes_of(found, others=Tier.DEVICE))
    assert not single
    # All vectors together need less than the matrix alone.
    assert [paths(j.arrays) for j in joint] == [["kernel"], ["bias", "scale", "shift"]]
    assert all(j.step.workspace_bytes <= unit.workspace_bytes for j in joint)


@pytest.mark.parametrize("update_tier", [Tier.HOST, Tier.DEVICE])
def test_what_rests_elsewhere_is_updated_alone(update_tier):
    found = compiled(problem=WIDE)
    homes = homes_of(found, dict.fromkeys(("kernel", "scale"), Tier.HOST), Tier.DEVICE)
    units, parts = parts_of(found, homes, update_tier)
    together = [paths(j.arrays) for joint, _ in parts for j in joint]
    assert together in ([["bias", "shift"]], [["bias"], ["shift"]])
    assert paths(u for _, single in parts for u in single) == ["kernel", "scale"]
    assert paths(u for unit in units for u in unit.arrays) == sorted(NAMES)


def test_updates_of_whole_leaves_run_alone():
    found = compiled(optax.lamb(0.1), WIDE)
    _, ((joint, single),) = parts_of(found, homes_of(found, others=Tier.DEVICE))
    assert not joint
    assert paths(single) == sorted(NAMES)


def test_an_executable_that_needs_more_is_not_run():
    """Compiled together, updates may need other scratch than each alone."""
    found = compiled(problem=WIDE)

    def greedy(steps):
        step = found.joint(steps)
        space = step.workspace_bytes + (1 << 30) * (len(steps) > 1)
        return replace(step, workspace_bytes=space)

    _, ((joint, single),) = parts_of(
        replace(found, joint=greedy), homes_of(found, others=Tier.DEVICE)
    )
    assert [paths(j.arrays) for j in joint] == [["kernel"]]
    assert paths(single) == ["bias", "scale", "shift"]
