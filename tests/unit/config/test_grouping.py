import pytest

from zinf.config import Grouping, grouping


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        ({}, Grouping()),
        ({"mesh": {"replica": 2, "fsdp": 4}}, Grouping(2, 4)),
        ({"mesh": {"fsdp": 2, "seq": 4}}, Grouping(1, 2, num_seq=4)),
        ({"mesh": {"fsdp": 2, "expert": 4}}, Grouping(1, 2, num_expert=4)),
        (
            {"expert_parallel": {"enabled": True, "autoep_size": 8}},
            Grouping(num_expert=8),
        ),
        ({"expert_parallel": {"enabled": False, "autoep_size": 8}}, Grouping()),
        ({"mesh": {"fsdp": 2, "tensor": 4}}, Grouping(1, 2, num_tensor=4)),
        ({"tensor_parallel": {"autotp_size": 4}}, Grouping(num_tensor=4)),
        ({"tensor_parallel": {"autotp_size": 0}}, Grouping()),
        ({"zero_optimization": {"mics_shard_size": 4}}, Grouping(group_size=4)),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, Grouping(group_size=8)),
        ({"zero_optimization": {"mics_shard_size": -1}}, Grouping()),
        ({"mesh": {"fsdp": "many"}, "zero_optimization": 3}, Grouping()),
    ],
)
def test_what_a_config_says_of_devices(raw, found):
    assert grouping(raw) == found
    assert found.is_given == (found != Grouping())


def test_overrides_come_on_top():
    assert grouping({"mesh": {"fsdp": 4}}, ["mesh.fsdp=2"]) == Grouping(1, 2)
