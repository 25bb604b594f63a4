"""The instructions of a plan: operations on named arrays, each on one link.

A *copy* of an array is the array on one tier. Persistent arrays have a home, the tier
where they rest between steps; every other copy is made and freed within the step.
"""

from dataclasses import dataclass
from enum import StrEnum

from zinf.core.program import ArrayId, Link, Tier


class Pass(StrEnum):
    """The pass of a segment that a `Run` executes.

    `KEEPING` is a forward pass that saves residuals and `KEPT` the backward pass that
    reads them. `BACKWARD` recomputes the forward pass. `LOSS` is the forward and
    backward pass of the last segment in one executable.
    """

    FORWARD = "forward"
    KEEPING = "forward, keeping"
    BACKWARD = "backward"
    KEPT = "backward, kept"
    LOSS = "loss"


Copy = tuple[ArrayId, Tier]
# The ids of the rows of a `RowSum` and of their row numbers.
RowSumIds = tuple[ArrayId, ArrayId]


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copies arrays one tier up (a fetch) or down (an offload)."""

    arrays: tuple[ArrayId, ...]
    source: Tier
    target: Tier

    def __str__(self) -> str:
        verb = "fetch" if self.target.order < self.source.order else "offload"
        return f"{verb} {summary(self.arrays)}"


@dataclass(frozen=True, slots=True)
class Run:
    """Runs one pass of a segment on one microbatch.

    The instruction reads, in this order: the parameters of the pass, the segment's
    inputs, the cotangents of its active outputs, and residuals. It writes outputs,
    residuals, gradients of parameters, and cotangents of active inputs. For a gradient
    that is a row sum it writes the rows; the row numbers follow after all gradients. A
    forward pass reads the caches that it overwrites after its inputs, and writes them
    last.
    """

    segment: int
    name: str
    kind: Pass
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} {self.name} @{self.microbatch}"


@dataclass(frozen=True, slots=True)
class FetchChosen:
    """Brings the experts that tokens chose to slots on the device.

    It reads the choice on the host, reads what is not in a slot yet, in place of what
    was used longest ago, and writes the table of slots. It is the only instruction
    whose bytes depend on a value. All else of the plan holds for any choice.

    Attributes:
        chosen: the number of the experts in `Program.chosen`.
        name: of the segment that reads them.
        expected_bytes: bytes that it moves if all experts are equally likely and slots
            have been in use for long.
        most_at_once: experts that are read together, and no more.
    """

    chosen: int
    name: str
    microbatch: int
    expected_bytes: int
    most_at_once: int

    def __str__(self) -> str:
        return f"fetch chosen experts of {self.name} @{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Adds each source to its target on the device, in order.

    A target that does not exist yet becomes the source, cast to the accumulator's
    dtype (float32 for gradients, the source's own for cotangents). For each source that
    holds only rows of its target, `row_numbers` has the source and its row numbers.
    """

    targets: tuple[ArrayId, ...]
    sources: tuple[ArrayId, ...]
    row_numbers: tuple[RowSumIds, ...] = ()

    def __str__(self) -> str:
        return f"accumulate {summary(self.targets)}"


@dataclass(frozen=True, slots=True)
class SumParts:
    """Sums gradients over devices: exchanges the parts that each device has of them.

    The errors of each exchange are read and replaced; none without error feedback.
    """

    parts: tuple[ArrayId, ...]
    targets: tuple[ArrayId, ...]
    errors: tuple[tuple[ArrayId, ...], ...]

    def __str__(self) -> str:
        return f"exchange {summary(self.targets)}"


@dataclass(frozen=True, slots=True)
class SumSquares:
    """Writes the sum of squares of some gradients, a float32 scalar, to `target`."""

    gradients: tuple[ArrayId, ...]
    target: ArrayId

    def __str__(self) -> str:
        return f"norm {summary(self.gradients)}"


@dataclass(frozen=True, slots=True)
class Decide:
    """Reads losses and gradient norms on the host and decides how updates run.

    With norms it sets the clip factors, or skips the step on an overflow. Without norms
    it only refuses a loss that is not finite. A refused step runs to its end without
    its own updates, since deferred updates of the step before may be in flight.
    """

    losses: tuple[ArrayId, ...]
    norms: tuple[ArrayId, ...]

    def __str__(self) -> str:
        return "decide on the update: " + ("gradient norm" if self.norms else "loss")


