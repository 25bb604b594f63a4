"""Two processes run the offloaded step as one process with two devices does."""

import pytest

from tests.distributed.test_training import alone, run
from tests.distributed.training import offloaded


@pytest.mark.slow
def test_two_processes_give_the_losses_norms_and_parameters_of_one(tmp_path):
    expected = alone(offloaded(), 2)
    # The same executable runs, and sums of two are the same in any order.
    for process in run(2, tmp_path, "offloaded"):
        for name, found in process["offloaded"].items():
            assert found == expected[name]
