"""Programs as plain data: segments, the arrays that each reads, and leaves."""

from dataclasses import dataclass, field

from zinf.core.program.array import ArrayId, ArraySpec, Role, Rows
from zinf.core.program.chosen import Chosen

# The name of the random key among the values of a program.
KEY = "key"


@dataclass(frozen=True, slots=True)
class Leaf:
    """A parameter leaf; if it has `num_layers`, each layer is its own array."""

    path: str
    spec: ArraySpec
    is_trainable: bool
    num_layers: int | None = None

    def arrays(self) -> tuple[ArrayId, ...]:
        """The parameter arrays of this leaf: one, or one for each row."""
        return self.pieces(ArrayId(Role.PARAM, self.path))

    def pieces(self, whole: ArrayId) -> tuple[ArrayId, ...]:
        """The arrays that store `whole`, an array of this leaf of any role."""
        if self.num_layers is None:
            return (whole,)
        return tuple(whole.piece((i, i + 1)) for i in range(self.num_layers))

    def array_spec(self) -> ArraySpec:
        """The spec of each of `arrays()`."""
        return self.spec.piece(None if self.num_layers is None else (0, 1))


@dataclass(frozen=True, slots=True)
class Tiling:
    """A leaf that is read by tile, since it is larger than a segment may be.

    Attributes:
        nbytes: bytes of the leaf.
        limit_bytes: the most bytes of parameters that a segment may have.
        edges: the rows where tiles begin and end, from 0 to the number of rows.
        uses: how tiles are combined at each read of the leaf.
    """

    path: str
    nbytes: int
    limit_bytes: int
    edges: tuple[int, ...]
    uses: tuple[str, ...] = ()

    @property
    def tiles(self) -> list[tuple[int, int]]:
        """The rows of each tile."""
        return list(zip(self.edges[:-1], self.edges[1:], strict=True))


@dataclass(frozen=True, slots=True)
class RowSum:
    """A gradient that a backward pass returns as rows; all its other rows are zero.

    Attributes:
        array: the parameter array, (V, ...).
        rows: spec of the rows, of shape `numbers.shape[:-1]` and the row's own. Rows
            with equal numbers are summed.
        numbers: spec of the row numbers, integers (..., 1). Rows whose number is not
            that of a row of `array` are dropped.
    """

    array: ArrayId
    rows: ArraySpec
    numbers: ArraySpec


@dataclass(frozen=True, slots=True)
class SegmentSpec:
    """A piece of the program that runs as one executable per pass.

    Attributes:
        params: parameter arrays, in argument order.
        trainable: for each of `params`, whether it gets a gradient.
        inputs: names of the values and caches that the segment only reads, in argument
            order.
        outputs: names of the values that it computes.
        active_inputs: the inputs that get a cotangent.
        active_outputs: the outputs whose cotangents its backward pass takes.
        body: number of its executable; equal segments share one.
        flops: floating-point operations of one forward pass.
        backward_params: the parameter arrays that its backward pass reads; None if that
            is unknown. A bias, or a table of embeddings, is not needed for gradients.
        row_blocks: least number of blocks of rows that its passes run in. It is above 1
            if intermediate values are too large for the device.
        row_sums: the gradients that its backward pass returns as rows.
        in_parts: the trained arrays whose gradients its backward pass returns as one
            partial sum a device.
        caches: names of the caches that it reads and overwrites. They follow `inputs`
            among its arguments, and `outputs` among its results.
        microbatches: those that pass through it; None: all.
    """

    name: str
    params: tuple[ArrayId, ...]
    trainable: tuple[bool, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    active_inputs: tuple[str, ...]
    active_outputs: tuple[str, ...]
    body: int
    flops: int
    backward_params: tuple[ArrayId, ...] | None = None
    row_blocks: int = 1
    row_sums: tuple[RowSum, ...] = ()
    in_parts: tuple[ArrayId, ...] = ()
    caches: tuple[str, ...] = ()
    microbatches: tuple[int, ...] | None = None

    def runs(self, microbatch: int) -> bool:
        """Whether a microbatch passes through it."""
        return self.microbatches is None or microbatch in self.microbatches

    @property
    def read_backward(self) -> tuple[ArrayId, ...]:
        """The parameter arrays that its backward pass reads, or all if unknown."""
        known = self.backward_params
        return self.params if known is None else known

    @property
    def has_backward(self) -> bool:
        return bool(self.active_outputs)

    @property
    def trained_params(self) -> tuple[ArrayId, ...]:
        pairs = zip(self.params, self.trainable, strict=True)
        return tuple(array for array, trained in pairs if trained)


@dataclass(frozen=True, slots=True)
class Program:
    """A function cut into segments.

    Attributes:
        values: the spec of every value that crosses a cut, and of batch and constants.
        batch: names of the values that differ by microbatch (batch leaves and the
            random key).
        consts: names of the arrays that the loss function closed over; they stay on the
            device.
        outputs: names of the values that the function returns, in flattened order. One
            name may occur more than once.
        is_trained: whether the first output is a loss with a backward pass. Then all
            outputs are those of the last segment, which runs forward and backward at
            once. Otherwise each output is made by the segment that computes it, and all
            segments only run forward.
        tilings: leaves that are read by tile.
        untiled: why other leaves larger than a segment may be are not read by tile, by
            path.
        caches: names of the arrays that the program overwrites where they rest. Each
            microbatch has its own. They are neither in `batch` nor in `outputs`.
        chosen: the experts that are read on demand. Their slots are among `consts`.
    """

    leaves: tuple[Leaf, ...]
    segments: tuple[SegmentSpec, ...]
    values: dict[str, ArraySpec] = field(repr=False)
    batch: tuple[str, ...]
    consts: tuple[str, ...]
    outputs: tuple[str, ...]
    is_trained: bool = True
    tilings: tuple[Tiling, ...] = ()
    untiled: dict[str, str] = field(default_factory=dict)
    caches: tuple[str, ...] = ()
    chosen: tuple[Chosen, ...] = ()

    @property
    def loss(self) -> str:
        """The name of the first output."""
        return self.outputs[0]

    def outputs_of(self, microbatch: int) -> tuple[str, ...]:
        """The outputs that are made for a microbatch, in flattened order."""
        absent = {
            name
            for segment in self.segments
            if not segment.runs(microbatch)
            for name in segment.outputs
        }
        return tuple(name for name in self.outputs if name not in absent)

    @property
    def batch_leaves(self) -> tuple[str, ...]:
        """The names in `batch` without the random key."""
        return tuple(name for name in self.batch if name != KEY)

    @property
    def slots(self) -> frozenset[str]:
        """The names of the constants that are slots of experts, at first of zeros."""
        return frozenset(name for each in self.chosen for name in each.slots)

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(self.values[name].nbytes for name in self.slots)

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the values that say in which slots experts are."""
        return tuple(each.table for each in self.chosen)

    def first_readers(self) -> dict[tuple[str, Rows], int]:
        """The first segment that reads each parameter, by path and rows.

        Leaves that are read by rows also have an entry for the whole leaf.
        """
        found: dict[tuple[str, Rows], int] = {}
        for k, segment in enumerate(self.segments):
            for array in segment.params:
                for rows in (array.rows, None):
                    found.setdefault((array.path, rows), k)
        return found
