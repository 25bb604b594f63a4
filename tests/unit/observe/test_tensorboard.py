"""TensorBoard gets every number of every step."""

from collections import defaultdict
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event

from tests.unit.observe.cases import metrics_of
from zinf.observe import TensorBoard


def events_in(directory: Path) -> list[Event]:
    """The records of the event files: length, its checksum, content, checksum."""
    found = []
    for path in sorted(directory.iterdir()):
        content = path.read_bytes()
        while content:
            length = int.from_bytes(content[:8], "little")
            found.append(Event.FromString(content[12 : 12 + length]))
            content = content[16 + length :]
    return found


def test_each_number_is_a_scalar_of_its_step(tmp_path):
    writer = TensorBoard(tmp_path)
    for step in (1, 2):
        writer.write(metrics_of(step, grad_norm=None))
    writer.close()
    scalars: dict[str, dict[int, float]] = defaultdict(dict)
    for event in events_in(tmp_path):
        for value in event.summary.value:
            scalars[value.tag][event.step] = value.simple_value
    assert scalars["loss"] == {1: 4.0, 2: 3.0}
    assert scalars["host_bytes"] == {1: 20.0, 2: 40.0}
    assert set(scalars) == set(metrics_of(1)) - {"step", "grad_norm"}


@pytest.mark.parametrize("after_step", [0, 7])
def test_steps_that_are_repeated_are_hidden(after_step, tmp_path):
    TensorBoard(tmp_path, after_step=after_step).close()
    starts = [e.step for e in events_in(tmp_path) if e.HasField("session_log")]
    assert starts == [after_step + 1]


def test_events_of_an_earlier_run_are_kept_as_a_run_of_their_own(tmp_path):
    for run in range(3):
        writer = TensorBoard(tmp_path)
        writer.write(metrics_of(run + 1))
        writer.close()
    # A run that is resumed goes on beside what it wrote before.
    TensorBoard(tmp_path, after_step=3).close()
    assert len([p for p in tmp_path.iterdir() if p.is_file()]) == 2
    for run in (1, 2):
        (events,) = (tmp_path / f"run.{run}").iterdir()
        assert {e.step for e in events_in(events.parent) if e.summary.value} == {run}
