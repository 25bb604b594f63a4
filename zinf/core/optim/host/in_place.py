"""Updates in host memory, in place, for the leaves whose update is Adam's.

XLA writes results into memory of its own, and they are copied from there. For arrays at
rest on the host that doubles the traffic and takes room for both. `zinf_kernels.adam`
reads and writes each array once, in place. Other optimizers take `looped`.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import numpy as np

from zinf.core.jaxpr import Body
from zinf.core.optim.host.adam import BFLOAT16, FLOAT32, AdamForm, match_adam
from zinf.core.optim.host.host_update import AbstractHostUpdate, flat
from zinf.core.optim.host.probe import (
    PROBE_NUMEL,
    compile_probe,
    normal,
    random_step_values,
)
from zinf.core.optim.separate import Separated
from zinf.core.optim.update import Unit, copy_dtype_of
from zinf_kernels.adam import Scalars, adam_update_scalars

# With float16 gradients XLA's rounding depends on the length, so no kernel can give the
# same bits.
GRADIENT_DTYPES = (FLOAT32, BFLOAT16)
# Half a unit in the last place of 1 in float32.
ROUNDING = 2.0**-24
ROUNDING_BFLOAT16 = 2.0**-8


@dataclass(frozen=True)
class InPlaceUpdate(AbstractHostUpdate):
    """The update of one unit on arrays that rest in host memory.

    It gives the bits of the unit's executable on XLA:CPU up to the rounding that
    `zinf_kernels.adam_update` states; in practice all of them. If the weight decay is a
    step value and zero, parameters that are not finite stay as they are.
    """

    form: AdamForm
    step_values: tuple[int, ...]
    hoisted: tuple[np.generic, ...]
    gradient_dtype: np.dtype
    copy_dtype: np.dtype | None

    @property
    def workspace_bytes(self) -> int:
        return 0

    def __call__(
        self, factor: Any, step_values: Sequence[Any], *arrays: np.ndarray
    ) -> None:
        mine = [step_values[k] for k in self.step_values]
        scalars = self.form.values([*mine, *self.hoisted], factor)
        self._run(scalars, *arrays)

    def compile(self) -> None:
        """Compiles its loops: a second for the first in a process, 0.2 for others."""
        copies = [] if self.copy_dtype is None else [np.empty(0, self.copy_dtype)]
        moments = [np.empty(0, np.float32), np.empty(0, np.float32)]
        moments[self.form.m] = np.empty(0, self.form.m_dtype)
        gradient = np.empty(0, self.gradient_dtype)
        # A loop with decay differs from one without. A decay that is a step value may
        # be zero in one step and not in the next, so both are compiled.
        for decay in self.form.decays:
            ones = {field.name: np.float32(1) for field in fields(Scalars)}
            scalars = Scalars(**{**ones, "weight_decay": np.float32(decay)})
            self._run(scalars, gradient, np.empty(0, np.float32), *moments, *copies)

    def _run(self, scalars: Scalars, *arrays: np.ndarray) -> None:
        _run(self.form, scalars, *arrays, implementation="cpu")


def in_place_updates(
    separated: Separated, units: Sequence[Unit], *, device: jax.Device
) -> list[InPlaceUpdate | None]:
    """For each unit its update in place, or None where only the executable can run.

    Args:
        device: compiles and runs the executables to compare with.
    """
    leaves = sorted({u.leaf for u in units if may_be_in_place(separated, u)})
    probes = separated.bodies([(leaf, (PROBE_NUMEL,)) for leaf in leaves])
    shared = dict(zip(leaves, probes, strict=True))
    forms = {s.body: match_adam(s.body) for s in probes}
    agreed: dict[tuple[Body, Any], bool] = {}
    found: list[InPlaceUpdate | None] = []
    for unit in units:
        own = shared.get(unit.leaf)
        form = None if own is None else forms[own.body]
        dtype = np.dtype(unit.grad_dtype)
        if own is None or form is None or dtype not in GRADIENT_DTYPES:
            found.append(None)
            continue
        leaf = separated.leaves[unit.leaf]
        copy_dtype = copy_dtype_of(unit, leaf.spec.dtype)
        update = InPlaceUpdate(form, leaf.step_values, own.hoisted, dtype, copy_dtype)
        key = own.body, dtype
        if key not in agreed:
            agreed[key] = _agrees(separated, unit, update, device)
        found.append(update if agreed[key] else None)
    return found


def may_be_in_place(separated: Separated, unit: Unit) -> bool:
    """Whether the update is element-wise on a float32 master."""
    leaf = separated.leaves[unit.leaf]
    # A scalar leaf cannot be probed at another shape, where its scalars stay scalars.
    return leaf.is_elementwise and leaf.spec.shape != () and leaf.spec.dtype == FLOAT32


def _agrees(
    separated: Separated, unit: Unit, update: InPlaceUpdate, device: jax.Device
) -> bool:
    """Whether the update agrees with its executable on random numbers.

    The kernel's reference is compared, not its loop: that needs only XLA's compiler,
    and is enough to find a term that was mistaken for another.
    """
    random = np.random.default_rng(0)
    gradient = normal(random, 1.0).astype(update.gradient_dtype)
    arrays = [normal(random, x) for x in (0.1, 0.1, 1.0)]
    arrays[2] = np.square(arrays[2])
    if update.form.m == 1:
        arrays[1:] = arrays[:0:-1]
    position = 1 + update.form.m
    arrays[position] = arrays[position].astype(update.form.m_dtype)
    values = random_step_values(separated, random)
    factor = np.float32(0.7)
    mine = [values[k] for k in update.step_values]
    scalars = update.form.values([*mine, *update.hoisted], factor)
    bounds = _bounds(update.form, scalars, gradient, *arrays)
    execute = compile_probe(separated, replace(unit, compute_dtype=None), device=device)
    expected = execute(factor, values, gradient, *arrays)
    _run(update.form, scalars, gradient, *arrays, implementation="reference")
    agrees = all(
        np.all(np.abs(_wide(x) - _wide(y)) <= bound)
        for x, y, bound in zip(arrays, expected, bounds, strict=True)
    )
    if not agrees:
        warnings.warn(
            f"The update of {separated.leaves[unit.leaf].path!r} looks like Adam, but "
            "computes something else. Its updates on the host take the slower way of "
            "any other optimizer. Please report the optimizer that you use.",
            RuntimeWarning,
            stacklevel=2,
        )
    return agrees


def _bounds(
    form: AdamForm, scalars: Scalars, gradient: np.ndarray, *arrays: np.ndarray
) -> list[np.ndarray]:
    """Bounds of the differences that `zinf_kernels.adam_update` allows."""
    s = {name: float(value) for name, value in vars(scalars).items()}
    g, master = _wide(gradient) * s["factor"], _wide(arrays[0])
    old_m, old_v = _wide(arrays[1 + form.m]), _wide(arrays[1 + form.v])
    of_gradient, decayed = s["one_minus_b1"] * g, s["b1"] * old_m
    m, large_m = of_gradient + decayed, np.abs(of_gradient) + np.abs(decayed)
    v = s["one_minus_b2"] * g**2 + s["b2"] * old_v
    root = np.sqrt(v / s["correction2"] + s["eps_root"])
    gain = 1 / (s["correction1"] * (root + s["eps"]))
    change = np.abs(m * gain) + np.abs(s["weight_decay"] * master)
    of_change = 12 * change + 3 * large_m * gain
    of_master = np.abs(master) + abs(s["learning_rate"]) * of_change
    of_moments = [3 * large_m, 6 * v]
    if form.m_dtype == BFLOAT16:
        of_moments[0] += np.abs(m) * (ROUNDING_BFLOAT16 / ROUNDING)
    bounds = of_master, of_moments[form.m], of_moments[form.v]
    return [2 * ROUNDING * x for x in bounds]


def _run(
    form: AdamForm,
    scalars: Scalars,
    gradient: np.ndarray,
    master: np.ndarray,
    *rest: np.ndarray,
    implementation: str,
) -> None:
    arrays = map(flat, (master, rest[form.m], rest[form.v], gradient))
    copy = flat(rest[2]) if len(rest) > 2 else None
    adam_update_scalars(
        *arrays, scalars=scalars, copy=copy, implementation=implementation
    )


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)
