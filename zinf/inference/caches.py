"""The caches of a streamed run: made, copied from row to row, and freed."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf.core.memory import Stores, gathered, to_devices, to_shares
from zinf.core.plan import cache
from zinf.core.program import Tier
from zinf.core.sharding import Layout
from zinf.inference.plan import Generation
from zinf.inference.rows import NO_AXIS


class Caches:
    """The caches of all microbatches, which exist in the `with` block.

    Attributes:
        host_bytes: the budget of the host.
        names: the leaves that segments overwrite where they rest.
        passed: the others, by microbatch and name: they go in and out of each program
            through the host.
    """

    def __init__(self, planned: Generation, stores: Stores, host_bytes: int):
        self.planned, self.stores, self.host_bytes = planned, stores, host_bytes
        self.tiers = planned.decode.cache_tiers
        self.names = set(planned.decode.segmented.program.caches)
        self.passed: list[dict[str, np.ndarray]] = [
            {} for _ in range(planned.num_microbatches)
        ]

    def __enter__(self) -> "Caches":
        values = self.planned.decode.segmented.program.values
        try:
            for m, passed in enumerate(self.passed):
                for name in self.planned.axes:
                    dtype, shape = jnp.dtype(values[name].dtype), values[name].shape
                    if name in self.names:
                        shape = self._layout(name).share_shape
                        self._keep(name, m, np.zeros(shape, dtype))
                    else:
                        passed[name] = np.zeros(shape, dtype)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name, tier in self.tiers.items():
            for m in range(self.planned.num_microbatches):
                if self.stores[tier].contains(cache(name, m)):
                    self.stores[tier].free(cache(name, m))

    def _home(self, name: str) -> Any:
        return self.stores[self.tiers[name]]

    def _layout(self, name: str) -> Layout:
        return self.planned.decode.layouts.values[name]

    @property
    def passed_names(self) -> list[str]:
        """The names of the leaves in `passed`, in the order of programs' results."""
        return [name for name in self.planned.axes if name not in self.names]

    def pass_rows(
        self, m: int, leaves: Mapping[str, np.ndarray], rows: Sequence[int]
    ) -> None:
        """Keep some rows of the leaves that a pass returned."""
        own = [row % self.planned.shape.rows for row in rows]
        for name, leaf in leaves.items():
            axis, kept = self.planned.axes[name], np.array(self.passed[m][name])
            if axis == NO_AXIS:
                kept[...] = leaf
            else:
                np.moveaxis(kept, axis, 0)[own] = np.moveaxis(leaf, axis, 0)[own]
            self.passed[m][name] = kept

    def can_copy(self) -> bool:
        """Whether the host has room for a leaf of the caches of all microbatches."""
        held = self.planned.decode.plan.home_bytes[Tier.HOST]
        return self._copied_bytes() <= self.host_bytes - held

    def _copied_bytes(self) -> int:
        return (1 + self.planned.num_microbatches) * self.planned.leaf_bytes()

    def copy_rows(self, sources: Mapping[int, int]) -> None:
        """Give rows the caches of other rows."""
        nbytes, ledger = self._copied_bytes(), self.stores.host.ledger
        ledger.reserve(nbytes, "a leaf of the caches of all microbatches")
        try:
            for name, axis in self.planned.axes.items():
                self._copy_leaf(name, axis, sources)
        finally:
            ledger.release(nbytes)

    def _copy_leaf(self, name: str, axis: int, sources: Mapping[int, int]) -> None:
        num_rows = self.planned.shape.rows
        # No row is read after it was written: a source is never written.
        read = {row // num_rows for row in sources.values()}
        contents = {m: self._content(name, m) for m in read}
        for m in sorted({row // num_rows for row in sources}):
            content = contents.get(m)
            content = self._content(name, m) if content is None else content
            for row in self.planned.of_microbatch(m):
                if row not in sources:
                    continue
                number, place = divmod(sources[row], num_rows)
                if axis == NO_AXIS:
                    content[...] = contents[number]
                else:
                    of = np.moveaxis(contents[number], axis, 0)
                    np.moveaxis(content, axis, 0)[row % num_rows] = of[place]
            self._replace(name, m, content)

    def _content(self, name: str, m: int) -> np.ndarray:
        """A copy of a leaf of the cache of a microbatch, whole."""
        if name not in self.names:
            return np.array(self.passed[m][name])
        layout = self._layout(name)
        found = self._home(name).read(cache(name, m)).result()
        if isinstance(found, jax.Array):
            (found,) = to_shares([found], [layout])
        elif layout.is_whole:
            found = np.array(found)
        return gathered(found, layout)

    def _replace(self, name: str, m: int, content: np.ndarray) -> None:
        if name in self.names:
            self._keep(name, m, self._layout(name).take_share(content))
        else:
            self.passed[m][name] = content

    def _keep(self, name: str, m: int, share: np.ndarray) -> None:
        """Write this process's share of a leaf of the caches where it rests."""
        array, kept = cache(name, m), [share]
        if self.tiers[name] == Tier.DEVICE:
            kept = to_devices(kept, [self._layout(name)])
        self._home(name).write(array, kept[0]).result()
