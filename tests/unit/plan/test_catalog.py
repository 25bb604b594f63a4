"""The bytes of everything that a plan names, and what is left to the next step."""

import pytest

from tests.toy.program import Layer, LeafCase, chain, make_toy
from zinf.core.plan import Catalog, StepOptions, count_contributions
from zinf.core.plan.pending import not_read_first, pending_copies
from zinf.core.program import ArrayId, Role, Tier

DEVICE, HOST, NVME = Tier
ROWS, NUMEL = 4, 64
LEAF = LeafCase("w", ROWS, NUMEL)
TIED = [
    Layer("first", (ArrayId(Role.PARAM, "w"),), ("batch/x",), ("x",)),
    Layer("last", (ArrayId(Role.PARAM, "w"),), ("x",), ()),
]


def catalog(
    is_mixed: bool = False, microbatches: int = 1, tied: bool = False
) -> Catalog:
    toy = chain(2, leaf=LEAF, is_mixed=is_mixed)
    if tied:
        toy = make_toy([LEAF], TIED, is_mixed=is_mixed)
    return toy.catalog(toy.homes(NVME, NVME), num_microbatches=microbatches)


def test_rows_have_their_share_of_the_bytes_of_the_whole_and_rest_with_it() -> None:
    sizes = catalog()
    whole = ArrayId(Role.STATE, "layer0/w", slot=0)
    rows = ArrayId(Role.STATE, "layer0/w", (1, 4), slot=0)
    assert sizes.nbytes(whole) == 4 * ROWS * NUMEL
    assert sizes.nbytes(rows) == 4 * 3 * NUMEL
    assert sizes.home(rows) == sizes.home(whole) == whole
    assert sizes.home_tier(rows) == NVME
    roles = Role.VALUE, Role.COTANGENT, Role.COTANGENT_PART
    values = [ArrayId(role, "layer0.0", None, 0) for role in roles]
    assert {sizes.nbytes(name) for name in values} == {4 * 32}
    for nowhere in (*values, ArrayId(Role.GRADIENT, "layer0/w")):
        assert sizes.home(nowhere) is None
        assert sizes.home_tier(nowhere) is None


@pytest.mark.parametrize(
    ("is_mixed", "microbatches", "tied", "wide"),
    [
        (False, 1, False, 4),
        (True, 1, False, 2),
        (True, 2, False, 4),
        (True, 1, True, 4),
    ],
)
def test_a_gradient_is_as_wide_as_its_parameter_unless_it_is_a_sum(
    is_mixed: bool, microbatches: int, tied: bool, wide: int
) -> None:
    sizes = catalog(is_mixed, microbatches, tied)
    path, narrow = "w" if tied else "layer0/w", 2 if is_mixed else 4
    found = [
        sizes.nbytes(ArrayId(role, path, rows))
        for role in (Role.GRADIENT, Role.GRADIENT_PART)
        for rows in (None, (1, 4))
    ]
    assert found == [n * rows * NUMEL for n in (wide, narrow) for rows in (ROWS, 3)]


def test_contributions_are_counted_by_segment_and_microbatch() -> None:
    frozen = make_toy(
        [LeafCase("f", is_trainable=False), LEAF],
        [Layer("frozen", (ArrayId(Role.PARAM, "f"),), ("batch/x",), ("x",)), TIED[1]],
    )
    assert count_contributions(frozen.program, 2) == {("w", None): 2}
    assert count_contributions(catalog(tied=True).program, 3) == {("w", None): 6}
    separate = {(f"layer{i}/w", None): 3 for i in range(2)}
    assert count_contributions(catalog().program, 3) == separate


def test_what_waits_for_the_next_step_and_what_that_reads_first() -> None:
    toy = chain(3)
    for param, state, tier in ((DEVICE, DEVICE, DEVICE), (DEVICE, NVME, HOST)):
        homes = toy.homes(param, state)
        units, sizes = toy.units(homes), toy.catalog(homes)
        found = not_read_first(units, sizes)
        paths = {x.master.path for number in found for x in units[number].arrays}
        assert paths == {"layer1/w", "layer2/w"}
        # Gradients wait on the device only for what rests there.
        options = StepOptions(1, False, DEVICE, HOST)
        assert set(pending_copies(units, found, sizes, options)) == {
            (ArrayId(Role.GRADIENT, f"layer{i}/w"), tier) for i in (1, 2)
        }
