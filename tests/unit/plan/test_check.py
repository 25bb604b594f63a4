"""Each rule of the checker, broken by hand. (tests/property breaks plans by chance.)"""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from tests.toy.program import LeafCase, chain
from zinf.plan import (
    Accumulate,
    Decide,
    Free,
    FusedStep,
    Group,
    Instruction,
    Link,
    Plan,
    PlanError,
    StepOptions,
    Transfer,
    Update,
    build,
    check,
    check_groups,
    final_copies,
    initial_copies,
)
from zinf.program import ArrayId, Role, Tier

DEVICE, HOST, NVME = Tier
AMPLE = dict.fromkeys(Tier, 1 << 30)
NONE = dict.fromkeys(Tier, 0)
W, V = ArrayId(Role.PARAM, "w"), ArrayId(Role.PARAM, "v")
ROWS = ArrayId(Role.PARAM, "w", (0, 2))
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


UP = move(W, NVME, HOST, link=Link.NVME_READ)


def refuse(plan: Plan, match: str, **rest: object) -> None:
    with pytest.raises(PlanError, match=match):
        check(plan, **rest)


def test_a_fetch_that_is_freed_is_right() -> None:
    check(plan_of(UP, free(W, HOST, 0)))


def test_no_instruction_waits_for_a_later_one() -> None:
    later = replace(UP, after=(1,))
    refuse(plan_of(later, free(W, HOST, 0)), "waits for a later instruction")


def test_a_read_waits_for_what_makes_the_copy() -> None:
    right = UP, move(W, HOST, DEVICE, 0), free(W, HOST, 1), free(W, DEVICE, 1)
    check(plan_of(*right))
    early = UP, move(W, HOST, DEVICE), free(W, HOST, 0, 1), free(W, DEVICE, 1)
    refuse(plan_of(*early), "#1 .* reads param/w on host before it exists")


def test_the_order_of_a_link_counts() -> None:
    same = move(W, HOST, DEVICE, link=Link.NVME_READ)
    check(plan_of(UP, same, free(W, HOST, 1), free(W, DEVICE, 1)))


def test_a_read_of_what_was_freed_is_found() -> None:
    plan = plan_of(UP, free(W, HOST, 0), move(W, HOST, DEVICE, 1))
    refuse(plan, "#2 .* reads param/w on host before it exists")


def test_a_free_waits_for_readers() -> None:
    plan = plan_of(UP, move(W, HOST, DEVICE, 0), free(W, HOST, 0), free(W, DEVICE, 1))
    refuse(plan, "#2 .* frees param/w on host while #1 may still use it")


def test_a_free_of_what_is_not_there_is_found() -> None:
    refuse(plan_of(UP, free(V, HOST, 0)), "frees param/v on host, which does not exist")
    refuse(plan_of(free(W, NVME)), "which does not exist")  # homes are never freed


def test_an_instruction_says_which_copies_it_makes() -> None:
    plan = plan_of(UP, free(W, HOST, 0))
    silent = replace(plan.instructions[0], creates=())
    refuse(
        replace(plan, instructions=(silent, *plan.instructions[1:])),
        "#0 .* does not say that it makes param/w on host",
    )
    again = replace(UP, creates=UP.writes)
    twice = UP, move(W, HOST, DEVICE, 0), replace(again, after=(1,))
    refuse(
        plan_of(*twice, free(W, HOST, 1, 2), free(W, DEVICE, 1)),
        "#2 .* makes again param/w on host",
    )


@pytest.mark.parametrize(
    ("home", "group", "match"),
    [
        (DEVICE, Group((W,), 8), None),
        (DEVICE, Group((W,), 9), "needs 9 bytes and has 8"),
        (DEVICE, Group((W, W), 8), "groups param/w, which is not its own"),
        (DEVICE, Group((V,), 8), "groups param/v, which is not its own"),
        (HOST, Group((W,), 8), "groups param/w, which rests elsewhere"),
    ],
)
def test_updates_run_together_in_memory_of_their_own(home, group, match) -> None:
    copies, update = ((W, DEVICE),), Update(0, "w", DEVICE, groups=(group,))
    space = ((DEVICE, 8),)
    runs = Instruction(update, Link.DEVICE, (), copies, copies, workspace=space)
    plan = replace(plan_of(), instructions=(runs,), homes={W: home, V: DEVICE})
    with pytest.raises(PlanError, match=match) if match else nullcontext():
        check_groups(plan)


def test_a_change_waits_for_readers() -> None:
    down = move(W, HOST, NVME, 2, link=Link.NVME_WRITE)
    read = move(W, HOST, DEVICE, 0)
    rest = free(W, HOST, 3), free(W, DEVICE, 1)
    check(plan_of(UP, read, change(W, 0, 1), down, *rest))
    early = plan_of(UP, read, change(W, 0), down, *rest)
    refuse(early, "#2 .* overwrites param/w on host while #1 may still use it")


