import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zinf.initialize import make_planner
from zinf.optim.decision import Decision, Pending
from zinf.prepare import updates
from zinf.program import ArrayId, Role, Tier
from zinf_kernels.adam import cpu

ROWS, COLUMNS = 10, 4
ROW_BYTES = 4 * COLUMNS


def params():
    return {"a": jnp.ones((ROWS, COLUMNS)), "b": jnp.ones((3, COLUMNS))}


def loss(p, batch):
    x = jnp.tanh(batch @ p["a"])
    return jnp.mean((x @ p["b"].T) ** 2)


def compiled(tx=None, max_bytes=None):
    config = {"execution": "streamed"}
    if max_bytes is not None:
        config["segment"] = {"max_bytes": max_bytes}
    planner = make_planner(loss, params, tx or optax.adam(0.1), config)
    source = planner.trace(jax.ShapeDtypeStruct((2, ROWS), jnp.float32), max_bytes)
    layouts = planner.layouts(source)
    segmented = planner.cut(source, layouts, max_bytes)
    return updates.compile_program_updates(
        segmented.program,
        planner.problem,
        planner.separated,
        accumulates=(),
        layouts=layouts,
    )


def all_updates(found):
    return [u for _, group in found.arrays for u in group]


def homes_of(found, tiers=None):
    arrays = {a.whole for u in all_updates(found) for a in u.results}
    return {a: (tiers or {}).get(a.path, Tier.HOST) for a in arrays}


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of three rows of `a`; `b` is one block."""
    monkeypatch.setattr(updates, "BLOCK_BYTES", 3 * ROW_BYTES)


def test_blocks_cover_every_row_once_and_equal_ones_share_an_executable(small_blocks):
    program = compiled()
    # Three rows of `a`, the last one, and the three of `b`.
    assert program.num_executables == 2
    found = all_updates(program)
    rows = sorted(u.block for u in found if u.gradient.path == "a")
    assert rows == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert [u.block for u in found if u.gradient.path == "b"] == [None]
    for update in found:
        assert {a.rows for a in update.results} == {update.block}
        assert update.gradient.rows is None


def test_an_update_that_is_not_element_wise_keeps_its_leaf_whole(small_blocks):
    found = all_updates(compiled(optax.lamb(0.1)))
    assert [u.block for u in found if u.gradient.path == "a"] == [None]


def test_blocks_of_a_large_model_are_larger(monkeypatch):
    monkeypatch.setattr(updates, "BLOCK_BYTES", 1)
    monkeypatch.setattr(updates, "MAX_BLOCKS", 2)
    found = all_updates(compiled())
    # Half of the 13 rows of both leaves: six whole rows, and then four.
    rows = [u.block for u in found if u.gradient.path == "a"]
    assert rows == [(0, 6), (6, 10)]


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
        # On the host Adam is done in place.
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
    for update in all_updates(found):
        shape = (update.block[1] - update.block[0] if update.block else 3, COLUMNS)
        arrays = [np.ones(shape, np.float32) for _ in update.results]
        goes_by = Pending(Decision(0.0, 1.0, 1.0, False), [0.5, 0.5])
        found.apply_in_place(update, np.ones_like(arrays[0]), goes_by, *arrays)
        assert (arrays[0] < 1).all()
    assert cpu.compiled.cache_info().misses == before


def test_blocks_together_are_the_update_of_the_whole(small_blocks):
    tx = optax.sgd(0.5, momentum=0.9)
    found = compiled(tx)
    random = np.random.default_rng(0)
    grad, master, trace = random.standard_normal((3, ROWS, COLUMNS), np.float32)
    result = np.zeros_like(master)
    for update in all_updates(found):
        if update.gradient.path == "a":
            block = slice(*update.block)
            new, _ = found.apply(
                update,
                Tier.HOST,
                grad[block],
                [master[block], trace[block]],
                Pending(Decision(0.0, 1.0, 0.25, False), ()),
            )
            result[block] = new
    expected = master - 0.5 * (0.25 * grad + 0.9 * trace)
    np.testing.assert_allclose(result, expected, rtol=1e-6)
