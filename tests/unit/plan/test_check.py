"""Each rule of the checker, broken by hand. (tests/property breaks plans by chance.)"""

from dataclasses import replace

import pytest

from tests.golden import Golden
from zinf.core.plan import (
    Accumulate,
    Decide,
    Free,
    FusedStep,
    Group,
    Instruction,
    Link,
    Plan,
    PlanError,
    Transfer,
    Update,
    check,
)
from zinf.core.plan.check import check_groups
from zinf.core.program import ArrayId, Role, Tier

DEVICE, HOST, NVME = Tier
NONE = dict.fromkeys(Tier, 0)
W, V = ArrayId(Role.PARAM, "w"), ArrayId(Role.PARAM, "v")
ROWS, OTHERS = (ArrayId(Role.PARAM, "w", rows) for rows in ((0, 2), (2, 4)))
G = ArrayId(Role.GRADIENT, "w")


def plan_of(*instructions: Instruction, **capacity: int) -> Plan:
    """A plan of two parameters at home on nvme.

    Instructions say that they make the copies that are not there before them.
    """
    budgets = {tier: capacity.get(tier.value, 1 << 30) for tier in Tier}
    there = {(W, NVME), (V, NVME)}
    made = []
    for each in instructions:
        new = [(a, t) for a, t in each.writes if not {(a, t), (a.whole, t)} & there]
        made.append(replace(each, creates=(*each.creates, *new)))
        there.update(new)
        if isinstance(each.operation, Free):
            there -= {(array, each.operation.tier) for array in each.operation.arrays}
    return Plan(tuple(made), {W: NVME, V: NVME}, NONE, budgets, budgets)


def move(
    array: ArrayId,
    source: Tier,
    target: Tier,
    *after: int,
    link: Link = Link.H2D,
    nbytes: int = 0,
) -> Instruction:
    return Instruction(
        Transfer((array,), source, target),
        link,
        after,
        reads=((array, source),),
        writes=((array, target),),
        allocates=((target, nbytes),) if nbytes else (),
        nbytes=nbytes,
    )


def change(array: ArrayId, *after: int, link: Link = Link.DEVICE) -> Instruction:
    # Only a transfer keeps the version of what it writes; this does not.
    copies = ((array, HOST),)
    operation = Accumulate((array,), ())
    return Instruction(operation, link, after, reads=copies, writes=copies)


def free(array: ArrayId, tier: Tier, *after: int, nbytes: int = 0) -> Instruction:
    return Instruction(Free((array,), tier), Link.FREE_AT_ONCE, after, nbytes=nbytes)


def up(*after: int, link: Link = Link.H2D) -> Instruction:
    return move(W, HOST, DEVICE, *after, link=link)


def down(array: ArrayId, *after: int) -> Instruction:
    return move(array, HOST, NVME, *after, link=Link.NVME_WRITE)


def updated(*after: int) -> Plan:
    """A host update of rows, on a link that waits for nothing but `after`."""
    read = Instruction(Accumulate((G,), ()), Link.DEVICE, (1,), ((W, DEVICE),))
    copies = ((ROWS, HOST),)
    update = Instruction(Update(0, "w", HOST), Link.HOST, after, copies, copies)
    decide = Instruction(Decide((), ()), Link.D2H, ())
    rest = down(ROWS, 4), free(W, HOST, 5), free(W, DEVICE, 2)
    return plan_of(UP, up(0), read, decide, update, *rest)


UP = move(W, NVME, HOST, link=Link.NVME_READ)
AGAIN = replace(UP, link=Link.H2D)
ROWS_UP = move(ROWS, NVME, HOST, link=Link.H2D)
OLD = move(W, DEVICE, HOST, 2, link=Link.D2H)
BIG = replace(UP, allocates=((HOST, 6),), nbytes=6)
OTHER = move(V, NVME, HOST, link=Link.H2D, nbytes=6)
GONE, V_GONE = free(W, HOST, 0, nbytes=6), free(V, HOST, 2, nbytes=6)
WORK = Instruction(Decide((), ()), Link.D2H, (), workspace=((HOST, 6),))
BOTH_GONE = free(W, HOST, 1), free(W, DEVICE, 1)
GIVEN = [move(G, HOST, DEVICE), free(G, HOST, 0), free(G, DEVICE, 0)]
AT_START = {"initial_bytes": {**NONE, HOST: 6}}

