"""The tensors of a base with its adapters added, and names to import a base."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from zinf.adapt.adapted import ADAPTER, BASE, Adapted
from zinf.adapt.weight import WEIGHT, merged, whole
from zinf.checkpoint.grid import whole_box
from zinf.checkpoint.saved import Saved
from zinf.core.config.adapter import Adapter
from zinf.core.engine.engine import Engine
from zinf.core.interchange.sources import parameters
from zinf.core.interchange.tensors import AbstractTensors
from zinf.core.program import ArraySpec
from zinf.core.sharding import Box


class MergedTensors(AbstractTensors):
    """The user's parameters with the adapters added, read from an engine or checkpoint.

    `zinf.interchange.export_safetensors` writes them. A weight is merged whole, or a
    row of its stack at a time.
    """

    copies = 4

    def __init__(
        self, adapted: Adapted, source: Engine | Saved | AbstractTensors
    ) -> None:
        self._layout, self._inner = adapted.layout, parameters(source)
        targets, kept = adapted.layout.targets, self._inner.specs
        # A checkpoint may have weights decoded that are kept in few bits now.
        decoded = [path for path in targets if f"{BASE}/{path}" in kept]
        plain = {path: replace(targets[path], encoding=None) for path in decoded}
        self._targets = {**targets, **plain}
        # A merged weight has the dtype that the base is kept in.
        self.specs = {p: self._spec(p) for p in adapted.layout.specs}
        state = (p for p in self._inner.specs if p.startswith("model_state/"))
        self._state = frozenset(state)
        self.specs |= {p: self._inner.specs[p] for p in self._state}

    def block(self, name: str) -> tuple[int, ...]:
        target = self._targets.get(name)
        if target is None:
            return self._inner.block(self._path(name))
        sizes = tuple(max(1, size) for size in target.shape)
        return (1, *sizes[1:]) if 0 in target.lead else sizes

    def read(self, name: str, box: Box) -> np.ndarray:
        target = self._targets.get(name)
        if target is None:
            return self._inner.read(self._path(name), box)
        names = (WEIGHT,) if target.encoding is None else target.encoding.names
        base = f"{BASE}/{name}"
        paths = {n: base if n == WEIGHT else f"{base}/{n}" for n in names}
        paths |= {n: f"{ADAPTER}/{name}/{n}" for n in target.factor_shapes}
        rows = box[0] if 0 in target.lead else None
        parts = {n: jnp.asarray(self._part(path, rows)) for n, path in paths.items()}
        if rows is not None:
            target = replace(target, shape=(rows[1] - rows[0], *target.shape[1:]))
        # The factors are multiplied in float32, and the sum is rounded once.
        found = merged(whole(target, parts, "float32"))
        found = found.astype(self.specs[name].dtype)
        return np.ascontiguousarray(jax.device_get(found))

    def _part(self, path: str, rows: tuple[int, int] | None) -> np.ndarray:
        shape = self._inner.specs[path].shape
        box = whole_box(shape)
        if rows is None:
            return self._inner.read(path, box)
        # The parts of other tensors need not be cut where rows end.
        step = self._inner.block(path)[0]
        low, high = rows[0] // step * step, min(-(-rows[1] // step) * step, shape[0])
        read = [
            self._inner.read(path, ((i, min(i + step, shape[0])), *box[1:]))
            for i in range(low, high, step)
        ]
        return np.concatenate(read)[rows[0] - low : rows[1] - low]

    def _path(self, name: str) -> str:
        if name in self._state:
            return name
        return f"{ADAPTER if name in self._layout.saved else BASE}/{name}"

    def _spec(self, name: str) -> ArraySpec:
        target = self._targets.get(name)
        if target is None:
            folder = ADAPTER if name in self._layout.saved else BASE
            return self._inner.specs[f"{folder}/{name}"]
        if target.encoding is None:
            return self._inner.specs[f"{BASE}/{name}"]
        return ArraySpec(target.shape, target.dtype, jnp.dtype(target.dtype).itemsize)


def names_of_base(
    adapter: Adapter, names: Mapping[str, str] | None
) -> Callable[[str], str]:
    """A function from key path to tensor name, to import a base under an adapter.

    Args:
        names: names of tensors by key path in the user's parameters. A path that is
            absent is the name itself, with "." in place of "/".

    Raises:
        ValueError: the base is stored quantized, or the adapter uses DoRA, whose first
            values are computed from the base.
    """
    if adapter.quantize_base is not None or adapter.use_dora:
        key = "use_dora" if adapter.use_dora else "quantize_base"
        raise ValueError(
            f"adapter.{key} needs the base when the adapters are made, so no base can "
            "be imported later. Make the parameters from the file in Python, and call "
            "zinf.adapt.lora."
        )

    def name(path: str) -> str:
        own = path.partition("/")[2]
        return (names or {}).get(own, own.replace("/", "."))

    return name
