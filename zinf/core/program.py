"""The terms that all packages share: tiers, array names, and programs as plain data.

Nothing here imports jax or numpy, so that `plan` can be built and tested without them.
"""

import re
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod

FLOAT32_BYTES = 4
# The name of the random key among the values of a program.
KEY = "key"


class Tier(StrEnum):
    """Where bytes rest, fastest first."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


BUDGETS = {
    Tier.DEVICE: "memory.device",
    Tier.HOST: "memory.host",
    Tier.NVME: "memory.nvme_capacity",
}
"""The config key that sets the budget of each tier."""


class Role(StrEnum):
    """The purpose of an array, which is the first part of its name.

    Arrays of the roles PARAM, MASTER and STATE persist between steps and are saved in
    checkpoints.
    """

    PARAM = "param"  # A parameter in the dtype that the loss computes with.
    MASTER = "master"  # The parameter in the dtype that updates use, if it differs.
    STATE = "state"  # Optimizer state; `ArrayId.slot` numbers the arrays of a leaf.
    CONST = "const"  # An array that the loss function closed over.
    VALUE = "value"  # A value that crosses a cut, or a part of the batch.
    CACHE = "cache"  # State that runs of a program read and overwrite at its home.
    COTANGENT = "cotangent"  # The cotangent of a value.
    COTANGENT_PART = "cotangent part"  # One contribution, to be added to the cotangent.
    GRADIENT = "gradient"  # The gradient of a parameter array.
    GRADIENT_PART = "gradient part"  # One contribution, to be added to the gradient.
    GRADIENT_ROWS = "gradient rows"  # Rows of a `RowSum`, to be added to the gradient.
    ROW_NUMBERS = "row numbers"  # The places of those rows in the gradient.
    NORM = "norm"  # A sum of squares of gradients.
    RESIDUAL = "residual"  # Saved by a forward pass for the backward pass.

    @property
    def part(self) -> "Role":
        """The role of contributions to an array of this role."""
        return PARTS[self]

    @property
    def total(self) -> "Role | None":
        """The role of the sum that a part of this role is added to; None if no part."""
        return TOTALS.get(self)

    @property
    def lies_as(self) -> "Role":
        """The role whose arrays are sharded on the devices like arrays of this role."""
        return LIES_AS.get(self, self)


PARTS = {
    Role.COTANGENT: Role.COTANGENT_PART,
    Role.GRADIENT: Role.GRADIENT_PART,
}
TOTALS = {part: total for total, part in PARTS.items()}
LIES_AS = {
    Role.CONST: Role.VALUE,
    Role.CACHE: Role.VALUE,
    Role.COTANGENT: Role.VALUE,
    Role.COTANGENT_PART: Role.VALUE,
    Role.GRADIENT_PART: Role.GRADIENT,
}
# Kinds of persistent arrays; those of optimizer state have a number, as "state0".
PERSISTENT = re.compile(r"(param|master|state(?=[0-9]))((?<=state)(?:0|[1-9][0-9]*))?")


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Shape and dtype of one array; `dtype` is its NumPy (or ml_dtypes) name."""

    shape: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.itemsize

    def piece(self, rows: "Rows") -> "ArraySpec":
        """The spec of these rows of the leading dim."""
        if rows is None:
            return self
        start, stop = rows
        return ArraySpec((stop - start, *self.shape[1:]), self.dtype, self.itemsize)


Rows = tuple[int, int] | None
"""Rows `(start, stop)` of the leading dim, without `stop`; None is all rows."""


def overlaps(rows: Rows, other: Rows) -> bool:
    """Whether two selections of rows of one array have a row in common."""
    if rows is None or other is None:
        return True
    return rows[0] < other[1] and other[0] < rows[1]


def covers(rows: Rows, other: Rows) -> bool:
    """Whether `rows` has every row of `other`."""
    if rows is None or other is None:
        return rows is None
    return rows[0] <= other[0] and other[1] <= rows[1]


