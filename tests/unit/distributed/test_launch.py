"""Every launcher's environment gives a place, a half one an error, none no group."""

from dataclasses import replace

import pytest

from tests.golden import Golden
from zinf.distributed import Flags, JoinError, Seat, find_seat
from zinf.distributed.launch import (
    FIRST_PORT,
    NUM_PORTS,
    OPEN_MPI_SECRET,
    SECRET,
    SECRET_FILE,
    first_host,
)
from zinf.distributed.secret import Secret

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
SLURM_COORDINATOR = f"gpu07:{FIRST_PORT + (JOB + STEP) % NUM_PORTS}"
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


@pytest.mark.parametrize(
    ("flags", "environ", "seat"),
    [
        (Flags("a:1", 2, 1), {}, Seat("flags", "a:1", 2, 1)),
        (Flags(), SRUN, Seat("srun", SLURM_COORDINATOR, 8, 5, (1,))),
        (ADDRESS, SRUN, Seat("srun", "node1:6200", 8, 5, (1,))),
        (ADDRESS, OPEN_MPI, Seat("mpirun", "node1:6200", 4, 3, (1,))),
        (ADDRESS, MPICH, Seat("mpirun", "node1:6200", 4, 2, (0,))),
        (Flags(), KUBERNETES, Seat("Kubernetes", "train-0.train:6200", 3, 2)),
        (Flags(), TORCHRUN, Seat("torchrun", "10.0.0.1:29500", 2, 1)),
        # mpirun that was started inside a Slurm allocation: its numbering counts.
        (ADDRESS, SRUN | OPEN_MPI, Seat("mpirun", "node1:6200", 4, 3, (1,))),
        # Flags that say all go before what a launcher says.
        (Flags("a:1", 2, 1), SRUN, Seat("flags", "a:1", 2, 1)),
    ],
)
def test_a_place_is_found(flags, environ, seat):
    found = find_seat(flags, environ)
    assert found is not None
    assert replace(found, secret=None) == seat


@pytest.mark.parametrize(
    "environ",
    [
        # A shell inside an allocation, and an sbatch script: no srun, one process.
        {name: SRUN[name] for name in SRUN if name != "SLURM_STEP_NODELIST"},
        SRUN | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"},
        {"JOB_COMPLETION_INDEX": "3"},  # an indexed job of independent runs
    ],
)
def test_a_process_alone_joins_nothing(environ):
    assert find_seat(Flags(), environ) is find_seat(Flags(), {}) is None
    assert find_seat(Flags(num_processes=1), SRUN) is None


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
    (Flags(), SRUN | {SECRET_FILE: "/no/such/file"}),
]


def test_what_cannot_be_is_an_error_that_says_what_was_found(golden: Golden):
    lines = []
    for flags, environ in MISTAKES:
        with pytest.raises(JoinError) as raised:
            find_seat(flags, environ)
        lines.append(str(raised.value))
    golden.check("launch.txt", "\n".join(lines))


@pytest.mark.parametrize(
    ("more", "flags", "devices"),
    [
        ({}, Flags(), (1,)),
        # One process a host has all that the host has.
        ({"SLURM_STEP_TASKS_PER_NODE": "2,1"}, Flags(), ()),
        # Each process sees its own only, as number 0.
        ({"CUDA_VISIBLE_DEVICES": "3"}, Flags(), ()),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, Flags(), (1,)),
        ({}, Flags(local_devices=(2, 3)), (2, 3)),
        ({}, Flags(local_devices=()), ()),
    ],
)
def test_processes_of_one_host_have_an_accelerator_each(more, flags, devices):
    seat = find_seat(flags, SRUN | more)
    assert seat is not None
    assert seat.local_device_ids == devices


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


GIVEN = Secret(b"only us", SECRET)


def secret(flags: Flags, environ: dict[str, str]) -> Secret | None:
    seat = find_seat(flags, environ)
    assert seat is not None
    return seat.secret


def test_a_secret_is_taken_from_the_environment_a_file_or_open_mpi(tmp_path):
    for environ in (SRUN, OPEN_MPI, MPICH, KUBERNETES, TORCHRUN):
        assert secret(ADDRESS, environ | {SECRET: " only us\n"}) == GIVEN
    file = tmp_path / "secret"
    file.write_text("only us\n")
    found = secret(Flags(), SRUN | {SECRET_FILE: str(file)})
    assert found is not None
    assert (found.key, found.is_private) == (b"only us", True)
    assert str(file) in found.source
    given = OPEN_MPI | {OPEN_MPI_SECRET: "0af3-9c2e"}
    assert secret(ADDRESS, given) == Secret(b"0af3-9c2e", OPEN_MPI_SECRET)


@pytest.mark.parametrize(
    ("flags", "environ"),
    [
        (Flags("127.0.0.1:1", 4, 1), {}),
        (Flags("[::1]:1", 4, 1), {}),
        (Flags("localhost:1"), SRUN),
        (Flags(), SRUN | {"SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NODEID": "0"}),
        (ADDRESS, OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}),
        (Flags(), TORCHRUN | {"LOCAL_WORLD_SIZE": "2"}),
    ],
)
def test_on_one_host_process_0_makes_the_secret(flags, environ):
    assert secret(flags, environ) is None


@pytest.mark.parametrize(
    ("flags", "environ", "own", "other"),
    [
        (Flags(), SRUN, {}, {"SLURM_STEP_ID": "4"}),
        (ADDRESS, OPEN_MPI, {"PMIX_NAMESPACE": "17"}, {"PMIX_NAMESPACE": "18"}),
        (
            Flags(),
            TORCHRUN,
            {"TORCHELASTIC_RUN_ID": "a"},
            {"TORCHELASTIC_RUN_ID": "b"},
        ),
    ],
)
def test_without_a_secret_runs_are_told_apart_by_their_number(
    flags, environ, own, other
):
    one, another = (secret(flags, environ | more) for more in (own, other))
    assert one is not None and another is not None
    assert not one.is_private
    assert one.key != another.key
    assert next(iter(other)) in another.source


def test_all_processes_of_a_launcher_have_one_secret():
    heterogeneous = SRUN | {"SLURM_HET_SIZE": "2"}
    parts = [heterogeneous | {"SLURM_JOB_ID": str(job)} for job in (7, 8)]
    for environs in (
        parts,
        [MPICH, MPICH | {"PMI_RANK": "0"}],
        # Two hosts of one process each, where no launcher says how many a host has.
        [KUBERNETES | {"JAX_NUM_PROCESSES": "2", "JOB_COMPLETION_INDEX": "0"}],
    ):
        found = {secret(ADDRESS, environ) for environ in environs}
        (one,) = found
        assert one is not None
