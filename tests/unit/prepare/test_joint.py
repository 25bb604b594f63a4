"""Which updates run jointly: those at rest on the devices, within the same memory."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zinf.initialize import make_planner
from zinf.optim.decision import Decision, Pending
from zinf.plan import Arrangement, Instruction, Link, Plan, Update
from zinf.prepare.joint import grouped, jointly_and_singly
from zinf.prepare.updates import compile_program_updates
from zinf.program import Tier

WIDTH = 64
NAMES = ("bias", "kernel", "scale", "shift")


def params():
    vectors = {name: jnp.ones(WIDTH) for name in NAMES if name != "kernel"}
    return vectors | {"kernel": jnp.ones((WIDTH, WIDTH))}


def loss(p, batch):
    x = jnp.tanh(batch @ p["kernel"] + p["bias"][None])
    return jnp.mean((x * p["scale"][None] + p["shift"][None]) ** 2)


def compiled(tx=None, config=None):
    planner = make_planner(
        loss, params, tx or optax.adam(0.1), {"execution": "streamed"} | (config or {})
    )
    source = planner.trace(jax.ShapeDtypeStruct((2, WIDTH), jnp.float32), None)
    layouts = planner.layouts(source)
    return compile_program_updates(
        planner.cut(source, layouts, None).program,
        planner.problem,
        planner.separated,
        accumulates=(),
        layouts=layouts,
    )


def homes_of(found, elsewhere=()):
    arrays = [a for _, group in found.arrays for u in group for a in u.results]
    return {a: Tier.HOST if a.path in elsewhere else Tier.DEVICE for a in arrays}


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
    found = compiled()
    (unit,), ((joint, single),) = parts_of(found, homes_of(found))
    assert not single
    # All vectors together need less than the matrix alone.
    assert [paths(j.arrays) for j in joint] == [
        ["kernel"],
        ["bias", "scale", "shift"],
    ]
    for each in joint:
        assert each.step.workspace_bytes <= unit.workspace_bytes


@pytest.mark.parametrize("update_tier", [Tier.HOST, Tier.DEVICE])
def test_what_rests_elsewhere_is_updated_alone(update_tier):
    found = compiled()
    homes = homes_of(found, elsewhere=("kernel", "scale"))
    units, parts = parts_of(found, homes, update_tier)
    together = [paths(j.arrays) for joint, _ in parts for j in joint]
    assert together in ([["bias", "shift"]], [["bias"], ["shift"]])
    assert paths(u for _, single in parts for u in single) == ["kernel", "scale"]
    assert paths(u for unit in units for u in unit.arrays) == sorted(NAMES)


def test_updates_of_whole_leaves_run_alone():
    found = compiled(optax.lamb(0.1))
    _, ((joint, single),) = parts_of(found, homes_of(found))
    assert not joint
    assert paths(single) == sorted(NAMES)


def test_an_executable_that_needs_more_is_not_run():
    """Compiled together, updates may need other scratch than each alone."""
    found = compiled()

    def greedy(steps):
        step = found.joint(steps)
        space = step.workspace_bytes + (1 << 30) * (len(steps) > 1)
        return replace(step, workspace_bytes=space)

    _, ((joint, single),) = parts_of(replace(found, joint=greedy), homes_of(found))
    assert [paths(j.arrays) for j in joint] == [["kernel"]]
    assert paths(single) == ["bias", "scale", "shift"]


def test_it_gives_what_each_update_gives():
    found = compiled(config={"bf16": {"enabled": True}})
    _, ((joint, _),) = parts_of(found, homes_of(found))
    goes_by = Pending(Decision(0.0, 1.0, 0.5, False), [np.float32(0.5)] * 2)
    rng = np.random.default_rng(0)
    for each in joint:
        operands, gradients = [], []
        for update in each.arrays:
            code = found.steps[Tier.DEVICE][update].code
            grad, master, states = code.arguments[3:]
            arrays = [rng.random(x.shape, np.float32) for x in (master, *states)]
            operands.append([jnp.asarray(x) + 0 for x in arrays])
            gradients.append(jnp.asarray(rng.random(grad.shape), grad.dtype))
        alone = [
            found.apply(update, Tier.DEVICE, gradient, own, goes_by)
            for update, gradient, own in zip(
                each.arrays, gradients, operands, strict=True
            )
        ]
        alone = jax.tree.map(np.array, alone)
        together = each.step(goes_by.factor, goes_by.step_values, gradients, operands)
        for update, one, other in zip(each.arrays, alone, together, strict=True):
            assert len(other) == len(update.results)
            chex.assert_trees_all_equal(one, other, strict=True)
