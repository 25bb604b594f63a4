"""Every launcher's environment gives a place, a half one an error, none no group."""

import pytest

from tests.golden import Golden
from zinf.distributed import Flags, JoinError, Seat, find_seat
from zinf.distributed.launch import SECRET, first_host

JOB, STEP = 4242, 3
SRUN = {
    "SLURM_JOB_ID": str(JOB),
    "SLURM_STEP_ID": str(STEP),
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {
    "PMI_SIZE": "4",
    "PMI_RANK": "2",
    "MPI_LOCALRANKID": "0",
    "MPI_LOCALNRANKS": "2",
}
KUBERNETES = {
    "JOB_COMPLETION_INDEX": "2",
    "JAX_NUM_PROCESSES": "3",
    "JAX_COORDINATOR_ADDRESS": "train-0.train:6200",
}
TORCHRUN = {
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
}
ADDRESS = Flags("node1:6200")


NO_STEP = {name: SRUN[name] for name in SRUN if name != "SLURM_STEP_NODELIST"}
HETEROGENEOUS = SRUN | {"SLURM_HET_SIZE": "2"}
PLACES: dict[str, tuple[Flags, dict[str, str]]] = {
    "flags": (Flags("node1:1", 2, 1), {}),
    "flags before a launcher": (Flags("node1:1", 2, 1), SRUN),
    "srun": (Flags(), SRUN),
    "srun, another step": (Flags(), SRUN | {"SLURM_STEP_ID": "4"}),
    "srun, an address": (ADDRESS, SRUN),
    "Open MPI": (ADDRESS, OPEN_MPI),
    "Open MPI, named runs": (ADDRESS, OPEN_MPI | {"PMIX_NAMESPACE": "17"}),
    "Open MPI 4": (
        ADDRESS,
        OPEN_MPI | {"OMPI_MCA_orte_precondition_transports": "0af3-9c2e"},
    ),
    # Started inside a Slurm allocation: its numbering counts.
    "Open MPI in srun": (ADDRESS, SRUN | OPEN_MPI),
    "MPICH": (ADDRESS, MPICH),
    "Kubernetes": (Flags(), KUBERNETES),
    "torchrun": (Flags(), TORCHRUN),
    "torchrun, named runs": (Flags(), TORCHRUN | {"TORCHELASTIC_RUN_ID": "a"}),
    # The parts of a heterogeneous job have numbers of their own.
    "heterogeneous": (ADDRESS, HETEROGENEOUS),
    "heterogeneous, other": (ADDRESS, HETEROGENEOUS | {"SLURM_JOB_ID": "8"}),
    # A process alone joins nothing: a shell inside an allocation, and an sbatch
    # script, have no srun; an indexed job is of independent runs.
    "no launcher": (Flags(), {}),
    "sbatch": (Flags(), NO_STEP),
    "srun of one": (Flags(), SRUN | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}),
    "torchrun of one": (Flags(), TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}),
    "indexed job": (Flags(), {"JOB_COMPLETION_INDEX": "3"}),
    "one asked for": (Flags(num_processes=1), SRUN),
    # One process a host has all that the host has. Where each process sees its own
    # accelerator only, that is number 0.
    "one a host": (Flags(), SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2,1"}),
    "one visible": (Flags(), SRUN | {"CUDA_VISIBLE_DEVICES": "3"}),
    "all visible": (Flags(), SRUN | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}),
    "devices": (Flags(local_devices=(2, 3)), SRUN),
    "all devices": (Flags(local_devices=()), SRUN),
    "loopback": (Flags("127.0.0.1:1", 4, 1), {}),
    "loopback, IPv6": (Flags("[::1]:65535", 4, 1), {}),
    "localhost": (Flags("localhost:1"), SRUN),
    "srun on one host": (
        Flags(),
        SRUN | {"SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NODEID": "0"},
    ),
    "MPI on one host": (ADDRESS, OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}),
    "torchrun on one host": (Flags(), TORCHRUN | {"LOCAL_WORLD_SIZE": "2"}),
}


def test_every_environment_gives_a_place_and_a_token_or_none(golden: Golden):
    lines = []
    for name, (flags, environ) in PLACES.items():
        seat = find_seat(flags, environ)
        if seat is None:
            lines.append(f"{name}: alone")
            continue
        place = f"{seat.index} of {seat.count} at {seat.coordinator} ({seat.launcher})"
        lines.append(f"{name}: {place}, devices {seat.local_device_ids or 'all'}")
        lines.append(f"    token: {seat.token}")
        assert not seat.is_secret
    golden.check("places.txt", "\n".join(lines))


def test_all_processes_of_a_launcher_have_one_token():
    """Also where two hosts have one process each and nothing says how many."""
    two_pods = KUBERNETES | {"JAX_NUM_PROCESSES": "2", "JOB_COMPLETION_INDEX": "0"}
    for environs in (
        [MPICH, MPICH | {"PMI_RANK": "0"}],
        [two_pods, two_pods | {"JOB_COMPLETION_INDEX": "1"}],
    ):
        seats = [find_seat(ADDRESS, environ) for environ in environs]
        assert len({seat.token for seat in seats if seat is not None}) == 1


MISTAKES: list[tuple[Flags, dict[str, str]]] = [
    (Flags("a:1"), {}),
    (Flags("a:1", 2), {}),
    (Flags(None, 2, 1), {}),
    (Flags(), OPEN_MPI),
    (Flags("a:1", 2, 2), {}),
    (Flags("a:1", 2, -1), {}),
    (Flags("a:1", 0, 0), {}),
    *((Flags(x, 2, 0), {}) for x in ("node1", ":6200", "node1:0", "node1:65536")),
    (ADDRESS, OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "x"}),
    (Flags(), SRUN | {"SLURM_STEP_NODELIST": ","}),
    (Flags(), SRUN | {SECRET: " "}),
    (Flags(), SRUN | {f"{SECRET}_FILE": "/no/such/file"}),
]


def test_what_cannot_be_is_an_error_that_says_what_was_found(golden: Golden):
    lines = []
    for flags, environ in MISTAKES:
        with pytest.raises(JoinError) as raised:
            find_seat(flags, environ)
        lines.append(str(raised.value))
    golden.check("launch.txt", "\n".join(lines))


def test_the_first_host_of_a_slurm_list_and_an_ipv6_address():
    hosts = {
        "node1": "node1",
        "node1,node2": "node1",
        "node[001-015],login": "node001",
        "node[001,007-015]": "node001",
        "rack[3-4]-gpu,x": "rack3-gpu",
    }
    assert {nodes: first_host(nodes) for nodes in hosts} == hosts
    assert Seat("flags", "[::1]:65535", 2, 0).address == ("::1", 65535)


def test_a_secret_is_taken_from_the_environment():
    for environ in (SRUN, OPEN_MPI, MPICH, KUBERNETES, TORCHRUN):
        seat = find_seat(ADDRESS, environ | {SECRET: " only us\n"})
        assert seat is not None and (seat.token, seat.is_secret) == ("only us", True)
        assert "only us" not in repr(seat)
