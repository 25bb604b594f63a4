"""Runs the plan of one program on a batch: stores the inputs, takes the results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf.core.jaxpr.keys import to_words
from zinf.core.memory import Stores, all_gathered, to_devices
from zinf.core.plan import Plan, initial_copies, value
from zinf.core.program import KEY, ArrayId, Program, Role
from zinf.core.segment import Segment, Segmented, named_leaves
from zinf.core.sharding import Layouts
from zinf.core.step.batch import by_microbatch
from zinf.core.step.run.chosen import ChosenExperts
from zinf.core.step.run.run import StepRecord, Work, run_plan


@dataclass(frozen=True)
class Passes:
    """Stores the inputs of a program, runs a plan, and takes the results.

    Attributes:
        spec: shapes and dtypes of one microbatch.
    """

    segmented: Segmented
    segments: Sequence[Segment]
    layouts: Layouts
    stores: Stores
    spec: Any
    num_microbatches: int

    @property
    def program(self) -> Program:
        return self.segmented.program

    def work(self) -> Work:
        """What a plan that only runs forward needs, while the constants exist."""
        return Work(segments=self.segments, layouts=self.layouts, chosen=self.chosen())

    def chosen(self) -> ChosenExperts | None:
        """The experts that are read on demand, which the slots hold from now on.

        They may hold some that an earlier program read.
        """
        if not self.program.chosen:
            return None
        slots = {}
        for names in self._slots:
            arrays = [ArrayId(Role.CONST, name) for name in names]
            zeros = [partial(self._zeros, array) for array in arrays]
            slots[names] = self.stores.device.hold_slots(arrays, zeros)
        return ChosenExperts(self.program, slots)

    @property
    def _slots(self) -> list[tuple[str, ...]]:
        return list(dict.fromkeys(each.slots for each in self.program.chosen))

    def _zeros(self, array: ArrayId) -> jax.Array:
        content, device = self.segmented.consts[array.path], self.layouts.of(array)
        return jnp.zeros(content.shape, content.dtype, device=device.device)

    def put_consts(self) -> None:
        """Put the arrays that the loss closes over on the device, to stay there.

        They may depend on the shape of the batch, as a causal mask does.
        """
        for name, content in self.segmented.consts.items():
            if name not in self.program.slots:
                self._put_on_device(ArrayId(Role.CONST, name), content)

    def free_consts(self) -> None:
        """Free them; slots of experts stay as long as nothing else needs their room."""
        device = self.stores.device
        for names in self._slots:
            device.release_slots([ArrayId(Role.CONST, name) for name in names])
        for name in self.segmented.consts:
            array = ArrayId(Role.CONST, name)
            if name not in self.program.slots and device.contains(array):
                device.free(array)

    def run(
        self,
        plan: Plan,
        work: Work,
        batch: Any,
        keys: Sequence[Any],
        seed: Any,
        record: StepRecord,
    ) -> list[list[np.ndarray]]:
        """Run `plan`; return the flattened outputs of each microbatch.

        An output is this process's share, on the host. If the run fails, the inputs
        are freed too.
        """
        named = self._named(batch)
        return self.run_on(plan, work, named, keys, seed, record)

    def run_on(
        self,
        plan: Plan,
        work: Work,
        microbatches: Sequence[Mapping[str, np.ndarray]],
        keys: Sequence[Any],
        seed: Any,
        record: StepRecord,
    ) -> list[list[np.ndarray]]:
        """`run`, given the leaves of each microbatch by the names of the program."""
        try:
            self._put(microbatches, keys)
            run_plan(plan, work, self.stores, seed, record)
        except BaseException:
            for array, tier in initial_copies(self.program, self.num_microbatches):
                if self.stores[tier].contains(array):
                    self.stores[tier].free(array)
            raise
        return self._take()

    def put(self, batch: Any, keys: Sequence[Any]) -> None:
        """Store the batch on the host and the keys on the device.

        Inputs that no segment reads are left out.
        """
        self._put(self._named(batch), keys)

    def _named(self, batch: Any) -> list[dict[str, np.ndarray]]:
        """The leaves of each microbatch, by the names that the program has for them."""
        cut = by_microbatch(batch, self.spec, self.num_microbatches)
        leaves = named_leaves(cut).items()
        return [
            {f"batch/{path}": array[m, ...] for path, array in leaves}
            for m in range(self.num_microbatches)
        ]

    def _put(
        self, microbatches: Sequence[Mapping[str, np.ndarray]], keys: Sequence[Any]
    ) -> None:
        read = {n for s in self.program.segments for n in s.inputs}
        for m, leaves in enumerate(microbatches):
            for name in read.intersection(leaves):
                share = self.layouts.values[name].own_of(leaves[name])
                self.stores.host.write(value(name, m), share).result()
        for m, key in enumerate(keys):
            if KEY in read:
                self._put_on_device(value(KEY, m), to_words(key))

    def _put_on_device(self, array: ArrayId, content: Any) -> None:
        """Write `content`, which all processes have alike, to the devices."""
        layouts = [self.layouts.of(array)]
        (placed,) = to_devices([np.asarray(content)], layouts)
        self.stores.device.write(array, placed).result()

    def _take(self) -> list[list[np.ndarray]]:
        """Move the outputs out of the host store, one after another."""
        columns = []
        for m in range(self.num_microbatches):
            found, names = {}, self.program.outputs_of(m)
            for name in dict.fromkeys(names):
                array = value(name, m)
                found[name] = np.array(self.stores.host.read(array).result())
                self.stores.host.free(array)
            columns.append([found[name] for name in names])
        return columns

    def wholes(self, m: int, outputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The whole outputs of microbatch `m`, of which `outputs` are shares.

        If there are several processes, all must call it.
        """
        layouts = [self.layouts.values[name] for name in self.program.outputs_of(m)]
        return all_gathered(outputs, layouts)

    def stacked(self, outputs: Sequence[Sequence[np.ndarray]]) -> Any:
        """The outputs of all microbatches in the function's own pytree.

        Each array has a leading microbatch dim.
        """
        arrays = [np.stack(rows) for rows in zip(*outputs, strict=True)]
        return jax.tree.unflatten(self.segmented.structure, arrays)
