"""Chooses the implementation of each attention of a program, for one machine.

The choice is made while the program is traced for that machine, from platform, dtype,
shape and bytes (`zinf_kernels.attention.rows`). A fused kernel is taken only after a
trial: on a device that is there its values and gradients are compared with those of
`blocks`; for one that is absent it has to compile. A kernel that fails is left out for
the rest of the run, with a warning.
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import wraps
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf.core.sharding import AxisRule, Dim
from zinf_kernels.attention import (
    Operands,
    Spec,
    asked_row,
    best,
    choosing,
)
from zinf_kernels.attention.place import Place
from zinf_kernels.attention.rows import FUSED
from zinf_kernels.device import Device

logger = logging.getLogger(__name__)

# A trial has one example of the run's shapes, and at most so many tokens.
TRIAL_TOKENS = 4096
# Differences from `blocks`, in units of the dtype's rounding of the largest value.
# Both round weights (and their gradients) once before each product, in other blocks.
OUTPUT_ROUNDINGS = 4
GRADIENT_ROUNDINGS = 8
QKV = ("q", "k", "v")
# Kernels that run on the examples and heads of each device.
IN_PARTS = ("triton", "splash")
NOT_DIVIDED = "the devices do not divide its examples and heads of keys evenly."


@dataclass(frozen=True, eq=False)
class AttentionRows:
    """The implementations that the attentions of one engine's programs have.

    Attributes:
        device: what the programs run on.
        asked: `model.attention` of the config.
        place: the devices of the mesh; None: there is one.
        is_absent: whether programs are only compiled.
        chosen: by settings and shapes, the implementation and why.
        refused: fused kernels that failed a trial, and why.
    """

    device: Device
    asked: str = "auto"
    place: Place | None = None
    is_absent: bool = False
    chosen: dict[Any, tuple[str, str]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def __call__(self, spec: Spec, operands: Operands) -> str:
        """The implementation of an attention.

        Raises:
            ValueError: the one that the config asks for does not compute this here.
        """
        shapes = {name: (x.shape, str(x.dtype)) for name, x in operands.items()}
        key = replace(spec, implementation=""), tuple(shapes.items())
        if key not in self.chosen:
            self.chosen[key] = self._choose(spec, operands)
        return self.chosen[key][0]

    def _choose(self, spec: Spec, operands: Operands) -> tuple[str, str]:
        if self.asked != "auto":
            return self._as_asked(spec, operands), "model.attention of the config"
        while True:
            name, why = best(
                self.device,
                spec,
                operands,
                refused=self._refused(operands),
                num_devices=1 if self.place is None else self.place.num_devices,
            )
            if name not in FUSED:
                return name, why
            failure = self.trial(name, spec, operands)
            if failure is None:
                return name, why
            self.refused[name] = failure
            logger.warning("Attention is not computed by %s: %s", name, failure)

    def _as_asked(self, spec: Spec, operands: Operands) -> str:
        name = asked_row(
            self.asked,
            self.device,
            spec,
            operands,
            refused=self._refused(operands),
            setting="model.attention",
        )
        failure = None
        if name in FUSED:
            failure = self.trial(name, spec, operands)
        if failure is not None:
            raise ValueError(
                f"model.attention is {self.asked!r}, and {failure} Set it to auto, "
                "blocks or xla."
            )
        return name

    def _refused(self, operands: Operands) -> dict[str, str]:
        if self.place is None or self.place.divides(operands):
            return self.refused
        return dict.fromkeys(IN_PARTS, NOT_DIVIDED) | self.refused

    def trial(self, name: str, spec: Spec, operands: Operands) -> str | None:
        """Why a kernel is not to be used for an attention; None if it is sound."""
        small = _Trial(spec, _small(operands))
        # In a thread of its own, because another function is being traced in this one.
        with ThreadPoolExecutor(1) as thread:
            run = small.compiles if self.is_absent else small.is_sound
            return thread.submit(run, name).result()

    def sentence(self) -> str:
        """Which implementations hold no scores, and why, for the plan."""
        found: dict[tuple[str, str], list[str]] = {}
        for (_, shapes), (name, why) in self.chosen.items():
            if name != "xla":
                q, *_ = dict(shapes)["q"]
                found.setdefault((name, why), []).append("x".join(map(str, q)))
        return " ".join(
            f"Attention of {', '.join(dict.fromkeys(sizes))} by {name}: {why}."
            for (name, why), sizes in found.items()
        )


def place_of(rule: AxisRule, device: Device) -> Place:
    """The devices of a rule's mesh, and how they divide an attention."""
    if rule.mesh.size == 1:
        return Place(device.platform)
    heads = (*rule.axes(Dim.HEADS), *rule.axes(Dim.CHANNELS))
    return Place(device.platform, rule.mesh, rule.axes(Dim.BATCH), heads)


