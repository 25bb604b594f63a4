"""Finds which process of the run this is: from flags, or a launcher's environment.

This is the only file of zinf that reads the environment, and only when called. jax
detects some of these launchers too, but reports what it found only after it has
connected, too late for an error that names the launcher. It knows neither Open MPI 5
nor MPICH.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from zinf.distributed.seat import JoinError, Seat

COORDINATOR = "JAX_COORDINATOR_ADDRESS"
NUM_PROCESSES = "JAX_NUM_PROCESSES"
SECRET = "ZINF_SECRET"
# The port of a Slurm job is one of these; the numbers of job and step choose it.
FIRST_PORT, NUM_PORTS = 61440, 4096


@dataclass(frozen=True, slots=True)
class Flags:
    """Flags of the command line; None if the user did not give one."""

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    local_devices: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class _Launcher:
    """Environment variables in which a launcher tells a process its place."""

    name: str
    index: str
    count: str
    local_index: str | None = None
    local_count: str | None = None
    mark: str | None = None  # if unset, the rest was set for a shell around the run
    run: tuple[str, ...] = ()  # together they identify this run


SLURM = _Launcher(
    "srun",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_LOCALID",
    mark="SLURM_STEP_NODELIST",
    run=("SLURM_JOB_ID", "SLURM_STEP_ID"),
)
LAUNCHERS = (
    _Launcher("environment", "JAX_PROCESS_ID", NUM_PROCESSES),
    _Launcher("Kubernetes", "JOB_COMPLETION_INDEX", NUM_PROCESSES),
    # mpirun comes before srun: inside a Slurm allocation Open MPI starts its daemons
    # with srun, so the variables of both are set.
    _Launcher(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        # Open MPI 4 gives all processes the same random number in the first variable;
        # 4 and 5 set the second one.
        run=("OMPI_MCA_orte_precondition_transports", "PMIX_NAMESPACE"),
    ),
    SLURM,
    _Launcher("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Launcher(
        "torchrun",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        run=("TORCHELASTIC_RUN_ID",),
    ),
)


def find_seat(flags: Flags, environ: Mapping[str, str]) -> Seat | None:
    """The place of this process; None if it is the only process of the run.

    A flag overrides the value of the launcher, so `--coordinator` can add an address
    that the launcher does not tell.

    Raises:
        JoinError: Some of the needed values are missing, or a value is invalid.
    """
    launcher = next((one for one in LAUNCHERS if _speaks(one, environ)), None)
    by_hand = flags.num_processes is not None and flags.process_id is not None
    if by_hand:
        launcher = None  # its local index does not fit indices given by hand
    count, index = flags.num_processes, flags.process_id
    if launcher is not None:
        count = _number(launcher.count, environ) if count is None else count
        index = _number(launcher.index, environ) if index is None else index
    coordinator = flags.coordinator or _coordinator(launcher, environ)
    if count == 1 or (count, index, coordinator) == (None, None, None):
        return None
    name = "flags" if launcher is None else launcher.name
    if count is None or index is None or coordinator is None:
        raise JoinError(_half(name, coordinator, count, index))
    devices = flags.local_devices
    if devices is None:
        devices = () if launcher is None else _own_devices(launcher, environ)
    return Seat(name, coordinator, count, index, devices, *_token(launcher, environ))


def _token(launcher: _Launcher | None, environ: Mapping[str, str]) -> tuple[str, bool]:
    """The token of the run, and whether others cannot guess it.

    Without ZINF_SECRET it is made from the name of the run, which keeps out strays
    (port scanners, processes of other runs), but no attacker.
    """
    if f"{SECRET}_FILE" in environ:
        raise JoinError(f"{SECRET}_FILE is not read. Set {SECRET} to the file's text.")
    if SECRET in environ:
        text = environ[SECRET].strip()
        if not text:
            raise JoinError(
                f"{SECRET} is empty; it must be a text that only the processes of this "
                "run know, such as 32 random letters."
            )
        return text, True
    # The processes of a heterogeneous Slurm job differ in SLURM_JOB_ID.
    is_named = launcher is not None and "SLURM_HET_SIZE" not in environ
    names = [name for name in launcher.run if name in environ] if is_named else []
    return " ".join(["zinf", *(f"{name}={environ[name]}" for name in names)]), False


def _speaks(launcher: _Launcher, environ: Mapping[str, str]) -> bool:
    needed = (launcher.index, launcher.count, launcher.mark or launcher.index)
    return all(name in environ for name in needed)


def _number(name: str, environ: Mapping[str, str]) -> int:
    text = environ[name]
    if not text.strip().isdecimal():
        raise JoinError(f"{name} in the environment is {text!r}; it must be a number.")
    return int(text)


def _coordinator(launcher: _Launcher | None, environ: Mapping[str, str]) -> str | None:
    if COORDINATOR in environ:
        return environ[COORDINATOR]
    if launcher is not None and launcher.name == "torchrun":
        if {"MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
            return f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    if launcher is SLURM:
        # Steps of one job may run at the same time, so the port depends on the step.
        run = sum(int(environ.get(f"SLURM_{of}_ID", "0")) for of in ("JOB", "STEP"))
        host = first_host(environ["SLURM_STEP_NODELIST"])
        return f"{host}:{FIRST_PORT + run % NUM_PORTS}"
    return None


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: "node[007-009,12],login" -> "node007"."""
    found = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodes)
    if found is None:
        raise JoinError(f"SLURM_STEP_NODELIST is {nodes!r}, which names no host.")
    return "".join(part or "" for part in found.groups())


def _own_devices(launcher: _Launcher, environ: Mapping[str, str]) -> tuple[int, ...]:
    """One accelerator per process if the host has several processes; else () for all.

    Also () if CUDA_VISIBLE_DEVICES names one accelerator: the launcher has then given
    each process its own, and each process sees it as number 0.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if launcher.local_index not in environ or (visible and "," not in visible):
        return ()
    return (
        ()
        if _local_count(launcher, environ) == 1
        else (_number(launcher.local_index, environ),)
    )


def _local_count(launcher: _Launcher, environ: Mapping[str, str]) -> int | None:
    """Number of processes on this host; None if the launcher does not tell it."""
    if launcher is SLURM:
        nodes = _tasks_of_nodes(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
        node = int(environ.get("SLURM_NODEID", "0"))
        return nodes[node] if node < len(nodes) else None
    name = launcher.local_count
    return _number(name, environ) if name in environ else None


def _tasks_of_nodes(text: str) -> list[int]:
    """Numbers of tasks per node: Slurm's "2(x3),1" -> [2, 2, 2, 1]."""
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in runs for _ in range(int(times or 1))]


def _half(name: str, coordinator: str | None, count: int | None, index: int | None):
    known = {
        "--coordinator": coordinator,
        "--num-processes": count,
        "--process-id": index,
    }
    found = [f"{flag} {value}" for flag, value in known.items() if value is not None]
    missing = [flag for flag, value in known.items() if value is None]
    hint = (
        f" (or set {COORDINATOR}): HOST:PORT, an address of process 0 and a free port"
        if coordinator is None
        else " (or start with srun, which tells it)"
    )
    return (
        f"This process is one of several, but not enough is known to join them: found "
        f"{', '.join(found)} ({name}). Give {' and '.join(missing)} too{hint}."
    )
