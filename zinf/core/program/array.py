"""The names and shapes of arrays, the same on every tier."""

import re
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod

FLOAT32_BYTES = 4


class Role(StrEnum):
    """The purpose of an array, which is the first part of its name.

    Arrays of the roles PARAM, MASTER, STATE, SUM and ERROR persist between steps and
    are saved in checkpoints.
    """

    PARAM = "param"  # A parameter in the dtype that the loss computes with.
    MASTER = "master"  # The parameter in the dtype that updates use, if it differs.
    STATE = "state"  # Optimizer state; `ArrayId.slot` numbers the arrays of a leaf.
    SUM = "sum"  # What `Engine.forward_backward` adds gradients to.
    ERROR = "error"  # What an exchange of parts lost, one a device, by `ArrayId.slot`.
    CONST = "const"  # An array that the loss function closed over.
    VALUE = "value"  # A value that crosses a cut, or a part of the batch.
    CACHE = "cache"  # State that runs of a program read and overwrite at its home.
    COTANGENT = "cotangent"  # The cotangent of a value.
    COTANGENT_PART = "cotangent part"  # One contribution, to be added to the cotangent.
    GRADIENT = "gradient"  # The gradient of a parameter array.
    GRADIENT_PART = "gradient part"  # One contribution, to be added to the gradient.
    PARTS = "parts"  # A gradient as one partial sum a device, before their exchange.
    PARTS_PART = "parts part"  # One contribution, to be added to the parts.
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
    def layout_role(self) -> "Role":
        """The role whose arrays are sharded on the devices like arrays of this role."""
        return LAYOUT_ROLES.get(self, self)


PARTS = {
    Role.COTANGENT: Role.COTANGENT_PART,
    Role.GRADIENT: Role.GRADIENT_PART,
    Role.PARTS: Role.PARTS_PART,
}
TOTALS = {part: total for total, part in PARTS.items()}
LAYOUT_ROLES = {
    Role.CONST: Role.VALUE,
    Role.CACHE: Role.VALUE,
    Role.COTANGENT: Role.VALUE,
    Role.COTANGENT_PART: Role.VALUE,
    Role.GRADIENT_PART: Role.GRADIENT,
    Role.PARTS_PART: Role.PARTS,
}
# Kinds of persistent arrays; state of optimizers and errors have a number: "state0".
PERSISTENT = re.compile(
    r"(param|master|sum|(?:state|error)(?=[0-9]))"
    r"((?:(?<=state)|(?<=error))(?:0|[1-9][0-9]*))?"
)


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
            order: they are printed as "state0", "state1", ... For errors, the level of
            the exchange.
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
    def layout_array(self) -> "ArrayId":
        """The whole array that is sharded on the devices like this one or its whole."""
        return ArrayId(self.role.layout_role, self.path, slot=self.slot)
