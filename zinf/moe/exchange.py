"""Experts on a mesh: tokens are divided among all devices, experts along `expert`.

The weights of an expert stay on the devices that have it, and tokens travel, in one of
two ways (DeepSpeed-MoE, https://arxiv.org/abs/2201.05596, section 5; GShard,
https://arxiv.org/abs/2006.16668, section 3.2):

* If the number of tokens that an expert takes is bounded (`Capacity`), each device
  sends each expert its tokens, and gets back what the expert makes of them: two
  all-to-alls forward, and two backward.
* Without a bound shapes would depend on the routes, so the devices along `expert`
  gather all their tokens, each computes what its experts add, and the sums are
  scattered: an all-gather and a reduce-scatter in each pass.

With a bound the way that sends fewer bytes is taken; both give the same numbers up to
the order of sums. The gradient of an expert is summed over the devices that have it,
and the other passes of the loop are those of one device (`zinf.moe.loop`).

The weights of an expert may be cut along `tensor` too, as those of a dense MLP are
(DeepSpeed-TED, https://arxiv.org/abs/2303.06318). Then the devices along `tensor`,
which have sent and got different tokens, gather these before the experts, and scatter
the sums of what their parts give: together the bytes of Megatron's all-reduce.

Shape suffixes, beside those of `loop`: T are the tokens of a device here.
  O  experts that a device has    S  slots: places of a device's tokens at one expert
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from zinf.core.sharding import Dim
from zinf.core.sharding.axes.experts import ExpertParts, num_expert_parts
from zinf.core.sharding.axes.tensor import cut_expert
from zinf.core.sharding.mesh import AXES, DIM_AXES, EXPERT, TENSOR, axis_size
from zinf.moe.blocks import ExpertFunction, queues, rows_at
from zinf.moe.gating import NO_EXPERT, Capacity
from zinf.moe.loop import in_blocks

# The name of what devices have got from each other, for policies of `jax.checkpoint`.
EXCHANGED = "zinf.exchanged"


def keeps_exchanged() -> Callable[..., Any]:
    """A policy for `jax.checkpoint`: save what devices send each other, and no more.

    The backward pass then computes everything again but sends nothing twice
    ("communication-aware checkpointing", DeepSpeed-TED,
    https://arxiv.org/abs/2303.06318, section 5.2). Saved are what experts get and what
    they return, and all that a model marks with `exchanged`.
    """
    return jax.checkpoint_policies.save_only_these_names(EXCHANGED)


def exchanged(array: jax.Array) -> jax.Array:
    """Marks a value that was sent between devices, for `keeps_exchanged`."""
    return checkpoint_name(array, EXCHANGED)


# Examples are cut along these, and then positions: (batch, time) merged into one dim.
# Devices along `tensor` have the same examples. Each takes some of the tokens past the
# experts, so that no token is sent or computed twice ("duplicate token dropping",
# DeepSpeed-TED, https://arxiv.org/abs/2303.06318, section 5.1).
OF_EXAMPLES = DIM_AXES[Dim.BATCH]
TOKEN_AXES = (*OF_EXAMPLES, *(name for name in AXES if name not in OF_EXAMPLES))


def _parts(function: ExpertFunction, one: Any, rows: Any) -> ExpertParts | None:
    """How devices along `tensor` divide an expert; None if each has it whole."""
    parts = num_expert_parts()
    return cut_expert(function, one, rows, parts) if parts > 1 else None


def check_divides(num_experts: int, splits: int, mesh: Mesh) -> None:
    """Raise unless the devices along `expert` can divide the experts.

    Raises:
        ValueError: they do not divide evenly.
        NotImplementedError: the experts come in pieces too, or each is cut inside.
    """
    count = axis_size(mesh, (EXPERT,))
    if num_experts % count:
        raise ValueError(
            f"A layer has {num_experts} experts, which mesh.expert = {count} devices "
            f"cannot divide evenly. Make it a divisor of {num_experts}, and use "
            "mesh.fsdp for the other devices."
        )
    if num_expert_parts() > 1 and splits > 1:
        raise NotImplementedError(
            f"A layer's experts come in {splits} pieces (splits, or "
            "model.expert_splits) and expert_tensor_parallel_size divides each of "
            "them, which zinf cannot do at once. Set one of them to 1."
        )
    if count > 1 and splits > 1:
        raise NotImplementedError(
            f"A layer's experts come in {splits} pieces (splits, or "
            f"model.expert_splits) and mesh.expert is {count}, which zinf cannot do at "
            f"once. Set splits to 1: a device has 1/{count} of the experts."
        )


def divided(
    function: ExpertFunction,
    block: int,
    weights: Any,
    x: Float[Array, "tokens dim"],
    choice: Int[Array, "tokens k"],
    gate: Float[Array, "tokens k"],
    *,
    mesh: Mesh,
    capacity: Capacity | None,
) -> Float[Array, "tokens dim"]:
    """`zinf.moe.loop.in_blocks` on a mesh.

    Args:
        capacity: what the choices keep to; if they do not, the result is NaN.
    """
    axes = tuple(name for name in TOKEN_AXES if mesh.shape.get(name, 1) > 1)
    num_tokens, num_devices = x.shape[0], axis_size(mesh, axes)
    missing = -num_tokens % num_devices

    def padded(array: jax.Array, value: int) -> jax.Array:
        return jnp.pad(array, [(0, missing), (0, 0)], constant_values=value)

    if missing:
        x, choice, gate = padded(x, 0), padded(choice, NO_EXPERT), padded(gate, 0)
    count = axis_size(mesh, (EXPERT,))
    num_experts = jax.tree.leaves(weights)[0].shape[0]
    one = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape[1:], w.dtype), weights)
    parts = _parts(function, one, jax.ShapeDtypeStruct((block, x.shape[1]), x.dtype))
    here: Callable = partial(in_blocks, function, block)
    if count > 1 or parts is not None:
        exchange = _Exchange(function, block, num_experts, count, parts)
        here = exchange.gathering
        slots = _slots(capacity, x.shape[0] // num_devices, choice.shape[1])
        # A device sends `num_experts * slots` rows to the experts, and gets as many; or
        # it gets the tokens of `count` devices, and sends as many sums.
        few = count * x.shape[0] // num_devices
        if count > 1 and slots is not None and num_experts * slots <= few:
            made = jax.eval_shape(function, one, jax.ShapeDtypeStruct(x.shape, x.dtype))
            here = partial(exchange.sending, slots, made.dtype)
    rows = PartitionSpec(axes)
    result = jax.shard_map(
        here,
        mesh=mesh,
        in_specs=(_weight_specs(weights, count, parts), rows, rows, rows),
        out_specs=rows,
        check_vma=False,
    )(weights, x, choice, gate)
    return result[:num_tokens]


def _weight_specs(weights: Any, count: int, parts: ExpertParts | None) -> Any:
    """The specs of stacked weights: experts along `expert`, each one along `tensor`."""
    leaves, structure = jax.tree.flatten(weights)
    dims = parts.dims if parts is not None else (None,) * len(leaves)
    specs = []
    for dim in dims:
        inner = [] if dim is None else [*[None] * dim, TENSOR]
        specs.append(PartitionSpec(EXPERT if count > 1 else None, *inner))
    return jax.tree.unflatten(structure, specs)


def _slots(capacity: Capacity | None, num_tokens: int, k: int) -> int | None:
    """The most routes that lead from `num_tokens` neighbours to one expert."""
    if capacity is None:
        return None
    size = capacity.group_size
    # Groups that a device has a part of.
    groups = -(-num_tokens // size)
    if num_tokens % size and size % num_tokens:
        groups += 1
    return min(groups * capacity.tokens, num_tokens * k)


@dataclass(frozen=True)
class _Exchange:
    """The work of one device on its tokens, inside `jax.shard_map`.

    Attributes:
        num_experts: experts of the layer.
        count: devices along `expert`, each of which has some of them.
        parts: how devices along `tensor` divide each expert, if they do.
    """

    function: ExpertFunction
    block: int
    num_experts: int
    count: int
    parts: ExpertParts | None

    @property
    def num_own(self) -> int:
        return self.num_experts // self.count

    def gathering(
        self, weights: Any, x_TD: jax.Array, choice_Tk: jax.Array, gate_Tk: jax.Array
    ) -> jax.Array:
        """All-gather the group's tokens; each device applies its experts to all."""
        axes = (EXPERT,) if self.count > 1 else ()
        axes += () if self.parts is None else (TENSOR,)
        x, choice, gate = (
            exchanged(jax.lax.all_gather(array, axes, tiled=True))
            for array in (x_TD, choice_Tk, gate_Tk)
        )
        if self.count > 1:
            # An expert of another device becomes negative, or too large: none here.
            choice -= jax.lax.axis_index(EXPERT).astype(choice.dtype) * self.num_own
        sums = self._in_blocks(weights, x, choice, gate)
        return exchanged(jax.lax.psum_scatter(sums, axes, tiled=True))

    def _in_blocks(self, weights: Any, *rest: jax.Array) -> jax.Array:
        """The sums of this device's experts, or its part of them."""
        if self.parts is not None:
            leaves, structure = jax.tree.flatten(weights)
            is_first = jax.lax.axis_index(TENSOR) == 0
            # Added once, and not on each device.
            leaves = [
                jnp.where(is_first, w, jnp.zeros_like(w)) if is_added else w
                for w, is_added in zip(leaves, self.parts.are_added, strict=True)
            ]
            weights = jax.tree.unflatten(structure, leaves)
        return in_blocks(self.function, self.block, weights, *rest)

    def sending(
        self,
        slots: int,
        dtype: Any,
        weights: Any,
        x_TD: jax.Array,
        choice_Tk: jax.Array,
        gate_Tk: jax.Array,
    ) -> jax.Array:
        """Each token goes to its experts and comes back.

        Args:
            slots: the most routes from one device to one expert.
            dtype: of what an expert returns.
        """
        num_routes, k = choice_Tk.size, choice_Tk.shape[1]
        order_N, owner_N, rank_N, counts_E = queues(choice_Tk, self.num_experts)
        num_places = self.num_experts * slots
        is_placed_N = (owner_N < self.num_experts) & (rank_N < slots)
        place_N = jnp.where(is_placed_N, owner_N * slots + rank_N, num_places)
        route_P = jnp.full(num_places, num_routes, jnp.int32)
        route_P = route_P.at[place_N].set(order_N, mode="drop")
        arrived = self._to_experts(rows_at(x_TD, route_P // k), slots)
        # Slots are filled from the first, so counts say which hold tokens.
        all_counts = jax.lax.all_gather(counts_E, EXPERT)
        if self.parts is not None:
            arrived, all_counts = (
                jax.lax.all_gather(array, TENSOR, tiled=True)
                for array in (arrived, all_counts)
            )
        arrived, all_counts = exchanged(arrived), exchanged(all_counts)
        first = jax.lax.axis_index(EXPERT) * self.num_own
        counts_O = jax.lax.dynamic_slice_in_dim(all_counts, first, self.num_own, 1)
        is_token = jnp.arange(slots)[None, None] < counts_O[:, :, None]
        own_O = jnp.arange(self.num_own, dtype=jnp.int32)[None, :, None]
        expert = jnp.where(is_token, own_O, NO_EXPERT).reshape(-1, 1)
        ones = jnp.ones(expert.shape, jnp.float32)
        made = self._in_blocks(weights, arrived, expert, ones).astype(dtype)
        if self.parts is not None:
            made = jax.lax.psum_scatter(made, TENSOR, tiled=True)
        made_PD = exchanged(self._to_experts(made, slots))  # And back: its inverse.
        gate_P1 = rows_at(gate_Tk.reshape(-1), route_P)[:, None].astype(jnp.float32)
        sum_TD = jnp.zeros(x_TD.shape, jnp.float32)
        sum_TD = sum_TD.at[route_P // k].add(
            made_PD.astype(jnp.float32) * gate_P1, mode="drop"
        )
        # No router here does this; another one must not lose tokens in silence.
        is_broken = (counts_E > slots).any()
        return jnp.where(is_broken, jnp.nan, sum_TD)

    def _to_experts(self, rows_PD: jax.Array, slots: int) -> jax.Array:
        """Exchanges blocks of `num_own * slots` rows along `expert`."""
        blocks = rows_PD.reshape(self.count, self.num_own * slots, -1)
        return jax.lax.all_to_all(blocks, EXPERT, 0, 0).reshape(rows_PD.shape)
