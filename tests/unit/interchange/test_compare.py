"""Two checkpoints are compared bit for bit; those of a folder are listed."""

from pathlib import Path

import numpy as np
import pytest

from tests.unit.checkpoint.cases import ARRAYS, EMBED, STACKED
from tests.unit.checkpoint.conftest import open_residents as open_residents
from zinf.checkpoint import write_arrays
from zinf.checkpoint.incomplete import MARKER, mark
from zinf.checkpoint.manifest import FILE
from zinf.checkpoint.saved import Saved
from zinf.core.interchange import differences, entries, find, scalar_differences
from zinf.core.program import ArrayId, Role, Tier

COMPUTE = ArrayId(Role.MASTER, "embed")
SCALARS = {"num_steps": 3, "shared": [0.5]}


@pytest.fixture
def save(open_residents, tmp_path):
    """Saves arrays as a checkpoint of a name."""

    def save(name: str, arrays=ARRAYS, scalars=SCALARS) -> Path:
        residents = open_residents([Tier.HOST], arrays)
        write_arrays(tmp_path / name, residents, scalars)
        return tmp_path / name

    return save


def compared(first: Path, second: Path):
    with Saved(first) as here, Saved(second) as there:
        return list(differences(here, there)), list(scalar_differences(here, there))


def changed(array: ArrayId, index, value) -> dict[ArrayId, np.ndarray]:
    content = ARRAYS[array].copy()
    content[index] = value
    return {**ARRAYS, array: content}


def test_equal_checkpoints_have_no_differences(save):
    assert compared(save("a"), save("b")) == ([], [])


@pytest.mark.parametrize(
    ("array", "index", "change"),
    [
        (EMBED, (3, 1), -2.5),
        (STACKED, (2, 0, 1), 0.25),
        (COMPUTE, (11, 3), 1.0),
        (ArrayId(Role.STATE, "scale", slot=1), (), 2.0),
    ],
)
def test_a_difference_has_its_size_and_place(array, index, change, save):
    number = ARRAYS[array].dtype.type
    second = changed(array, index, ARRAYS[array][index] + number(change))
    first, count = index, 1
    if index:
        # Another that is smaller, and later or earlier.
        end = 0 if index > (2, 2) else -1
        second[array][(end,) * len(index)] += number(2**-4)
        first, count = (0,) * len(index) if end == 0 else index, 2
    (found,), _ = compared(save("a"), save("b", second))
    assert (found.name, found.found) == (str(array), None)
    assert (found.num_different, found.largest, found.first) == (
        count,
        abs(change),
        first,
    )


@pytest.mark.parametrize(("value", "largest"), [(np.nan, np.nan), (-0.0, 0.0)])
def test_other_bits_differ_whatever_their_number(value, largest, save):
    (found,), _ = compared(save("c"), save("d", changed(EMBED, (0, 0), value)))
    np.testing.assert_equal((found.num_different, found.largest), (1, largest))


def test_shapes_dtypes_and_absence_are_named(save):
    second = dict(ARRAYS)
    second[EMBED] = ARRAYS[EMBED].reshape(4, 12)
    second[COMPUTE] = ARRAYS[COMPUTE].astype(np.float32)
    second[ArrayId(Role.PARAM, "more")] = second.pop(
        ArrayId(Role.STATE, "embed", slot=0)
    )
    found, _ = compared(save("a"), save("b", second))
    assert {f.name: f.found for f in found} == {
        "param/embed": "float32[12, 4] / float32[4, 12]",
        "master/embed": "bfloat16[12, 4] / float32[12, 4]",
        "state0/embed": "float32[12, 4] / absent",
        "param/more": "absent / float32[12, 4]",
    }


def test_scalars_that_differ_are_shown(save):
    _, scalars = compared(save("a"), save("b", scalars={"num_steps": 4, "more": 1}))
    assert scalars == ["num_steps: 3 / 4", "shared: [0.5] / None", "more: None / 1"]


def test_large_arrays_are_compared_part_by_part(save):
    large = np.zeros((3, 2**21), np.float64)  # a row is 16 MiB
    second = large.copy()
    second[1, 5] = 1
    second[2, 7] = -3
    name = ArrayId(Role.PARAM, "large")
    (found,), _ = compared(save("a", {name: large}), save("b", {name: second}))
    assert (found.num_different, found.largest, found.first) == (2, 3.0, (1, 5))


def test_what_cannot_be_used_is_listed_with_the_reason(save, tmp_path):
    runs = tmp_path / "run"
    for step in ("5", "10"):
        (runs / step).mkdir(parents=True)
        save(f"of-{step}").rename(runs / step / "state")
    manifest = runs / "5" / "state" / FILE
    manifest.write_bytes(manifest.read_bytes()[:-9])
    (runs / "11.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    (runs / "11.orbax-checkpoint-tmp" / "state" / "file").write_bytes(bytes(7))
    mark(runs / "11.orbax-checkpoint-tmp")
    marker = (runs / "11.orbax-checkpoint-tmp" / MARKER).stat().st_size
    damaged, sound, begun = entries(runs)
    assert (damaged.step, sound.step, begun.step) == (5, 10, None)
    assert "no JSON of a manifest" in (damaged.problem or "")
    assert sound.problem is None
    assert sound.array_bytes == sum(x.nbytes for x in ARRAYS.values())
    assert sound.num_arrays == len(ARRAYS)
    assert "cut short" in (begun.problem or "") and begun.own_bytes == 7 + marker
    assert find(runs) == runs / "10" / "state"
    assert find(runs, 5) == runs / "5" / "state"
    assert find(runs / "10") == find(runs / "10" / "state") == find(runs)
    with pytest.raises(
        FileNotFoundError, match="of step 7. It has those of steps 5, 10"
    ):
        find(runs, 7)
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        find(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match="has no checkpoint"):
        entries(tmp_path)
