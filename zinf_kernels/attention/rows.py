"""The implementations of attention: what each takes, and which one is taken.

What a fused kernel takes is a row of `FUSED`: asking it for more is an error that names
the reason. Nothing here imports a kernel.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

import jax

from zinf_kernels.attention.place import Place
from zinf_kernels.attention.spec import OPTIONAL, Operands, Spec, score_bytes, shape_of
from zinf_kernels.device import Device, device_for, named

# In the order of preference.
EXISTING = ("cudnn", "triton", "splash", "blocks", "xla", "reference")
# "pallas" is the kernel of jax's Pallas operations for the platform.
PALLAS = MappingProxyType({"gpu": "triton", "tpu": "splash"})
# Scores of at most so many bytes are computed by XLA.
SMALL_SCORES = 64 << 20
# A feature: see `Spec.keys_apart`.
APART = "segments of keys that queries at their places do not have"
NOTHING: Mapping[str, str] = MappingProxyType({})

Chooser = Callable[[Spec, Operands], str]
"""From settings and shapes by name, the implementation of an attention."""

# jax traces a cached function again if it changes.
_chooser = jax.make_user_context(None)
_place = jax.make_user_context(None)


@dataclass(frozen=True)
class Fused:
    """The attentions that a fused kernel can compute.

    Attributes:
        features: what it computes besides plain and causal attention.
        width: widths of heads are multiples of this; 0: any.
        widest: the largest width of heads; 0: any.
        capability: the least compute capability of a GPU.
    """

    platform: str
    dtypes: tuple[str, ...]
    features: frozenset[str]
    width: int = 0
    widest: int = 0
    capability: tuple[int, int] = (0, 0)

    def obstacle(self, device: Device, spec: Spec, operands: Operands) -> str | None:
        """Why the kernel cannot compute this on a device; None: no reason is known."""
        if device.platform != self.platform:
            return f"it is for {self.platform.upper()}s and this is {named(device)}."
        if device.capability is not None and device.capability < self.capability:
            needed, given = (
                ".".join(map(str, c)) for c in (self.capability, device.capability)
            )
            return f"it needs compute capability {needed}; {device.kind} has {given}."
        lacks = sorted(features(spec, operands) - self.features)
        if lacks:
            return f"it does not compute attention with {' and '.join(lacks)}."
        if str(operands["q"].dtype) not in self.dtypes:
            allowed = " and ".join(self.dtypes)
            return f"it takes {allowed}, not {operands['q'].dtype}."
        return self._obstacle_of_shape(operands)

    def _obstacle_of_shape(self, operands: Operands) -> str | None:
        _, num_queries, num_keys, _, _, *widths = shape_of(operands)
        if num_queries != num_keys:
            return (
                f"it is used for as many queries as keys, not {num_queries:,} and "
                f"{num_keys:,}."
            )
        if self.width and (
            widths[0] != widths[1] or widths[0] > self.widest or widths[0] % self.width
        ):
            return (
                "it takes equal widths of queries and values that are multiples of "
                f"{self.width} up to {self.widest}, not {widths[0]} and {widths[1]}."
            )
        return None


FUSED = MappingProxyType(
    {
        "cudnn": Fused(
            platform="gpu",
            dtypes=("bfloat16", "float16"),
            features=frozenset(("a causal window",)),
            width=8,
            widest=128,
            capability=(8, 0),
        ),
        "triton": Fused(
            platform="gpu",
            dtypes=("bfloat16", "float16"),
            features=frozenset(("segments",)),
            width=16,
            widest=128,
            capability=(8, 0),
        ),
        "splash": Fused(
            platform="tpu",
            dtypes=("bfloat16", "float32"),
            features=frozenset(
                ("a causal window", "a window", "segments", APART, "a soft cap")
            ),
        ),
    }
)


def features(spec: Spec, operands: Operands) -> frozenset[str]:
    """What an attention has besides causality, in the words of `Fused.features`."""
    found = {OPTIONAL[name] for name in operands.keys() & OPTIONAL.keys()}
    if spec.window is not None:
        found.add("a causal window" if spec.causal else "a window")
    if spec.soft_cap is not None:
        found.add("a soft cap")
    if spec.keys_apart:
        found.add(APART)
    return frozenset(found)


def obstacles(device: Device, *, spec: Spec, operands: Operands) -> dict[str, str]:
    """For each implementation that cannot compute this there, the reason.

    Args:
        operands: arrays, or their shapes and dtypes, by name.
    """
    found = {
        name: fused.obstacle(device, spec, operands) for name, fused in FUSED.items()
    }
    return {name: reason for name, reason in found.items() if reason is not None}


@contextmanager
def choosing(
    chooser: Chooser, place: Place | None = None
) -> Generator[None, None, None]:
    """In the `with` block, `chooser` chooses implementations that are left open.

    Args:
        chooser: hashable, and equal only to what chooses the same.
        place: what they run on; None: jax's default device.
    """
    with _chooser(chooser), _place(place):
        yield


def place_for(q: jax.Array) -> Place:
    """The place that an attention of these queries runs on."""
    place: Place | None = _place.value
    return Place(device_for(q).platform) if place is None else place


def chosen(spec: Spec, operands: Operands) -> str:
    """The implementation where none was asked for, of `choosing` or by size alone."""
    chooser: Chooser | None = _chooser.value
    if chooser is not None:
        return chooser(spec, operands)
    return "xla" if score_bytes(operands) <= SMALL_SCORES else "blocks"


def best(
    device: Device,
    spec: Spec,
    operands: Operands,
    refused: Mapping[str, str] = NOTHING,
    num_devices: int = 1,
) -> tuple[str, str]:
    """The implementation for "auto", and the reason in words for a table.

    Args:
        refused: implementations that are known not to do, such as by a trial.
        num_devices: devices that divide the scores.
    """
    size = score_bytes(operands) // num_devices
    if size <= SMALL_SCORES:
        return "xla", f"scores take {size:,} bytes"
    against = {**obstacles(device, spec=spec, operands=operands), **refused}
    name = next(n for n in EXISTING if n not in against)
    if name in FUSED:
        return name, f"scores would take {size:,} bytes, and the kernel takes this"
    return name, f"scores would take {size:,} bytes"


def asked_row(
    name: str,
    device: Device,
    spec: Spec,
    operands: Operands,
    *,
    refused: Mapping[str, str] = NOTHING,
    setting: str = "implementation",
) -> str:
    """The implementation of a name that users give: "pallas" depends on the platform.

    Args:
        refused: as of `best`.
        setting: what was set to the name, for errors.

    Raises:
        ValueError: no implementation has this name, or it does not compute this here.
    """
    row = PALLAS.get(device.platform, "triton") if name == "pallas" else name
    if row not in EXISTING:
        names = ", ".join(("auto", "pallas", *EXISTING))
        raise ValueError(f"{setting} is {name!r}, which is none. Set it to {names}.")
    against = {**obstacles(device, spec=spec, operands=operands), **refused}
    if row in against:
        raise ValueError(
            f"{setting} is {name!r}, and it cannot compute this attention: "
            f"{against[row]} Set it to auto, blocks or xla."
        )
    return row
