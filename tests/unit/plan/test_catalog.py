import pytest

from tests.toy.program import Layer, LeafCase, chain, make_toy
from zinf.plan import count_contributions, value
from zinf.program import ArrayId, Role, Tier

ROWS, NUMEL = 4, 64
TIED = [
    Layer("first", (ArrayId(Role.PARAM, "w"),), ("batch/x",), ("x",)),
    Layer("last", (ArrayId(Role.PARAM, "w"),), ("x",), ()),
]


def catalog(*, is_mixed: bool = False, num_microbatches: int = 1, tied: bool = False):
    toy = chain(2, leaf=LeafCase("w", ROWS, NUMEL), is_mixed=is_mixed)
    if tied:
        toy = make_toy([LeafCase("w", ROWS, NUMEL)], TIED, is_mixed=is_mixed)
    homes = toy.homes(Tier.NVME, Tier.NVME)
    return toy.catalog(homes, num_microbatches=num_microbatches)


def gradient(path: str, role: Role = Role.GRADIENT) -> ArrayId:
    return ArrayId(role, path)


def test_rows_have_their_share_of_the_bytes_of_the_whole() -> None:
    sizes = catalog()
    whole = sizes.nbytes(ArrayId(Role.STATE, "layer0/w", slot=0))
    assert whole == 4 * ROWS * NUMEL
    assert (
        sizes.nbytes(ArrayId(Role.STATE, "layer0/w", (1, 3), slot=0))
        == whole * 2 // ROWS
    )


def test_values_and_their_cotangents_have_equal_bytes() -> None:
    sizes = catalog()
    names = [
        value("layer0.0", 0),
        ArrayId(Role.COTANGENT, "layer0.0", None, 0),
        ArrayId(Role.COTANGENT_PART, "layer0.0", None, 0),
    ]
    assert {sizes.nbytes(name) for name in names} == {4 * 32}


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_gradient_is_as_wide_as_its_parameter_unless_it_is_a_sum(
    is_mixed: bool, num_microbatches: int
) -> None:
    sizes = catalog(is_mixed=is_mixed, num_microbatches=num_microbatches)
    narrow = 2 if is_mixed else 4
    wide = 4 if num_microbatches > 1 else narrow
    numel = ROWS * NUMEL
    assert sizes.nbytes(gradient("layer0/w")) == wide * numel
    assert sizes.nbytes(gradient("layer0/w", Role.GRADIENT_PART)) == narrow * numel
    assert sizes.nbytes(ArrayId(Role.GRADIENT, "layer0/w", (1, 3))) == wide * 2 * NUMEL


def test_a_tied_parameter_is_a_sum_over_its_segments() -> None:
    assert catalog(tied=True, is_mixed=True).nbytes(gradient("w")) == 4 * ROWS * NUMEL


def test_contributions_are_counted_by_segment_and_microbatch() -> None:
    tied = catalog(tied=True).program
    assert count_contributions(tied, 3) == {("w", None): 6}
    separate = catalog().program
    assert count_contributions(separate, 3) == {
        ("layer0/w", None): 3,
        ("layer1/w", None): 3,
    }


def test_a_segment_without_a_backward_pass_contributes_nothing() -> None:
    layers = [
        Layer("frozen", (ArrayId(Role.PARAM, "f"),), ("batch/x",), ("x",)),
        Layer("last", (ArrayId(Role.PARAM, "w"),), ("x",), ()),
    ]
    leaves = [LeafCase("f", is_trainable=False), LeafCase("w")]
    program = make_toy(leaves, layers).program
    assert count_contributions(program, 2) == {("w", None): 2}


def test_rows_rest_where_their_whole_does() -> None:
    sizes = catalog()
    whole = ArrayId(Role.PARAM, "layer0/w")
    rows = ArrayId(Role.PARAM, "layer0/w", (0, 2))
    assert sizes.home(rows) == sizes.home(whole) == whole
    assert sizes.home_tier(rows) == Tier.NVME
    assert sizes.home(value("layer0.0", 0)) is None
    assert sizes.home_tier(gradient("layer0/w")) is None
