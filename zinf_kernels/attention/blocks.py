"""Attention a block of queries and a block of keys at a time, in plain jnp.

Never holds more scores than one pair of blocks has. FlashAttention (arXiv:2205.14135):
the forward pass is algorithm 1, a softmax that is corrected as keys come; the backward
pass is algorithm 4, which computes the scores again from queries, keys and the
logarithm of each query's sum, the only value kept besides arguments and result.

Blocks of keys that no query of a block sees are left out: those after a causal query,
those before its window, those of other segments. Sizes of blocks are static; how many
a query needs is computed from positions and segments.

Shapes: B batch, T queries, S keys, K heads of keys, G query heads for each of them, H
width, V width of values; I and J number the blocks of queries and of keys, Q and C are
the tokens of one.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from zinf_kernels.attention.spec import (
    Operands,
    Spec,
    positions,
    score_dtype,
    shape_of,
    visible,
)
from zinf_kernels.attention.tiles import (
    add_piece,
    by_group,
    by_head,
    cut_tokens,
    join_keys,
    join_queries,
    pad_tail,
    read_piece,
    split_heads,
    whole_tokens,
)

# Most tokens of a block, and most scores of a pair of blocks over batch and heads.
BLOCK = 512
LEAST_BLOCK = 128
PAIR_SCORES = 1 << 24
# Most keys of a block backward on a CPU, whose cache then has the four arrays of the
# size of its scores: with 4 heads 1.3 times as fast as `BLOCK` keys, with 12 1.7 times.
# Forward more keys are faster.
BACKWARD_KEYS = 128
QUERIES_KEYS = "bkgqh,bkch->bkgqc"
WEIGHTS_VALUES = "bkgqc,bkcv->bkgqv"


def attention(spec: Spec, operands: Operands) -> jax.Array:
    """softmax(scores) v without whole scores; see `attention` of the folder."""
    return _attention(spec, dict(operands))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(spec: Spec, operands: dict[str, Any]) -> jax.Array:
    return _forward(spec, operands)[0]


def _forward(spec: Spec, operands: dict[str, Any]) -> tuple[jax.Array, Any]:
    blocks = _Blocks.of(spec, operands)
    out, lse_IBKGQ = blocks.forward()
    return out, (operands, out, lse_IBKGQ)


def _backward(spec: Spec, residuals: Any, d_out: jax.Array) -> tuple[dict[str, Any]]:
    operands, out, lse_IBKGQ = residuals
    on_cpu = spec.place is not None and spec.place.platform == "cpu"
    # Dropout draws by the numbers of blocks, so its blocks must be those of forward.
    has_few_keys = on_cpu and not spec.dropout
    blocks = _Blocks.of(spec, operands, BACKWARD_KEYS if has_few_keys else BLOCK)
    gradients = blocks.backward(out, lse_IBKGQ, d_out)
    return ({name: gradients.get(name) for name in operands},)


_attention.defvjp(_forward, _backward)


@dataclass(frozen=True)
class _Tile:
    """A pair of blocks: what its scores need besides queries and keys.

    Attributes:
        seen: (B or 1, 1 or K, 1 or G, Q, C), or None: each query sees each key.
        bias: the same shape, or None.
        kept: (B, K, G, Q, C), weights that dropout leaves; None without dropout.
    """

    seen: jax.Array | None
    bias: jax.Array | None
    kept: jax.Array | None


@dataclass(frozen=True)
class _Blocks:
    """The arrays of an attention as blocks of queries and of keys.

    Attributes:
        q: (I, B, K, G, Q, H).
        k, v: (J, B, K, C, H) and (J, B, K, C, V).
        tokens_q: positions, and segments if there are some, (I, B or 1, Q) each.
        tokens_k: the same of keys, (J, B or 1, C).
        pairs: mask and bias by name, (B or 1, K or 1, G or 1, I Q, J C).
    """

    spec: Spec
    operands: Operands
    q: jax.Array
    k: jax.Array
    v: jax.Array
    tokens_q: tuple[jax.Array, ...]
    tokens_k: tuple[jax.Array, ...]
    pairs: dict[str, jax.Array]

    @classmethod
    def of(cls, spec: Spec, operands: Operands, most_keys: int = BLOCK) -> "_Blocks":
        """Blocks of up to `most_keys` keys; those of queries do not depend on it."""
        batch, num_queries, num_keys, num_heads, key_heads, *_ = shape_of(operands)
        size_q, size_k = _block_sizes(batch * num_heads, num_queries, num_keys)
        size_k = min(size_k, most_keys)
        q, k, v = (operands[name] for name in "qkv")
        tokens = [positions(operands)]
        if "q_segments" in operands:
            tokens.append((operands["q_segments"], operands["k_segments"]))
        whole = whole_tokens(num_queries, size_q), whole_tokens(num_keys, size_k)
        return cls(
            spec,
            operands,
            split_heads(cut_tokens(q, size_q), key_heads),
            cut_tokens(k, size_k).swapaxes(2, 3),
            cut_tokens(v, size_k).swapaxes(2, 3),
            tuple(cut_tokens(x, size_q, mode="edge") for x, _ in tokens),
            tuple(cut_tokens(x, size_k, mode="edge") for _, x in tokens),
            {
                name: by_group(pad_tail(operands[name], whole), key_heads)
                for name in operands.keys() & {"mask", "bias"}
            },
        )

    # Which blocks of keys a block of queries needs.

    def key_range(self) -> tuple[jax.Array, jax.Array]:
        """For each block of queries: the first block of keys, and one past the last."""
        needed_IJ = self._needed()
        first = jnp.argmax(needed_IJ, axis=1)
        end = needed_IJ.shape[1] - jnp.argmax(needed_IJ[:, ::-1], axis=1)
        is_any = jnp.any(needed_IJ, axis=1)
        return first.astype(jnp.int32), jnp.where(is_any, end, first).astype(jnp.int32)

    def _needed(self) -> jax.Array:
        """(I, J): False only if positions or segments hide all keys of the block."""
        spec = self.spec
        queries, keys = map(_Limits.of, (self.tokens_q[0], self.tokens_k[0]))
        needed_IJ = jnp.ones((self.q.shape[0], self.k.shape[0]), bool)
        if spec.causal:
            needed_IJ &= (keys.low[None] <= queries.high[:, None]).any(-1)
        if spec.window is not None:
            near = queries.low[:, None] - keys.high[None] < spec.window
            if not spec.causal:
                near &= keys.low[None] - queries.high[:, None] < spec.window
            needed_IJ &= near.any(-1)
        if len(self.tokens_q) > 1:
            queries, keys = map(_Limits.of, (self.tokens_q[1], self.tokens_k[1]))
            meets = keys.low[None] <= queries.high[:, None]
            meets &= queries.low[:, None] <= keys.high[None]
            needed_IJ &= meets.any(-1)
        return needed_IJ

    # One pair of blocks.

    def tile(self, i: jax.Array, j: jax.Array) -> _Tile:
        """What blocks i of queries and j of keys need besides queries and keys."""
        size_q, size_k = self.q.shape[4], self.k.shape[3]
        tokens_q = [x[i] for x in self.tokens_q]
        tokens_k = [x[j] for x in self.tokens_k]
        segments = (tokens_q[1], tokens_k[1]) if len(tokens_q) > 1 else (None, None)
        seen = visible(self.spec, tokens_q[0], tokens_k[0], *segments)
        if seen is not None:
            seen = seen[:, None, None]
        pairs = {
            name: read_piece(x, (i * size_q, j * size_k), (size_q, size_k))
            for name, x in self.pairs.items()
        }
        if "mask" in pairs:
            seen = _both(seen, pairs["mask"])
        num_keys = self.operands["k"].shape[1]
        if num_keys < self.k.shape[0] * size_k:
            is_key = j * size_k + jnp.arange(size_k) < num_keys
            seen = _both(seen, is_key.reshape(1, 1, 1, 1, -1))
        return _Tile(seen, pairs.get("bias"), self._kept(i, j))

    def _kept(self, i: jax.Array, j: jax.Array) -> jax.Array | None:
        if not self.spec.dropout:
            return None
        key = jax.random.fold_in(self.operands["dropout_key"], i)
        shape = (*self.q.shape[1:5], self.k.shape[3])
        return jax.random.bernoulli(
            jax.random.fold_in(key, j), 1.0 - self.spec.dropout, shape
        )

    def scores(self, q: jax.Array, k: jax.Array, tile: _Tile) -> tuple[Any, Any]:
        """Scores of a pair of blocks, (B, K, G, Q, C), and their soft cap's tanh."""
        wide = score_dtype(q.dtype)
        scores = jnp.einsum(QUERIES_KEYS, q, k, preferred_element_type=wide)
        scores = scores * self.spec.scale
        capped = None
        if self.spec.soft_cap is not None:
            capped = jnp.tanh(scores / self.spec.soft_cap)
            scores = capped * self.spec.soft_cap
        if tile.bias is not None:
            scores = scores + tile.bias.astype(wide)
        if tile.seen is not None:
            scores = jnp.where(tile.seen, scores, jnp.finfo(wide).min)
        return scores, capped

    def weights(self, scores: jax.Array, tile: _Tile, over: jax.Array) -> jax.Array:
        """exp(scores - over); zero where a key is not seen, in rows without any too."""
        weights = jnp.exp(scores - over[..., None])
        return weights if tile.seen is None else jnp.where(tile.seen, weights, 0)

    def dropped(self, x: jax.Array, tile: _Tile) -> jax.Array:
        if tile.kept is None:
            return x
        return jnp.where(tile.kept, x / (1.0 - self.spec.dropout), 0)

    # Passes over all blocks.

    def forward(self) -> tuple[jax.Array, jax.Array]:
        """The result, (B, T, N, V), and log of each query's sum, (I, B, K, G, Q)."""
        wide = score_dtype(self.q.dtype)
        rows = self.q.shape[1:5]

        def keys(i: jax.Array, q: jax.Array, j: jax.Array, state: Any) -> Any:
            highest, total, values = state
            tile = self.tile(i, j)
            scores, _ = self.scores(q, self.k[j], tile)
            new = jnp.maximum(highest, scores.max(-1))
            shrink = jnp.exp(highest - new)
            weights = self.weights(scores, tile, new)
            total = total * shrink + weights.sum(-1)
            weights = self.dropped(weights, tile).astype(self.v.dtype)
            added = jnp.einsum(
                WEIGHTS_VALUES, weights, self.v[j], preferred_element_type=wide
            )
            return new, total, values * shrink[..., None] + added

        def queries(_: None, block: Any) -> tuple[None, Any]:
            i, q, first, end = block
            start = (
                *self._start(rows, wide),
                jnp.zeros((*rows, self.v.shape[-1]), wide),
            )
            highest, total, values = jax.lax.fori_loop(
                first, end, partial(keys, i, q), start
            )
            is_any = total > 0
            values = values / jnp.where(is_any, total, 1)[..., None]
            # exp(score - lse) is 0 for a query that sees no key.
            lse = jnp.where(is_any, highest + jnp.log(total), jnp.finfo(wide).max)
            return None, (values.astype(self.v.dtype), lse)

        count = jnp.arange(self.q.shape[0], dtype=jnp.int32)
        _, (out_IBKGQV, lse) = jax.lax.scan(
            queries, None, (count, self.q, *self.key_range())
        )
        return join_queries(out_IBKGQV, self.operands["q"].shape[1]), lse

    def _start(self, rows: tuple[int, ...], wide: Any) -> tuple[jax.Array, jax.Array]:
        """Highest score and sum of each query before any key: those of its sink."""
        if "sinks" not in self.operands:
            return jnp.full(rows, jnp.finfo(wide).min), jnp.zeros(rows, wide)
        sinks = jnp.broadcast_to(self._sinks(wide)[None], rows)
        return sinks, jnp.ones(rows, wide)

    def _sinks(self, wide: Any) -> jax.Array:
        """(K, G, 1)."""
        sinks = self.operands["sinks"].astype(wide)
        return sinks.reshape(self.q.shape[2], self.q.shape[3], 1)

    def backward(
        self, out: jax.Array, lse: jax.Array, d_out: jax.Array
    ) -> dict[str, jax.Array]:
        """Gradients by name, of the arguments' shapes and dtypes."""
        wide = score_dtype(self.q.dtype)
        size_q, key_heads = self.q.shape[4], self.q.shape[2]
        d_out_I = split_heads(cut_tokens(d_out, size_q), key_heads)
        out_I = split_heads(cut_tokens(out, size_q), key_heads)
        dot_I = (d_out_I.astype(wide) * out_I.astype(wide)).sum(-1)

        def keys(block: Any, j: jax.Array, sums: dict[str, Any]) -> dict[str, Any]:
            i, q, d_out, dot, lse = block
            k, v, tile = self.k[j], self.v[j], self.tile(i, j)
            scores, capped = self.scores(q, k, tile)
            weights = self.weights(scores, tile, lse)
            d_weights = jnp.einsum(
                "bkgqv,bkcv->bkgqc", d_out, v, preferred_element_type=wide
            )
            d_scores = weights * (self.dropped(d_weights, tile) - dot[..., None])
            left = self.dropped(weights, tile).astype(v.dtype)
            new = dict(sums)
            if "bias" in sums:
                at = (i * size_q, j * k.shape[2])
                new["bias"] = add_piece(sums["bias"], d_scores, at)
            if capped is not None:
                d_scores = d_scores * (1 - jnp.square(capped))
            d_scores = (d_scores * self.spec.scale).astype(q.dtype)
            add = partial(jnp.einsum, preferred_element_type=wide)
            new["q"] = sums["q"] + add("bkgqc,bkch->bkgqh", d_scores, k)
            d_k = add("bkgqc,bkgqh->bkch", d_scores, q)
            d_v = add("bkgqc,bkgqv->bkcv", left, d_out)
            new["k"] = sums["k"].at[j].add(d_k)
            new["v"] = sums["v"].at[j].add(d_v)
            return new

        def queries(sums: dict[str, Any], block: Any) -> tuple[dict[str, Any], Any]:
            *arrays, first, end = block
            start = sums | {"q": jnp.zeros(self.q.shape[1:], wide)}
            found = jax.lax.fori_loop(first, end, partial(keys, arrays), start)
            d_q = found.pop("q")
            return found, d_q.astype(self.q.dtype)

        sums = {"k": jnp.zeros(self.k.shape, wide), "v": jnp.zeros(self.v.shape, wide)}
        if "bias" in self.pairs:
            sums["bias"] = jnp.zeros(self.pairs["bias"].shape, wide)
        count = jnp.arange(self.q.shape[0], dtype=jnp.int32)
        blocks = (count, self.q, d_out_I, dot_I, lse, *self.key_range())
        sums, d_q_IBKGQH = jax.lax.scan(queries, sums, blocks)
        q, k, v = (self.operands[name] for name in "qkv")
        gradients = {
            "q": join_queries(d_q_IBKGQH, q.shape[1]),
            "k": join_keys(sums["k"], k),
            "v": join_keys(sums["v"], v),
        }
        if "bias" in sums:
            bias = self.operands["bias"]
            whole = by_head(sums["bias"], bias.shape[1])
            whole = whole[:, :, : bias.shape[2], : bias.shape[3]]
            gradients["bias"] = whole.astype(bias.dtype)
        if "sinks" in self.operands:
            weights = jnp.exp(self._sinks(wide)[None, None] - lse)
            total = -(weights * dot_I).sum((0, 1, 4))
            dtype = self.operands["sinks"].dtype
            gradients["sinks"] = total.reshape(-1).astype(dtype)
        return gradients


@dataclass(frozen=True)
class _Limits:
    """The smallest and the largest number of each block, (blocks, B or 1)."""

    low: jax.Array
    high: jax.Array

    @classmethod
    def of(cls, tokens: jax.Array) -> "_Limits":
        return cls(tokens.min(-1), tokens.max(-1))


def _block_sizes(num_rows: int, num_queries: int, num_keys: int) -> tuple[int, int]:
    """Tokens of a block of queries, and of keys, for B x N rows of scores a token."""
    size_k = min(BLOCK, num_keys)
    size_q = min(BLOCK, num_queries)
    room = PAIR_SCORES // max(num_rows, 1)
    while size_q * size_k > room and max(size_q, size_k) > LEAST_BLOCK:
        if size_q >= size_k:
            size_q = -(-size_q // 2)
        else:
            size_k = -(-size_k // 2)
    return size_q, size_k


def _both(seen: jax.Array | None, also: jax.Array) -> jax.Array:
    return also if seen is None else jnp.logical_and(seen, also)
