"""A trace is read back as it was written, whatever a crash cut off."""

import json

import pytest

from tests.unit.observe.cases import slower, write_trace
from zinf.observe import read_trace
from zinf.observe.trace import MARK
from zinf.observe.traced import TracedStep, predicted_step
from zinf.plan import Free, Transfer


def test_steps_come_back_as_they_were_written(tmp_path):
    plan = write_trace(tmp_path / "trace.json", num_steps=3, factor=2.0)
    steps = read_trace(tmp_path / "trace.json")
    assert [step.number for step in steps] == [1, 2, 3]
    for step in steps:
        for spans, timeline in (
            (step.measured, slower(plan.timeline, 2.0)),
            (step.predicted, plan.timeline),
        ):
            pairs = zip(spans, plan.instructions, strict=True)
            for index, (span, instruction) in enumerate(pairs):
                assert span.instruction == index
                assert span.link == instruction.link
                assert span.name == str(instruction.operation)
                assert span.nbytes == instruction.nbytes
                assert span.after == instruction.after
                # Both ends were rounded to a nanosecond.
                assert span.start == pytest.approx(timeline.start[index], abs=2e-9)
                assert span.end == pytest.approx(timeline.end[index], abs=2e-9)


def test_a_trace_that_was_cut_anywhere_gives_its_whole_steps(tmp_path):
    path, cut = tmp_path / "trace.json", tmp_path / "cut.json"
    write_trace(path, num_steps=2)
    content, whole = path.read_bytes(), read_trace(path)
    # A step is whole when the line that names it is, which is its last.
    names = [content.rindex(f'"name":"step {n}"'.encode()) for n in (1, 2)]
    ends = [content.index(b"\n", name) for name in names]
    for length in range(0, len(content), 41):
        cut.write_bytes(content[:length])
        if length <= ends[0]:
            with pytest.raises(ValueError, match=r"damaged|has no whole step"):
                read_trace(cut)
        else:
            assert read_trace(cut) == whole[: sum(length > end for end in ends)]


FOREIGN = {
    "empty": (b"", "is not JSON"),
    "text": (b"step,loss\n1,2.0\n", "is not JSON"),
    "picture": (b"\x89PNG\r\n\x1a\n\x00\x00", "is not JSON"),
    "object": (b'{"traceEvents": []}', 'does not begin with "zinf trace"'),
    "empty list": (b"[]", 'does not begin with "zinf trace"'),
    "other trace": (b'[{"name": "x", "ph": "M"}]', "does not begin with"),
    "no step": (json.dumps([MARK]).encode(), "has no whole step"),
    "no time": (json.dumps([MARK, {"name": "x", "ph": "X"}]).encode(), "proper 'cat'"),
    "no event": (json.dumps([MARK, 3]).encode(), "is damaged"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_file_that_is_no_trace_is_named_in_a_clear_error(case, tmp_path):
    content, words = FOREIGN[case]
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)


def test_damage_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "trace.json"
    write_trace(path)
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(content[:middle] + b"\0\n" + content[middle:])
    with pytest.raises(ValueError, match="is damaged, or no trace of zinf"):
        read_trace(path)


def test_a_file_that_is_not_there_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "absent.json")


def test_arrays_and_what_is_held_are_read_back(tmp_path):
    plan = write_trace(tmp_path / "trace.json", num_steps=1)
    (step,) = read_trace(tmp_path / "trace.json")
    for span, instruction in zip(step.measured, plan.instructions, strict=True):
        if isinstance(instruction.operation, Transfer | Free):
            assert span.arrays == tuple(map(str, instruction.operation.arrays))
    freed = {span.instruction: span.frees for span in step.measured if span.frees}
    assert freed == {6: {"device": 3_000_000}}
    # The step frees a copy that nothing in it made.
    assert step.held_bytes == {"device": 3_000_000, "host": 0, "nvme": 0}
    assert predicted_step(plan) == TracedStep(0, (), step.predicted, step.held_bytes)


def test_a_trace_of_an_earlier_version_is_read(tmp_path):
    path = tmp_path / "trace.json"
    write_trace(path, num_steps=1)
    events = json.loads(path.read_text())
    for event in events:
        for name in ("arrays", "allocates", "workspace", "frees", "held"):
            event.get("args", {}).pop(name, None)
    path.write_text(json.dumps(events))
    (step,) = read_trace(path)
    assert step.held_bytes == {}
    assert {span.arrays for span in step.measured} == {()}