def with_rows(function: Callable, rows: AttentionRows) -> Callable:
    """A traceable function whose attentions have the implementations of `rows`."""

    @wraps(function, updated=())
    def wrapped(*arguments: Any) -> Any:
        with choosing(rows, rows.place):
            return function(*arguments)

    return wrapped


def _small(operands: Operands) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes for a trial: one example, at most `TRIAL_TOKENS` tokens."""
    sizes = {name: list(x.shape) for name, x in operands.items()}
    for name, shape in sizes.items():
        if name in QKV or name.endswith(("segments", "positions")):
            shape[0], shape[1] = 1, min(shape[1], TRIAL_TOKENS)
    return {
        name: jax.ShapeDtypeStruct(tuple(shape), operands[name].dtype)
        for name, shape in sizes.items()
    }


@dataclass(frozen=True)
class _Trial:
    """One attention on random values, by several implementations."""

    spec: Spec
    shapes: dict[str, jax.ShapeDtypeStruct]

    def function(self, name: str) -> Callable:
        """The result and the gradients by q, k and v, of an implementation."""
        # `attention` itself would refuse a kernel of a device that is not here.
        module = import_module(f"zinf_kernels.attention.{name}")
        num_keys = self.shapes["k"].shape[1]
        window = self.spec.window
        window = window if window is None else min(window, num_keys)
        spec = replace(self.spec, implementation=name, window=window)

        def run(operands: dict[str, Any], direction: Any) -> Any:
            rest = {n: x for n, x in operands.items() if n not in QKV}

            def of_qkv(*qkv: jax.Array) -> jax.Array:
                return module.attention(spec, dict(zip(QKV, qkv, strict=True)) | rest)

            out, vjp = jax.vjp(of_qkv, *(operands[n] for n in QKV))
            return out, *vjp(direction)

        return run

    def direction(self) -> jax.ShapeDtypeStruct:
        q, v = self.shapes["q"], self.shapes["v"]
        return jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), v.dtype)

    def compiles(self, name: str) -> str | None:
        """Why jax cannot even trace a kernel here, where its device is absent."""
        try:
            jax.eval_shape(self.function(name), self.shapes, self.direction())
        except Exception as error:  # Libraries raise what they like.
            return f"jax cannot prepare it on this machine ({_line(error)})."
        return None

    def is_sound(self, name: str) -> str | None:
        """Why a kernel's numbers are not those of `blocks`; None if they are."""
        random = np.random.default_rng(0)
        operands = {n: _random(random, n, s) for n, s in self.shapes.items()}
        if "q_segments" in operands and not self.spec.keys_apart:
            operands["k_segments"] = operands["q_segments"]
        direction = _random(random, "v", self.direction())
        expected = jax.jit(self.function("blocks"))(operands, direction)
        try:
            found = jax.block_until_ready(
                jax.jit(self.function(name))(operands, direction)
            )
        except Exception as error:  # Compilers and libraries raise what they like.
            return f"it fails on this device ({_line(error)})."
        rounding = float(jnp.finfo(self.shapes["q"].dtype).eps)
        parts = ("the result", "the gradient of q", "that of k", "that of v")
        for part, x, y in zip(parts, found, expected, strict=True):
            wide = np.asarray(x, np.float64), np.asarray(y, np.float64)
            largest = float(np.abs(wide[1]).max())
            difference = float(np.abs(wide[0] - wide[1]).max())
            count = OUTPUT_ROUNDINGS if part == parts[0] else GRADIENT_ROUNDINGS
            if not difference <= count * rounding * largest:
                return (
                    f"{part} differs from plain JAX by {difference:.3g} where the "
                    f"largest value is {largest:.3g}."
                )
        return None


def _random(random: np.random.Generator, name: str, shape: Any) -> jax.Array:
    if name.endswith("segments"):
        ids = np.sort(random.integers(0, 4, shape.shape), axis=-1)
        return jnp.asarray(ids, shape.dtype)
    if name.endswith("positions"):
        return jnp.broadcast_to(
            jnp.arange(shape.shape[-1], dtype=shape.dtype), shape.shape
        )
    return jnp.asarray(random.standard_normal(shape.shape), shape.dtype)


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]
