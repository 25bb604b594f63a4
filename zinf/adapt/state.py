"""The first state of an adapted model, from a base that is read in parts.

The base may be larger than memory: a quantized weight is encoded while it is read, and
an adapter's first values are made when they are asked for.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import jax
import numpy as np

from zinf.adapt.adapted import ADAPTER, BASE, Adapted
from zinf.adapt.blocks import Encoding
from zinf.adapt.forms import CODES
from zinf.adapt.lora import first_adapter
from zinf.adapt.weight import MAGNITUDE, WEIGHT, Target, lengths, stored, whole
from zinf.checkpoint.grid import whole_box
from zinf.core.interchange.names import Terms, match
from zinf.core.interchange.tensors import AbstractTensors
from zinf.core.memory.zarr_format import numpy_dtype
from zinf.core.program import ArraySpec
from zinf.core.sharding import Box
from zinf.core.sharding.mesh import first_cpu

# Numbers that are encoded at once: 5 float32 copies of them are in memory.
ENCODED_NUMBERS = 2**18
ENCODING_BYTES = 5 * 4 * ENCODED_NUMBERS
FACTOR_DTYPE = "float32"


class FirstState(AbstractTensors):
    """The arrays of `adapted.params`, by key path, when training begins.

    Args:
        base: the user's parameters, by key path, and maybe others.
        terms: which differences between `base` and the model are accepted.
        codes: weights that are there as they are stored, in tensors "PATH/PART" without
            a stack; None: all weights in few bits are encoded as they are read.

    Raises:
        ValueError: `base` lacks a parameter, or has one of another shape or dtype.
    """

    def __init__(
        self,
        adapted: Adapted,
        base: AbstractTensors,
        terms: Terms,
        codes: AbstractTensors | None = None,
    ) -> None:
        self._adapted, self._base, self._codes = adapted, base, codes
        # The numbers of the blocks of one weight, by part, while it is read.
        self._kept: tuple[str, dict[str, np.ndarray]] | None = None
        wanted = {p: _spec(x.shape, x.dtype) for p, x in adapted.layout.specs.items()}
        match(wanted, base.specs, {path: path for path in wanted}, terms)
        self.specs = {}
        # The user's parameter that each array belongs to, and which part of it.
        self._source: dict[str, tuple[str, str]] = {}
        for path in wanted:
            for name, part, spec in self._arrays(path):
                self.specs[name], self._source[name] = spec, (path, part)
        # The rows of a tensor of `codes` in each row of an array that is made of it.
        self._rows: dict[str, int] = {}
        for name, (path, part) in self._source.items():
            found = None if codes is None else codes.specs.get(f"{path}/{part}")
            if found is not None:
                self._rows[name] = found.shape[0] // self.specs[name].shape[0]

    def _arrays(self, path: str) -> Iterator[tuple[str, str, ArraySpec]]:
        """The name, part and spec of each array that a parameter is kept as."""
        target = self._adapted.targets.get(path)
        if path in self._adapted.saved:
            yield f"{ADAPTER}/{path}", WEIGHT, self._base.specs[path]
            return
        if target is None or target.encoding is None:
            yield f"{BASE}/{path}", WEIGHT, self._base.specs[path]
        else:
            # Codes come first: they are encoded with the numbers of their blocks,
            # which wait for their turn.
            for part, x in target.encoding.shapes(target.shape).items():
                yield f"{BASE}/{path}/{part}", part, _spec(x.shape, x.dtype)
        if target is not None:
            for part, shape in target.factor_shapes.items():
                yield f"{ADAPTER}/{path}/{part}", part, _spec(shape, FACTOR_DTYPE)

    def block(self, name: str) -> tuple[int, ...]:
        path, part = self._source[name]
        sizes = tuple(max(1, size) for size in self.specs[name].shape)
        if name in self._rows:
            assert self._codes is not None
            rows = self._codes.block(f"{path}/{part}")[0] // self._rows[name]
            return (max(1, rows), *sizes[1:])
        if part == WEIGHT:
            return self._base.block(path)
        target = self._adapted.targets[path]
        if part == MAGNITUDE:
            if not _has_lengths_by_row(target):
                return sizes
            rows = 1 if target.lead else self._base.block(path)[0]
            return (min(rows, sizes[0]), *sizes[1:])
        if part == CODES:
            assert target.encoding is not None
            rows = min(self._base.block(path)[0], target.shape[0])
            if not target.encoding.stack and rows < target.shape[0]:
                row = prod(target.shape[1:])
                rows = max(1, rows * row // target.encoding.block)
            elif not target.encoding.stack:
                rows = sizes[0]
            return (rows, *sizes[1:])
        return sizes

    def copies_of(self, name: str) -> int:
        path, part = self._source[name]
        if name in self._rows:
            assert self._codes is not None
            return self._codes.copies_of(f"{path}/{part}")
        if part == WEIGHT:
            return self._base.copies_of(path)
        if part not in (CODES, MAGNITUDE):
            return 1
        target, spec = self._adapted.targets[path], self.specs[name]
        share = self.block(name)[0] / max(1, spec.shape[0])
        own = prod(self.block(name)) * spec.itemsize
        read = share * prod(target.shape)
        itemsize = self._base.specs[path].itemsize * self._base.copies_of(path)
        if part == CODES:
            held = read * itemsize + ENCODING_BYTES
        else:
            held = read * (itemsize + 3 * np.dtype(FACTOR_DTYPE).itemsize)
        return 1 + -int(-held // own)

    def read(self, name: str, box: Box) -> np.ndarray:
        path, part = self._source[name]
        if name in self._rows:
            return self._as_stored(name, box[0])
        if part == WEIGHT:
            loaded = self._adapted.loaded
            if loaded is None or path not in self._adapted.saved:
                return self._base.read(path, box)
            return np.asarray(loaded[path])[tuple(slice(*edges) for edges in box)]
        if part == CODES:
            return self._encoded(path, box[0])
        target = self._adapted.targets[path]
        if target.encoding is not None and part in target.encoding.names:
            return self._kept_part(path, part)[slice(*box[0])]
        loaded = self._adapted.loaded
        if loaded is not None:
            return np.array(loaded[path][part])[slice(*box[0])]
        if part == MAGNITUDE:
            return self._lengths(path, box[0])
        # Not on an accelerator, whose random numbers may differ in the last bit.
        with jax.default_device(first_cpu()):
            plain = replace(target, is_dora=False)
            found = first_adapter(plain, self._adapted.adapter, None)
        return np.array(found[part])[slice(*box[0])]

    def _as_stored(self, name: str, rows: tuple[int, int]) -> np.ndarray:
        """Some rows of an array of an encoding, as `codes` has them."""
        assert self._codes is not None
        source, each = "/".join(self._source[name]), self._rows[name]
        rest = whole_box(self._codes.specs[source].shape)[1:]
        found = self._codes.read(source, ((rows[0] * each, rows[1] * each), *rest))
        return found.reshape(rows[1] - rows[0], *self.specs[name].shape[1:])

    def _encoded(self, path: str, rows: tuple[int, int]) -> np.ndarray:
        """Some rows of codes. The numbers of their blocks are kept until read."""
        target = self._adapted.targets[path]
        assert target.encoding is not None
        shapes = target.encoding.shapes(target.shape)
        numbers = [name for name in shapes if name != CODES]
        if self._kept is None or self._kept[0] != path:
            zeros = {n: np.zeros(shapes[n].shape, shapes[n].dtype) for n in numbers}
            self._kept = path, zeros
        blocks = self._blocks(path, rows)
        codes = np.empty((rows[1] - rows[0], *shapes[CODES].shape[1:]), np.uint8)
        codes = codes.view(shapes[CODES].dtype)
        flat = codes.reshape(-1, codes.shape[-1])
        kept = {n: self._kept[1][n][slice(*rows)].reshape(-1) for n in numbers}
        count = max(1, ENCODED_NUMBERS // target.encoding.block)
        for start in range(0, len(flat), count):
            part = slice(start, start + count)
            taken = jax.device_put(np.float32(blocks[part]), first_cpu())
            found = _encode(target.encoding)(taken)
            flat[part] = found[CODES]
            for name in numbers:
                kept[name][part] = found[name]
        return codes

    def _blocks(self, path: str, rows: tuple[int, int]) -> np.ndarray:
        """The unencoded numbers of the blocks of some rows of codes, [count, block]."""
        target = self._adapted.targets[path]
        assert target.encoding is not None
        block, stack = target.encoding.block, target.encoding.stack
        rest = whole_box(target.shape)[1:]
        if stack:
            found = self._base.read(path, (rows, *rest))
            found = found.reshape(prod(found.shape[:stack]), -1)
            missing = -found.shape[1] % block
            if missing:
                found = np.pad(found, ((0, 0), (0, missing)))
            return found.reshape(-1, block)
        row = prod(target.shape[1:])
        first, last = rows[0] * block, rows[1] * block
        low, high = first // row, min(-(-last // row), target.shape[0])
        flat = self._base.read(path, ((low, high), *rest)).reshape(-1)
        flat = flat[first - low * row : last - low * row]
        if len(flat) < last - first:
            flat = np.pad(flat, (0, last - first - len(flat)))
        return flat.reshape(-1, block)

    def _kept_part(self, path: str, part: str) -> np.ndarray:
        assert self._kept is not None and self._kept[0] == path, "codes come first"
        return self._kept[1][part]

    def _lengths(self, path: str, rows: tuple[int, int]) -> np.ndarray:
        """The L2 norms of the columns of the weight as the loss will see it."""
        target = self._adapted.targets[path]
        is_by_row = _has_lengths_by_row(target)
        taken = rows if is_by_row else (0, target.shape[0])
        shape = (taken[1] - taken[0], *target.shape[1:])
        part = replace(target, shape=shape, r=0, is_dora=False)
        weight = self._base.read(path, (taken, *whole_box(target.shape)[1:]))
        with jax.default_device(first_cpu()):
            parts = {WEIGHT: jax.device_put(weight, first_cpu())}
            if f"{BASE}/{path}/{CODES}" in self._rows:
                part = replace(part, encoding=None)  # The base has decoded it.
            elif target.encoding is not None:
                parts = target.encoding.encode(parts[WEIGHT])
            found = np.array(lengths(stored(whole(part, parts, target.dtype)), part))
        return found if is_by_row else found[slice(*rows)]


def _has_lengths_by_row(target: Target) -> bool:
    """Whether row i of a weight alone gives entry i of its magnitude vector."""
    if target.lead:
        return target.lead[0] == 0
    # Blocks of an encoding may go across rows.
    return target.contraction.outputs[0] == 0 and target.encoding is None


@cache
def _encode(encoding: Encoding) -> Callable[[Any], dict[str, Any]]:
    return jax.jit(encoding.encode_blocks)


def _spec(shape: tuple[int, ...], dtype: Any) -> ArraySpec:
    name = str(dtype)
    return ArraySpec(tuple(shape), name, numpy_dtype(name).itemsize)
