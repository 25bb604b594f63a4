"""Totals add what adds up and keep the largest of what does not."""

from functools import reduce
from operator import add

from tests.unit.observe.cases import metrics_of
from zinf.observe import Totals
from zinf.plan import Link
from zinf.program import Tier


def test_steps_add_up():
    losses = [None, 0.75, None]
    steps = [metrics_of(i + 1, evaluation_loss=x) for i, x in enumerate(losses)]
    total = reduce(add, map(Totals.of, steps))
    assert total.num_steps == 3
    assert (total.first_loss, total.last_loss) == (4.0, 2.0)
    assert total.evaluation_loss == 0.75
    assert total.seconds == 6.0
    assert total.tokens == 2.0 * (100 + 200 + 300)
    assert total.peak_bytes == {Tier.DEVICE: 10, Tier.HOST: 60, Tier.NVME: 30}
    assert total.moved_bytes == {
        Link.NVME_READ: 3,
        Link.NVME_WRITE: 6,
        Link.H2D: 9,
        Link.D2H: 12,
    }
