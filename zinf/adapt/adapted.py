"""A loss over a frozen base and small trained adapters, and where each parameter is."""

import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from zinf.adapt.rewrite import Rewriter
from zinf.adapt.weight import (
    LORA_A,
    ROW,
    WEIGHT,
    Target,
    merged,
    whole,
)
from zinf.core.config import Config
from zinf.core.config.adapter import Adapter
from zinf.core.problem.source import named_leaves

BASE, ADAPTER = "base", "adapter"


@dataclass(frozen=True)
class Adapted:
    """A loss over `{"base": frozen, "adapter": trained}`; made by `lora`.

    Attributes:
        loss_fn: takes the arguments of the user's loss, with these params first; with
            dropout, a random key last.
        eval_loss_fn: the same without dropout, for `zinf.initialize`.
        params: a pytree, or a function that makes one, as the user's were.
        frozen: the patterns for `frozen` in the config.
        targets: the weights that are changed, by key path in the user's parameters.
        saved: the leaves that are trained whole; they are below "adapter".
        adapter: the options of adapters, if there are any.
        loaded: first values of the adapters by key path, where a file gave them.
    """

    loss_fn: Callable
    eval_loss_fn: Callable | None
    params: Any
    frozen: tuple[str, ...]
    targets: Mapping[str, Target]
    saved: tuple[str, ...]
    adapter: Adapter
    layout: "Layout"
    loaded: Mapping[str, Any] | None = None

    def config(self, config: Any = None) -> Config:
        """A config that freezes the base and has no `adapter` section left to apply."""
        given = Config.load(config)
        frozen = tuple(f"{BASE}/{pattern}" for pattern in given.frozen)
        changed = {"frozen": (*self.frozen, *frozen), "adapter": None}
        return given.model_copy(update=changed)

    def only(self, leaves: Collection[str]) -> "Adapted":
        """The adapters of some of the user's leaves, to be written."""
        targets = {p: x for p, x in self.targets.items() if p in leaves}
        saved = tuple(path for path in self.saved if path in leaves)
        layout = replace(
            self.layout,
            specs={p: x for p, x in self.layout.specs.items() if p in leaves},
            targets={p: x for p, x in self.layout.targets.items() if p in leaves},
            saved=self.layout.saved.intersection(leaves),
        )
        return replace(self, targets=targets, saved=saved, layout=layout)

    def applied(self, function: Callable) -> "AdaptedFunction":
        """Turn a function of the user's parameters into one of `params`; no dropout.

        Args:
            function: takes the user's parameters first, and no random key.
        """
        return AdaptedFunction(function, self.layout, 0.0, drops_key=False)

    def unchanged(
        self, function: Callable, *, reads: Collection[str] | None = None
    ) -> "AdaptedFunction":
        """As `applied`, of the frozen weights alone: as if there were no adapters.

        Args:
            reads: the leaves that the function reads; None: all.

        Raises:
            ValueError: some of them are trained whole, so their first values are gone.
        """
        lost = [path for path in self.saved if reads is None or path in reads]
        if lost:
            raise ValueError(
                f"{lost[0]!r} is trained whole (modules_to_save), so the model "
                "without its adapters is not what training began with."
            )
        return AdaptedFunction(function, self.layout.frozen(), 0.0, drops_key=False)

    def merge(self, params: Any) -> Any:
        """The user's parameters with the adapters added, one leaf at a time.

        A merged weight has the dtype of the frozen one. Quantized weights are decoded.

        Args:
            params: trained values, as `engine.params()` gives them.
        """
        return self.layout.tree(
            {p: merge_leaf(x) for p, x in self.layout.values(params, None).items()}
        )