RIGHT = {
    "a change": plan_of(
        UP, up(0), change(W, 0, 1), down(W, 2), free(W, HOST, 3), free(W, DEVICE, 1)
    ),
    "changes of other rows": plan_of(
        UP,
        change(ROWS, 0),
        change(OTHERS, 0, link=Link.HOST),
        down(W, 1, 2),
        free(W, HOST, 3),
    ),
    "rows after their whole": plan_of(
        UP, free(W, HOST, 0), replace(ROWS_UP, after=(1,)), free(ROWS, HOST, 2)
    ),
    "a copy that is kept": plan_of(UP),
    "a host update": updated(0, 1, 2, 3),
    "one after the other within 11 bytes": plan_of(
        BIG, GONE, replace(OTHER, after=(1,)), V_GONE, host=11
    ),
    "both within 12 bytes": plan_of(BIG, GONE, OTHER, V_GONE, host=12),
    "workspace within 12 bytes": plan_of(BIG, WORK, free(W, HOST, 0), host=12),
    "a start at the budget": plan_of(UP, free(W, HOST, 0), host=6),
    "one program": plan_of(Instruction(FusedStep(), Link.DEVICE, ())),
}
WRONG = {
    "waits for a later one": plan_of(replace(UP, after=(1,)), free(W, HOST, 0)),
    "waits for itself": plan_of(replace(UP, after=(0,)), free(W, HOST, 0)),
    "reads before the copy is made": plan_of(UP, up(), *BOTH_GONE),
    "reads what was freed": plan_of(UP, free(W, HOST, 0), up(1)),
    "reads what is given to nobody": plan_of(*GIVEN),
    "frees beside a reader": plan_of(UP, up(0), free(W, HOST, 0), free(W, DEVICE, 1)),
    "frees what is not there": plan_of(UP, free(V, HOST, 0)),
    "frees a home": plan_of(free(W, NVME)),
    "makes a copy again": plan_of(
        UP, up(0), replace(UP, after=(1,), creates=UP.writes), *BOTH_GONE
    ),
    "changes beside a reader": plan_of(
        UP, up(0), change(W, 0), down(W, 2), free(W, HOST, 3)
    ),
    "changes rows beside a writer of them": plan_of(
        UP, change(ROWS, 0), change(ROWS, 0, link=Link.HOST)
    ),
    "updates beside a reader on the device": updated(0, 1, 3),
    "updates before the decision": updated(0, 1, 2),
    "reads an old version": plan_of(UP, up(0), change(W, 1), OLD),
    "reads old rows": plan_of(UP, up(0), change(ROWS, 1), OLD),
    "leaves a change behind": plan_of(UP, change(W, 0), free(W, HOST, 1)),
    "leaves changed rows behind": plan_of(UP, change(ROWS, 0), free(W, HOST, 1)),
    "keeps an old version": plan_of(
        UP, up(0), change(W, 1), down(W, 2), free(W, HOST, 3)
    ),
    "makes a copy before the free of the last": plan_of(
        UP, free(W, HOST, 0), AGAIN, free(W, HOST, 2)
    ),
    "makes rows before the free of the whole": plan_of(
        UP, free(W, HOST, 0), ROWS_UP, free(ROWS, HOST, 2)
    ),
    "leaves a copy": plan_of(UP),
    "leaves nothing of what is kept": plan_of(UP, free(W, HOST, 0)),
    # In list order 6 bytes are there at most, but nothing says that the links keep it.
    "may exceed the budget": plan_of(BIG, GONE, OTHER, V_GONE, host=11),
    "may exceed the budget with workspace": plan_of(
        BIG, WORK, free(W, HOST, 0), host=11
    ),
    "starts beyond the budget": plan_of(UP, free(W, HOST, 0), host=5),
}
# What plans begin and end with, beside their homes.
ENDS = {
    "a copy that is kept": {"final": [(W, HOST)]},
    "a start at the budget": AT_START,
    "keeps an old version": {"final": [(W, DEVICE)]},
    "leaves nothing of what is kept": {"final": [(W, HOST)]},
    "starts beyond the budget": AT_START,
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_plan_passes(name: str) -> None:
    check(RIGHT[name], **ENDS.get(name, {}))


def test_each_mistake_is_named(golden: Golden) -> None:
    silent = plan_of(UP, free(W, HOST, 0))
    one, other = silent.instructions
    silent = replace(silent, instructions=(replace(one, creates=()), other))
    found = []
    for name, plan in [*WRONG.items(), ("does not say what it makes", silent)]:
        with pytest.raises(PlanError) as caught:
            check(plan, **ENDS.get(name, {}))
        found.append(f"{name}\n    {caught.value}")
    golden.check("mistakes_of_plans.txt", "\n".join(found))


@pytest.mark.parametrize(
    ("home", "group", "mistake"),
    [
        (DEVICE, Group((W,), 8), None),
        (DEVICE, Group((W,), 9), "needs 9 bytes and has 8"),
        (DEVICE, Group((W, W), 8), "groups param/w, which is not its own"),
        (DEVICE, Group((V,), 8), "groups param/v, which is not its own"),
        (HOST, Group((W,), 8), "groups param/w, which rests elsewhere"),
    ],
)
def test_updates_run_together_in_memory_of_their_own(
    home: Tier, group: Group, mistake: str | None
) -> None:
    copies, update = ((W, DEVICE),), Update(0, "w", DEVICE, groups=(group,))
    decide = Instruction(Decide((), ()), Link.DEVICE, ())
    space = ((DEVICE, 8),)
    runs = Instruction(update, Link.DEVICE, (), copies, copies, workspace=space)
    homes = {W: home, V: DEVICE}
    plan = replace(plan_of(), instructions=(decide, runs), homes=homes)
    if mistake is None:
        check(plan)
        return
    with pytest.raises(PlanError, match=mistake):
        check_groups(plan)
