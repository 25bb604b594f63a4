"""Frozen weights in blocks of 8 or 4 bits, each with a scale."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from zinf.adapt.forms import CODES, FORMS, Form, Name


@dataclass(frozen=True)
class Encoding:
    """How a weight is stored: rows of blocks.

    A weight's leading `stack` dims stay dims, so that a row of a stack is read alone.
    The rest is flattened, and filled up with zeros to whole blocks.

    Attributes:
        name: of a form in `FORMS`.
        block: numbers that share a scale.
        is_turned: the last two dims are stored in the other order.
        tensors: how many tensors of the same size make a row of the stack, one after
            the other. Each has its own entry in arrays for all of its blocks.
    """

    name: Name
    block: int
    stack: int = 0
    is_turned: bool = False
    tensors: int = 1

    @property
    def form(self) -> Form:
        return FORMS[self.name]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays that a weight is stored as; the codes come first."""
        return (CODES, *self.form.scales, *self.form.whole)

    @property
    def bits(self) -> int:
        return self.form.bits

    def stacked(self, stack: int, shape: tuple[int, ...]) -> "Encoding":
        """That of a weight of a shape whose leading dims stay dims; here none does."""
        tensors = self.tensors // prod(shape[:stack])
        return replace(self, stack=stack, tensors=max(1, tensors))

    def shapes(self, shape: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the arrays that a weight of this shape is stored as."""
        lead = shape[: self.stack]
        count = -(-prod(shape[self.stack :]) // self.block)
        width = self.block * self.bits // 8
        found = {CODES: jax.ShapeDtypeStruct((*lead, count, width), self.form.dtype)}
        for name, dtype in self.form.scales.items():
            found[name] = jax.ShapeDtypeStruct((*lead, count), dtype)
        for name, dtype in self.form.whole.items():
            found[name] = jax.ShapeDtypeStruct((*lead, self.tensors), dtype)
        return found

    def encode(self, weight: Any) -> dict[str, Any]:
        """Encode a weight as the arrays that it is stored as, by name.

        Entries must be finite.
        """
        lead = weight.shape[: self.stack]
        rows = jnp.asarray(weight).astype(jnp.float32)
        if self.is_turned:
            rows = rows.swapaxes(-1, -2)
        rows = rows.reshape(prod(lead), -1)
        rows = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % self.block)))
        blocks = rows.reshape(prod(lead) * self.tensors, -1, self.block)
        found = jax.vmap(self.encode_blocks)(blocks)
        return {n: x.reshape(*lead, -1, *x.shape[2:]) for n, x in found.items()}

    def encode_blocks(self, blocks: Any) -> dict[str, Any]:
        """The arrays of one tensor, of its blocks float32 [blocks, size]."""
        return dict(zip(self.names, self.form.encode(blocks), strict=True))

    def decode(self, arrays: Mapping[str, Any], shape: tuple[int, ...]) -> Any:
        """The weight, or some rows of its stack, in float32.

        Args:
            shape: that of one row, which is all of a weight without a stack.
        """
        codes = arrays[CODES]
        lead, flat = codes.shape[:-2], codes.reshape(-1, codes.shape[-1])
        scales = [arrays[name].reshape(1, -1) for name in self.form.scales]
        for name in self.form.whole:
            entries = arrays[name].reshape(-1, 1)
            shape_of_all = len(entries), len(flat) // len(entries)
            scales.append(jnp.broadcast_to(entries, shape_of_all).reshape(1, -1))
        rows = self.form.decode(flat.T, *scales).T.reshape(prod(lead), -1)
        rows = rows[:, : prod(shape)]
        if not self.is_turned:
            return rows.reshape(*lead, *shape)
        return rows.reshape(*lead, *shape[:-2], shape[-1], shape[-2]).swapaxes(-1, -2)
