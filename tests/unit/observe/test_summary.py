"""The report says what was done, and beside it what was planned."""

from tests.unit.observe.cases import metrics_of
from zinf.observe import Totals, summary
from zinf.plan import Free, Instruction, Link, Plan
from zinf.plan.show import show_seconds
from zinf.program import Tier

PLAN = Plan(
    instructions=(
        Instruction(Free((), Tier.HOST), Link.H2D, (), nbytes=3072),
        Instruction(Free((), Tier.HOST), Link.H2D, (), nbytes=1024),
    ),
    homes={},
    home_bytes=dict.fromkeys(Tier, 0),
    peak_bytes={Tier.DEVICE: 2**20, Tier.HOST: 2**21, Tier.NVME: 0},
    capacity_bytes={Tier.DEVICE: 2**30, Tier.HOST: 2**31, Tier.NVME: 0},
)


def test_measured_and_planned_stand_side_by_side():
    first = metrics_of(1, device_bytes=2**19, h2d_bytes=4096)
    second = metrics_of(2, device_bytes=2**18, h2d_bytes=4096, evaluation_loss=3.25)
    text = summary(Totals.of(first) + Totals.of(second), PLAN)
    predicted = show_seconds(PLAN.timeline.seconds)
    speed = f"150 tokens/s, 2.00 s a step (predicted {predicted})"
    assert f"2 steps in 4.0 s: {speed}" in text
    assert "loss 4.0000 -> 3.0000, evaluation loss 3.2500" in text
    lines = [line.split() for line in text.splitlines()]
    assert "device 512 KiB 1.00 MiB 1.00 GiB".split() in lines
    assert "h2d 4.00 KiB 4.00 KiB 8.00 KiB".split() in lines


def test_columns_are_aligned():
    lines = summary(Totals.of(metrics_of(1)), PLAN).splitlines()
    held = lines[lines.index("") + 1 :][:4]
    assert len({len(line) for line in held}) == 1