def test_an_update_on_the_host_waits_for_readers_on_the_device() -> None:
    up = UP, move(W, HOST, DEVICE, 0)
    read = Instruction(Accumulate((G,), ()), Link.DEVICE, (1,), ((W, DEVICE),))
    copies = ((ROWS, HOST),)
    rest = move(W, HOST, NVME, 4, link=Link.NVME_WRITE), free(W, HOST, 5)

    def plan(*after: int) -> Plan:
        update = Instruction(Update(0, "w", HOST), Link.HOST, after, copies, copies)
        decide = Instruction(Decide((), ()), Link.HOST, ())
        return plan_of(*up, read, decide, update, *rest, free(W, DEVICE, 2))

    check(plan(0, 1, 2))
    refuse(plan(0, 1), r"#4 .* changes param/w.* while #2 may still read it")


def test_an_old_version_is_not_read() -> None:
    # The device copy is from before the change.
    plan = plan_of(
        UP,
        move(W, HOST, DEVICE, 0),
        change(W, 1),
        move(W, DEVICE, HOST, 2, link=Link.D2H),
    )
    refuse(plan, "#3 .* reads an old version of param/w on device")


def test_a_change_of_rows_makes_the_whole_new() -> None:
    down = move(ROWS, HOST, NVME, 1, link=Link.NVME_WRITE)
    check(plan_of(UP, change(ROWS, 0), down, free(W, HOST, 2)))
    plan = plan_of(UP, move(W, HOST, DEVICE, 0), change(ROWS, 1), down)
    again = move(W, DEVICE, HOST, 2, link=Link.D2H)
    refuse(plan_of(*plan.instructions[:3], again), "old version of param/w on device")


def test_what_is_new_gets_home() -> None:
    refuse(
        plan_of(UP, change(W, 0), free(W, HOST, 1)),
        "the plan does not write the new param/w to nvme",
    )
    refuse(
        plan_of(UP, change(ROWS, 0), free(W, HOST, 1)),
        "the plan does not write the new param/w to nvme",
    )


def test_a_name_is_used_again_only_after_it_is_free() -> None:
    again = replace(UP, after=(), link=Link.H2D)
    plan = plan_of(UP, free(W, HOST, 0), again, free(W, HOST, 2))
    refuse(plan, "#2 .* makes param/w on host before it is freed")


def test_rows_are_not_put_into_a_whole_that_is_going() -> None:
    rows = move(ROWS, NVME, HOST, link=Link.H2D)
    plan = plan_of(UP, free(W, HOST, 0), rows, free(ROWS, HOST, 2))
    refuse(plan, "before it is freed")
    waits = replace(rows, after=(1,))
    check(plan_of(UP, free(W, HOST, 0), waits, free(ROWS, HOST, 2)))


def test_nothing_is_left_but_what_is_kept() -> None:
    refuse(plan_of(UP), "the plan ends with param/w on host")
    check(plan_of(UP), final=[(W, HOST)])


def test_what_is_there_at_the_start_may_be_read_and_freed() -> None:
    plan = plan_of(move(G, HOST, DEVICE), free(G, HOST, 0), free(G, DEVICE, 0))
    refuse(plan, "reads gradient/w on host before it exists")
    check(plan, initial=[(G, HOST)])


def test_no_timing_may_exceed_a_budget() -> None:
    big = replace(UP, allocates=((HOST, 6),), nbytes=6)
    other = move(V, NVME, HOST, link=Link.H2D, nbytes=6)
    gone = free(W, HOST, 0, nbytes=6), free(V, HOST, 2, nbytes=6)
    plan = plan_of(big, gone[0], other, gone[1], host=11)
    # In list order 6 bytes are there at most, but nothing says that the links keep it.
    refuse(plan, "#2 .* may hold 12 bytes on host, more than 11")
    waits = replace(other, after=(1,))
    check(plan_of(big, gone[0], waits, gone[1], host=11))
    check(plan_of(big, gone[0], other, gone[1], host=12))


def test_a_step_that_starts_beyond_a_budget_is_found() -> None:
    plan = plan_of(UP, free(W, HOST, 0), host=5)
    refuse(plan, "the step starts with 6 bytes", initial_bytes={**NONE, HOST: 6})


def real_plan(**options: bool) -> tuple[Plan, list, dict[Tier, int], set]:
    toy = chain(3, leaf=LeafCase("w", 4), block_rows=2)
    homes = toy.homes(NVME, NVME)
    catalog, arranged = toy.catalog(homes), StepOptions(1, True, DEVICE, HOST)
    plan = build(catalog, toy.units(homes), AMPLE, arranged)
    initial = initial_copies(toy.program, arranged.num_microbatches)
    held = {**NONE, HOST: sum(catalog.nbytes(a) for a, t in initial if t == HOST)}
    return plan, initial, held, set(final_copies(toy.program, arranged))


def test_an_update_waits_for_the_decision() -> None:
    plan, *rest = real_plan()
    check(plan, *rest)
    index = next(
        i for i, x in enumerate(plan.instructions) if isinstance(x.operation, Update)
    )
    instructions = list(plan.instructions)
    # On a link of its own, after all that it needs but for the decision.
    decisions = {
        i for i, x in enumerate(instructions) if str(x.operation).startswith("decide")
    }
    old = instructions[index]
    after = tuple(i for i in old.after if i not in decisions)
    instructions[index] = replace(old, after=after, link=Link.D2H)
    with pytest.raises(PlanError, match="does not wait for the decision"):
        check(replace(plan, instructions=tuple(instructions)), *rest)


def test_a_fused_step_has_nothing_to_check() -> None:
    check(plan_of(Instruction(FusedStep(), Link.DEVICE, ())))