@dataclass(frozen=True, eq=False)
class Layout:
    """The user's parameters, and where each is in `{"base": ..., "adapter": ...}`.

    Attributes:
        specs: shapes and dtypes by key path.
    """

    specs: Mapping[str, jax.ShapeDtypeStruct]
    structure: Any
    targets: Mapping[str, Target]
    saved: frozenset[str]

    def frozen(self) -> "Layout":
        """The layout without adapters: weights are the frozen ones, decoded."""
        kept = {
            path: replace(target, r=0, is_dora=False)
            for path, target in self.targets.items()
            if target.encoding is not None
        }
        return replace(self, targets=kept)

    def tree(self, leaves: Mapping[str, Any]) -> Any:
        """The user's pytree of leaves by key path."""
        return jax.tree.unflatten(self.structure, [leaves[p] for p in self.specs])

    def split(self, leaves: Mapping[str, Any]) -> dict[str, Any]:
        """The user's leaves as `{"base": ..., "adapter": ...}`, with first values."""
        base, adapters = [], {}
        for path, leaf in leaves.items():
            target = self.targets.get(path)
            if path in self.saved:
                adapters[path] = jnp.asarray(leaf)
                leaf = None
            elif target is not None:
                if target.encoding is not None:
                    leaf = target.encoding.encode(leaf)
                if target.r:
                    adapters[path] = leaf
            base.append(leaf)
        return {BASE: jax.tree.unflatten(self.structure, base), ADAPTER: adapters}

    def values(self, params: Any, rows: Any) -> dict[str, Any]:
        """The user's leaves by key path, whole or as a `Weight` with its parts.

        Args:
            rows: what makes the numbers of a stack's rows, or None without dropout.
        """
        base = dict(named_leaves(params[BASE]))
        adapters = params[ADAPTER]
        dtype = self._compute_dtype(base, adapters)
        found: dict[str, Any] = {}
        for path, spec in self.specs.items():
            target = self.targets.get(path)
            if path in self.saved:
                found[path] = adapters[path]
            elif target is None:
                found[path] = base[path]
            else:
                names = (WEIGHT,) if target.encoding is None else target.encoding.names
                parts = {n: base[path if n == WEIGHT else f"{path}/{n}"] for n in names}
                if target.r:
                    parts |= adapters[path]
                if rows is not None:
                    parts[ROW] = rows(target.shape[: target.contraction.stack])
                own = parts[WEIGHT].dtype if WEIGHT in parts else None
                if own is None:
                    is_mixed = spec.dtype == jnp.float32 and dtype is not None
                    own = dtype if is_mixed else spec.dtype
                found[path] = whole(target, parts, str(own))
        return found

    def _compute_dtype(
        self, base: Mapping[str, Any], adapters: Mapping[str, Any]
    ) -> Any:
        """Dtype in which the loss gets float32 parameters; None: it gets none."""
        for value in adapters.values():
            if isinstance(value, Mapping):
                return value[LORA_A].dtype
        for path, spec in self.specs.items():
            if spec.dtype == jnp.float32 and path in base:
                return base[path].dtype
        return None


@dataclass(frozen=True)
class AdaptedFunction:
    """A function of the user's parameters as one of `{"base": ..., "adapter": ...}`.

    Attributes:
        drops_key: the last argument is a random key, which `function` does not take.
    """

    function: Callable
    layout: Layout
    dropout: float
    drops_key: bool

    def __call__(self, params: Any, *rest: Any) -> Any:
        layout = self.layout
        has_dropout = self.dropout > 0
        values = layout.values(params, _row_numbers if has_dropout else None)
        given = rest[:-1] if self.drops_key else rest
        abstract = layout.tree({p: spec_of(x) for p, x in values.items()})
        closed, result = jax.make_jaxpr(self.function, return_shape=True)(
            abstract, *given
        )
        key = jax.random.fold_in(rest[-1], SALT) if has_dropout else None
        rewriter = Rewriter(self.dropout, key)
        arguments = [*values.values(), *jax.tree.leaves(given)]
        found = rewriter.arrays(closed, arguments)
        return jax.tree.unflatten(jax.tree.structure(result), found)


# Keys of adapters, apart from what the loss draws from the same key.
SALT = zlib.crc32(b"lora_dropout")


def merge_leaf(value: Any) -> Any:
    """A leaf as the user has it: a weight with its adapter, decoded."""
    if not hasattr(value, "target"):
        return value
    return jax.device_get(merged(value))


def _row_numbers(stack: tuple[int, ...]) -> jax.Array:
    return jnp.arange(prod(stack), dtype=jnp.int32).reshape(stack)


def spec_of(value: Any) -> jax.ShapeDtypeStruct:
    if hasattr(value, "target"):
        return jax.ShapeDtypeStruct(value.target.shape, jnp.dtype(value.dtype))
    return jax.ShapeDtypeStruct(jnp.shape(value), jnp.result_type(value))
