"""Updates in host memory, in place, by a loop generated from the transform.

The update's code is translated for `zinf_kernels`, which compiles it to one pass over
memory. XLA reads and writes as much, but into new memory, from where results are copied
to the arrays at rest: for them that doubles the traffic, and takes room for both.
"""

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from zinf.core.jaxpr import Shared
from zinf.core.optim.host.agree import PROBE_NUMEL, Trial, closest, compile_probe
from zinf.core.optim.host.host_update import AbstractHostUpdate, flat
from zinf.core.optim.host.loop import Loop, loop_of
from zinf.core.optim.separate import Separated
from zinf.core.optim.update import Unit, copy_dtype_of, step_arguments, update_function
from zinf_kernels.arrays import FLOAT32
from zinf_kernels.elementwise import Program, elementwise_update
from zinf_kernels.processor import is_known_processor


@dataclass(frozen=True)
class LoopedUpdate(AbstractHostUpdate):
    """The update of one unit on arrays that rest in host memory.

    It is within twice `zinf_kernels.elementwise.bounds.error_bounds` of the unit's
    executable on XLA:CPU. In practice it is bit-equal, unless there are reciprocal
    roots, as in RMSprop and Adagrad: XLA estimates those.
    """

    loop: Loop
    step_values: tuple[int, ...]
    hoisted: tuple[np.generic, ...]

    @property
    def workspace_bytes(self) -> int:
        return 0

    def __call__(
        self, factor: Any, step_values: Sequence[Any], *arrays: np.ndarray
    ) -> None:
        self._run([flat(x) for x in arrays], self.scalars(factor, step_values))

    def compile(self) -> None:
        """Compiles its loop: a second for the first in a process, 0.1 to 0.5 others."""
        program = self.loop.program
        arrays = [np.empty(0, dtype) for dtype in program.arrays]
        self._run(arrays, [np.float32(1)] * program.num_scalars)

    def scalars(self, factor: Any, step_values: Sequence[Any]) -> list[np.float32]:
        """The scalars of the program in one step."""
        mine = [step_values[k] for k in self.step_values]
        scalars = (factor, *mine, *self.hoisted, *self.loop.literals)
        return [np.float32(x) for x in scalars]

    def _run(self, arrays: Sequence[np.ndarray], scalars: Sequence[np.float32]) -> None:
        elementwise_update(self.loop.program, arrays, scalars, implementation="cpu")


def looped_updates(
    separated: Separated, units: Sequence[Unit], *, device: jax.Device
) -> list[LoopedUpdate | None]:
    """For each unit its update by a loop, or None where only the executable can run.

    All are None on a processor that loops do not support.

    Args:
        device: compiles and runs the executables to compare with.
    """
    if not is_known_processor():
        return [None] * len(units)
    leaves = sorted({u.leaf for u in units if _may_be_looped(separated, u)})
    probes = separated.bodies([(leaf, (PROBE_NUMEL,)) for leaf in leaves])
    shared = dict(zip(leaves, probes, strict=True))
    loops: dict[Hashable, Loop | None] = {}
    found: list[LoopedUpdate | None] = []
    for unit in units:
        own = shared.get(unit.leaf)
        if own is None:
            found.append(None)
            continue
        leaf = separated.leaves[unit.leaf]
        copy_dtype = copy_dtype_of(unit, leaf.spec.dtype)
        key = own.body, np.dtype(unit.grad_dtype), copy_dtype
        if key not in loops:
            loops[key] = _loop(separated, unit, own, device)
        loop = loops[key]
        values = leaf.step_values, own.hoisted
        found.append(None if loop is None else LoopedUpdate(loop, *values))
    return found


def _may_be_looped(separated: Separated, unit: Unit) -> bool:
    """Whether the update is element-wise on a float32 master."""
    leaf = separated.leaves[unit.leaf]
    # A scalar leaf cannot be probed at another shape, where its scalars stay scalars.
    return leaf.is_elementwise and leaf.spec.shape != () and leaf.spec.dtype == FLOAT32


def _loop(
    separated: Separated, unit: Unit, own: Shared, device: jax.Device
) -> Loop | None:
    """The loop that agrees with the unit's executable, if there is one."""
    leaf = separated.leaves[unit.leaf]
    unit = replace(unit, shape=(PROBE_NUMEL,))
    copy_dtype = copy_dtype_of(unit, leaf.spec.dtype)
    rest = {"replaces": separated.replaces}
    function = update_function(own.body, copy_dtype, **rest)
    arguments = step_arguments(separated, unit, own.hoisted)
    loop = loop_of(function, arguments, num_read_only=1)
    if loop is None:
        return None
    update = LoopedUpdate(loop, leaf.step_values, own.hoisted)
    trials = _trials(separated, unit, update, device)
    program = closest(loop.program, trials)
    if all(trial.is_within_bounds(program) for trial in trials):
        return replace(loop, program=program)
    warnings.warn(
        f"The loop made for the update of {leaf.path!r} computes something else. Its "
        "updates on the host take the slower way through XLA. Please report the "
        "optimizer that you use.",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


def _trials(
    separated: Separated, unit: Unit, update: LoopedUpdate, device: jax.Device
) -> list[Trial]:
    """Random numbers, with all booleans among the step values true, and false."""
    execute = compile_probe(separated, unit, device=device)
    random = np.random.default_rng(0)
    arrays = _random_arrays(update.loop.program, random)
    operands = arrays[: 2 + len(separated.leaves[unit.leaf].states)]
    specs, factor = separated.step_value_specs, np.float32(0.7)
    values = [np.asarray(random.uniform(0.1, 0.9), spec.dtype) for spec in specs]
    trials = []
    for truth in (True, False) if any(x.dtype == bool for x in values) else (True,):
        mine = [np.asarray(truth) if x.dtype == bool else x for x in values]
        expected = execute(factor, mine, *operands)
        trials.append(Trial(arrays, update.scalars(factor, mine), expected))
    return trials


def _random_arrays(program: Program, random: np.random.Generator) -> list[np.ndarray]:
    """Gradient, master, and states of either sign in one half, positive in the other.

    Averages of squares are positive, other states are not. Every seventh gradient is
    zero, as for tokens that do not occur, and every fifth state, as initially.
    """
    shape = len(program.arrays), PROBE_NUMEL
    gradient, master, *states = (random.standard_normal(shape) * 0.3).astype("f")
    gradient[::7] = 0
    for state in states:
        state[::2] = np.abs(state[::2])
        state[::5] = 0
    wide = gradient, master, *states
    return [x.astype(d) for x, d in zip(wide, program.arrays, strict=True)]
