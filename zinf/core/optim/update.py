"""Compiled updates: one executable for all blocks with equal code.

A unit is a leaf or a block of rows of one. Its update casts and scales the gradient,
evaluates the leaf's separated update and adds the result to the master, as
`optax.apply_updates` does. All units are compiled at once and ahead of time, so that
the planner knows their workspace and a step never waits for the compiler.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from zinf.core.jaxpr import Body
from zinf.core.optim.separate import Separated
from zinf.core.topology import Collective, collectives_of

Compile = Callable[[jax.stages.Lowered], jax.stages.Compiled]


def _plainly(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    return lowered.compile()


@dataclass(frozen=True)
class Unit:
    """The array of one update: a leaf (by number), or a block of its rows.

    The gradient comes in `grad_dtype`; unless `compute_dtype` is `None` or that of the
    master, the update also makes a copy of the new parameter in it.
    """

    leaf: int
    shape: tuple[int, ...]
    grad_dtype: Any
    compute_dtype: Any = None


@dataclass(frozen=True)
class UnitPlacement:
    """Shardings of the arrays of a unit during its update. Scalars are replicated."""

    scalars: Sharding
    gradient: Sharding
    master: Sharding
    states: tuple[Sharding, ...]
    compute: Sharding


@dataclass(frozen=True, eq=False)
class UpdateCode:
    """The source of a compiled update step; shardings are pytree prefixes."""

    function: Callable
    arguments: Any
    shardings: Any
    result_shardings: Any


@dataclass(frozen=True)
class UpdateStep:
    """The update of one unit.

    `output_bytes` and `temp_bytes` are what a call allocates on each of its devices.
    """

    code: UpdateCode
    executable: jax.stages.Compiled
    step_values: tuple[int, ...]
    hoisted: tuple[np.generic, ...]
    is_elementwise: bool
    output_bytes: int
    temp_bytes: int

    @property
    def workspace_bytes(self) -> int:
        """Bytes needed besides the inputs, which stay valid."""
        return self.output_bytes + self.temp_bytes

    def collectives(self) -> tuple[Collective, ...]:
        """The collectives of its executable."""
        return collectives_of(self.executable)

    def __call__(
        self,
        factor: Any,
        step_values: Sequence[Any],
        grad: Any,
        master: Any,
        *states: Any,
    ) -> tuple[jax.Array, ...]:
        """`(new master, *new states)`, and the compute copy if the unit has one.

        Args:
            factor: float32 scalar that the gradient is multiplied by.
            step_values: all those of this step (see `compile_advance`).
        """
        mine = [step_values[k] for k in self.step_values]
        return self.executable(factor, mine, self.hoisted, grad, master, states)


@dataclass(frozen=True)
class Updates:
    """The updates of all units, in their order."""

    steps: tuple[UpdateStep, ...]
    num_executables: int


def compile_updates(
    separated: Separated, units: Sequence[Unit], *, device: jax.Device
) -> Updates:
    """Compiles the updates of all units for one device.

    Raises:
        ValueError: a block of a leaf whose update is not element-wise.
    """
    here = jax.sharding.SingleDeviceSharding(device)
    placements = [
        UnitPlacement(here, here, here, (here,) * len(leaf.states), here)
        for leaf in (separated.leaves[unit.leaf] for unit in units)
    ]
    return compile_placed_updates(separated, units, placements)


def compile_placed_updates(
    separated: Separated,
    units: Sequence[Unit],
    placements: Sequence[UnitPlacement],
    compile: Compile = _plainly,
) -> Updates:
    """Compiles the updates of units whose arrays may lie on several devices.

    Shapes of units are those of the whole arrays, padded as these are.
    """
    bodies = separated.bodies([(unit.leaf, unit.shape) for unit in units])
    compiled: dict[Hashable, tuple[UpdateCode, jax.stages.Compiled, Any]] = {}
    steps = []
    for unit, shared, place in zip(units, bodies, placements, strict=True):
        leaf = separated.leaves[unit.leaf]
        copy_dtype = copy_dtype_of(unit, leaf.spec.dtype)
        key = shared.body, jnp.dtype(unit.grad_dtype), copy_dtype, place
        if key not in compiled:
            rest = {"replaces": separated.replaces}
            function = update_function(shared.body, copy_dtype, **rest)
            arguments = step_arguments(separated, unit, shared.hoisted)
            shardings = (
                *[place.scalars] * 3,
                place.gradient,
                place.master,
                place.states,
            )
            results = (place.master, *place.states)
            results += () if copy_dtype is None else (place.compute,)
            code = UpdateCode(function, arguments, shardings, results)
            executable = _compile(function, arguments, shardings, results, compile)
            compiled[key] = code, executable, executable.memory_analysis()
        code, executable, memory = compiled[key]
        nbytes = memory.output_size_in_bytes, memory.temp_size_in_bytes
        values = leaf.step_values, shared.hoisted, leaf.is_elementwise
        steps.append(UpdateStep(code, executable, *values, *nbytes))
    return Updates(tuple(steps), len(compiled))


def compile_advance(
    separated: Separated, *, device: jax.Device
) -> Callable[..., tuple[list[np.ndarray], list[np.ndarray]]]:
    """A function from shared state to `(new shared state, step values)`.

    It takes the loss and the norms too, as float32 scalars, as `Separated.advance`
    does.

    Call it once per step. Its results are NumPy arrays for all units, on any tier. Give
    it a CPU device if there is one: on an accelerator it would wait for everything that
    is queued there.
    """
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    norms = [scalar] * len(separated.norm_groups)
    arguments = list(separated.shared_specs), scalar, norms
    here = jax.sharding.SingleDeviceSharding(device)
    compiled = _compile(separated.advance, arguments, here, here)

    def advance(
        shared: Sequence[Any], loss: float = 0.0, norms: Sequence[Any] = ()
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        given = np.float32(loss), list(norms)
        return jax.tree.map(np.asarray, compiled(list(shared), *given))

    return advance


def update_function(body: Body, copy_dtype: Any, *, replaces: bool = False) -> Callable:
    """The computation of every update step, as a traceable function.

    The gradient is widened to float32 (or stays wider), multiplied by `factor`, and
    given to the transform in the master's dtype. `copy_dtype` is that of the compute
    copy, `None` for none. For `replaces` see `Separated`.
    """

    def update(
        factor: Any, step_values: Any, hoisted: Any, grad: Any, master: Any, states: Any
    ) -> tuple[jax.Array, ...]:
        wide = jnp.promote_types(grad.dtype, jnp.float32)
        grad = (grad.astype(wide) * factor).astype(master.dtype)
        change, *new_states = body(grad, master, *states, *step_values, *hoisted)
        new_master = change if replaces else master + change
        new_master = new_master.astype(master.dtype)
        copies = [] if copy_dtype is None else [new_master.astype(copy_dtype)]
        return (new_master, *new_states, *copies)

    return update


def step_arguments(
    separated: Separated, unit: Unit, hoisted: Sequence[np.generic]
) -> tuple[Any, ...]:
    """Abstract arguments of the `update_function` of a unit: scalars, then arrays."""
    leaf = separated.leaves[unit.leaf]
    states = tuple(
        jax.ShapeDtypeStruct(
            unit.shape if leaf.is_elementwise else state.spec.shape, state.spec.dtype
        )
        for state in leaf.states
    )
    return (
        jax.ShapeDtypeStruct((), jnp.float32),
        [separated.step_value_specs[k] for k in leaf.step_values],
        tuple(jax.ShapeDtypeStruct((), value.dtype) for value in hoisted),
        jax.ShapeDtypeStruct(unit.shape, unit.grad_dtype),
        jax.ShapeDtypeStruct(unit.shape, leaf.spec.dtype),
        states,
    )


def _compile(
    function: Callable,
    arguments: Any,
    shardings: Any,
    results: Any,
    compile: Compile = _plainly,
) -> jax.stages.Compiled:
    """Compiles for shardings given as pytree prefixes of arguments and results."""
    jitted = jax.jit(function, in_shardings=shardings, out_shardings=results)
    return compile(jitted.lower(*arguments))


def copy_dtype_of(unit: Unit, master_dtype: Any) -> np.dtype | None:
    """The dtype of the unit's compute copy, None if it has none."""
    if unit.compute_dtype is None or unit.compute_dtype == master_dtype:
        return None
    return jnp.dtype(unit.compute_dtype)