@dataclass(frozen=True, slots=True)
class Group:
    """Updates that one executable runs on the device, in the memory of the old arrays.

    Attributes:
        arrays: the results of the updates, which rest on the device as wholes.
        workspace_bytes: device bytes that the executable takes besides.
    """

    arrays: tuple[ArrayId, ...]
    workspace_bytes: int


@dataclass(frozen=True, slots=True)
class Update:
    """Updates one unit's arrays, all of which are on `tier`.

    If `is_pending`, it uses the gradients and the decision of the step before. The
    updates of a group run together, before the others, which run one by one.
    """

    unit: int
    name: str
    tier: Tier
    is_pending: bool = False
    groups: tuple[Group, ...] = ()

    def __str__(self) -> str:
        return f"{'pending ' if self.is_pending else ''}update {self.name}"


@dataclass(frozen=True, slots=True)
class Free:
    arrays: tuple[ArrayId, ...]
    tier: Tier

    def __str__(self) -> str:
        return f"free {summary(self.arrays)} on {self.tier}"


@dataclass(frozen=True, slots=True)
class FusedStep:
    """The whole training step as one executable: everything fits on the device."""

    def __str__(self) -> str:
        return "run the whole step"


@dataclass(frozen=True, slots=True)
class OffloadedStep:
    """The whole training step as one executable that moves host arrays by itself.

    Attributes:
        h2d_bytes, d2h_bytes: what the executable moves between host and device, for
            all devices of this process.
        late_h2d_bytes, late_d2h_bytes: those of them that updates move after the last
            pass, when nothing else is computed.
    """

    h2d_bytes: int
    d2h_bytes: int
    late_h2d_bytes: int = 0
    late_d2h_bytes: int = 0

    @property
    def moved(self) -> dict[Link, int]:
        """The bytes that it moves over each link."""
        return {Link.H2D: self.h2d_bytes, Link.D2H: self.d2h_bytes}

    @property
    def moved_late(self) -> dict[Link, int]:
        """The bytes of `moved` that no pass hides."""
        return {Link.H2D: self.late_h2d_bytes, Link.D2H: self.late_d2h_bytes}

    def __str__(self) -> str:
        return "run the whole step, state on the host"


Operation = (
    Transfer
    | Run
    | FetchChosen
    | Accumulate
    | SumParts
    | SumSquares
    | Decide
    | Update
    | Free
    | FusedStep
    | OffloadedStep
)


@dataclass(frozen=True, slots=True)
class Exchange:
    """Bytes that an executable sends from one device to others.

    `hidden_bytes` are sent while it computes matmuls, `exposed_bytes` while it waits.
    """

    hidden_bytes: int = 0
    exposed_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return self.hidden_bytes + self.exposed_bytes

    def __add__(self, other: "Exchange") -> "Exchange":
        hidden = self.hidden_bytes + other.hidden_bytes
        return Exchange(hidden, self.exposed_bytes + other.exposed_bytes)


NO_EXCHANGE = Exchange()


@dataclass(frozen=True, slots=True)
class Instruction:
    """One operation of a plan.

    Attributes:
        reads, writes: the copies that it reads, and that it makes or changes.
        creates: those of `writes` that do not exist before. The others are at home, or
            replace a copy, or are rows of a copy of the whole array.
        after: indices of the instructions that must be complete before it starts:
            those that make its inputs, those that still read what it overwrites, and
            those that free the bytes it needs. All are smaller than its own index.
        allocates: bytes that it adds to each tier, kept after it completes.
        workspace: bytes that it holds on each tier only while it runs.
        nbytes: bytes that it moves over its link or frees; for an update, the bytes of
            its results; for chosen experts, the bytes that are expected.
        exchange: bytes that it sends between devices.
    """

    operation: Operation
    link: Link
    after: tuple[int, ...]
    reads: tuple[Copy, ...] = ()
    writes: tuple[Copy, ...] = ()
    creates: tuple[Copy, ...] = ()
    allocates: tuple[tuple[Tier, int], ...] = ()
    workspace: tuple[tuple[Tier, int], ...] = ()
    nbytes: int = 0
    flops: int = 0
    exchange: Exchange = NO_EXCHANGE


def summary(arrays: tuple[ArrayId, ...]) -> str:
    """A short name for a group of arrays: the first one and the number of others."""
    more = f" +{len(arrays) - 1}" if len(arrays) > 1 else ""
    return f"{arrays[0]}{more}"