class _Interned(type):
    """Makes one object of each name: equal names are the same object.

    So comparing and hashing them runs no Python. Planning does both a hundred million
    times for 175 billion parameters.
    """

    _made: dict[tuple, "ArrayId"] = {}

    def __call__(
        cls,
        role: Role,
        path: str,
        rows: Rows = None,
        microbatch: int | None = None,
        slot: int | None = None,
    ) -> "ArrayId":
        name = role.value, path, rows, microbatch, slot
        found = cls._made.get(name)
        if found is None:
            made = super().__call__(role, path, rows, microbatch, slot)
            whole = made if rows is None else cls(role, path, None, microbatch, slot)
            object.__setattr__(made, "whole", whole)
            # Two threads may make the same name at once: both get the first one.
            found = cls._made.setdefault(name, made)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class ArrayId(metaclass=_Interned):
    """The name of an array, the same on every tier; equal names are one object.

    [Note: pieces] An array is stored and moved as a whole or in pieces, which are
    named by their rows of the leading dim. There are four kinds of pieces:

    * a layer, of a leaf that is stacked over layers (`Leaf.num_layers`): it is stored
      as its own array, with rows `(i, i + 1)`;
    * a tile, of a leaf that is larger than a segment may be (`Tiling.tiles`);
    * an update block, which one call updates (`ArrayUpdate.block`), of an array that is
      neither a layer nor a tile;
    * a stripe, which a checkpoint saves and restores at once (`checkpoint.share`).

    Attributes:
        role: the purpose of the array.
        path: the key path of a parameter, such as "blocks/0/mlp/kernel", or the name of
            a value of the program.
        rows: rows of the leading dim; None is the whole array. See [Note: pieces].
        microbatch: the microbatch of a value that exists once in each; else None.
        slot: the place of an optimizer state array among those of its leaf, in optax's
            order: they are printed as "state0", "state1", ...
        whole: the array without its selection of rows. A field: planning 70 billion
            parameters reads it two million times.
    """

    role: Role
    path: str
    rows: Rows = None
    microbatch: int | None = None
    slot: int | None = None
    whole: "ArrayId" = field(init=False, repr=False)

    def __reduce__(self) -> tuple:
        name = self.role, self.path, self.rows, self.microbatch, self.slot
        return ArrayId, name

    def __str__(self) -> str:
        rows = f"[{self.rows[0]}:{self.rows[1]}]" if self.rows else ""
        batch = f"@{self.microbatch}" if self.microbatch is not None else ""
        return f"{self.kind}/{self.path}{rows}{batch}"

    @property
    def kind(self) -> str:
        """The role, followed by the slot of optimizer state: "param", "state0"."""
        return str(self.role) if self.slot is None else f"{self.role}{self.slot}"

    @staticmethod
    def persistent(kind: str, path: str) -> "ArrayId":
        """The whole persistent array of a `kind`, as checkpoints name it.

        Raises:
            ValueError: `kind` is not a kind of persistent array.
        """
        found = PERSISTENT.fullmatch(kind)
        if found is None:
            raise ValueError(f"{kind!r} is no kind of array that persists")
        role, slot = found.groups()
        return ArrayId(Role(role), path, slot=int(slot) if slot else None)

    def piece(self, rows: Rows) -> "ArrayId":
        """The array that has only these rows."""
        return ArrayId(self.role, self.path, rows, self.microbatch, self.slot)

    def of_role(self, role: Role) -> "ArrayId":
        """The array of another role that belongs to this one."""
        return ArrayId(role, self.path, self.rows, self.microbatch)

    @property
    def lies_as(self) -> "ArrayId":
        """The whole array that is sharded on the devices like this one or its whole."""
        return ArrayId(self.role.lies_as, self.path, slot=self.slot)


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
        caches: names of the caches that it reads and overwrites. They follow `inputs`
            among its arguments, and `outputs` among its results.
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
    caches: tuple[str, ...] = ()

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

    @property
    def loss(self) -> str:
        """The name of the first output."""
        return self.outputs[0]

    @property
    def batch_leaves(self) -> tuple[str, ...]:
        """Those of `batch` that are leaves of the batch; the random key is none."""
        return tuple(name for name in self.batch if name != KEY)

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
