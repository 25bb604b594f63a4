"""A `transformers` model with a cache of plain arrays, for generation.

`transformers` keeps keys and values in the layers of a `StaticCache`, which a model
overwrites. Here the tensors of the layers are arrays that go in and out of a pure
function. Layers that attend to a window keep all positions too: their mask hides the
others, and no choice depends on how many tokens were read.

Keys are in the cache as they were rotated. Where rotary embeddings change with the
length, `dynamic` goes on beside keys with earlier frequencies, as `transformers` does.
`longrope` has the sequence read anew at its switch, as Phi-3 does in `transformers`;
other classes go on there with keys of both kinds, and here they do not.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torchax.interop import jax_view, torch_view
from transformers.cache_utils import Cache, StaticLayer, get_layer_types_and_kwargs

from zinf.core.program import ArraySpec
from zinf.hf.batch import without
from zinf.hf.model import Model, Params
from zinf.hf.rotary import depends_on_length, switch_of
from zinf.inference import Decoder

# Kinds of layers that keep keys and values, by their names in a configuration.
ATTENTION = ("full_attention", "sliding_attention", "dummy")
State = dict[str, Any]


class AbstractBeside(ABC):
    """What a model gets beside the tokens of a sequence, such as images."""

    @abstractmethod
    def state(self, starts: jax.Array) -> Any:
        """Arrays that the cache has for it, which stay as they are.

        Args:
            starts: int32 (B,), the slot of the first token of each sequence.
        """

    @abstractmethod
    def inputs(self, state: Any, given: Mapping[str, jax.Array]) -> dict[str, Any]:
        """The inputs of a call of the model, of which `given` are those of text.

        Prompts are read at once, in a call of several tokens; later ones have one.
        """


def decoder_of(
    model: Model, dtype: Any, beside: AbstractBeside | None = None
) -> Decoder:
    """The model as a function of tokens and a cache.

    Args:
        dtype: of the parameters that `apply` is given.
        beside: what it gets beside tokens; drafts are then not there.

    Raises:
        NotImplementedError: a layer keeps something else than keys and values.
    """
    text = model.config.get_text_config(decoder=True)
    kinds, _ = get_layer_types_and_kwargs(text)
    others = sorted(set(kinds) - set(ATTENTION))
    if others:
        raise NotImplementedError(
            f"{model.name} ({text.model_type}) has layers of the kind "
            f"{', '.join(others)}, whose state zinf does not keep yet. Generate with "
            "transformers, or with a model whose layers are attention."
        )
    shapes = _shapes(model, len(kinds), str(jnp.dtype(dtype)))

    def init_cache(starts: jax.Array, length: int) -> State:
        def zeros(spec: ArraySpec) -> jax.Array:
            _, heads, _, width = spec.shape
            return jnp.zeros((len(starts), heads, length, width), spec.dtype)

        return {
            "at": jnp.zeros(len(starts), jnp.int32),
            "starts": jnp.asarray(starts, jnp.int32),
            "beside": {} if beside is None else beside.state(starts),
            "layers": {
                name: {part: zeros(spec) for part, spec in layer.items()}
                for name, layer in shapes.items()
            },
        }

    def apply(params: Params, tokens: jax.Array, state: State) -> tuple[Any, State]:
        rest = {"every": False, "beside": beside}
        logits, new = _apply(model, len(kinds), params, tokens, state, **rest)
        last = logits[:, -1]
        return last if beside is None else without(model.never_written, last), new

    def apply_all(params: Params, tokens: jax.Array, state: State) -> tuple[Any, State]:
        return _apply(model, len(kinds), params, tokens, state, every=True)

    return Decoder(
        apply,
        init_cache,
        model.max_length,
        switch_of(model.module),
        apply_all if beside is None else None,
        _taken_back,
        # Images come with the first call; some rotations depend on the last position.
        beside is not None or depends_on_length(model.module),
    )


def _taken_back(state: State, num_tokens: jax.Array) -> State:
    """The state before the last `num_tokens` tokens of each sequence were read."""
    return {**state, "at": state["at"] - num_tokens}


def _apply(
    model: Model,
    num_layers: int,
    params: Params,
    tokens: jax.Array,
    state: State,
    *,
    every: bool,
    beside: AbstractBeside | None = None,
) -> tuple[jax.Array, State]:
    """The logits (B, S, V) of the token after each, and the new state.

    Args:
        every: else only those after the last token need be there.
    """
    at, starts, length = state["at"], state["starts"], tokens.shape[1]
    slots = at[:, None] + jnp.arange(length)[None]
    # Guesses may reach beyond the longest sequence, and are dropped there.
    longest = None if model.max_length is None else model.max_length - 1
    positions = jnp.clip(slots - starts[:, None], 0, longest)
    num_slots = _num_slots(state["layers"])
    # The mask of the model adds that no token sees a later one.
    is_token = jnp.arange(num_slots)[None] >= starts[:, None]
    cache = _Cache(num_layers, num_slots)

    def fill() -> None:
        for i, layer in enumerate(cache.layers):
            layer.cumulative_length = torch_view(at[:, None])
            if (parts := state["layers"].get(str(i))) is not None:
                layer.fill(parts)

    inputs = {
        "input_ids": tokens,
        "attention_mask": is_token.astype(jnp.int32),
        "position_ids": positions,
    }
    if beside is not None:
        inputs = beside.inputs(state["beside"], inputs)
    logits = model.call(params, inputs, cache=cache, every=every, before=fill)
    layers = {name: cache.layers[int(name)].parts() for name in state["layers"]}
    new = {**state, "at": at + length, "layers": layers}
    return logits, new


def _num_slots(layers: Mapping[str, Mapping[str, jax.Array]]) -> int:
    return next(iter(layers.values()))["keys"].shape[2]


def _shapes(
    model: Model, num_layers: int, dtype: str
) -> dict[str, dict[str, ArraySpec]]:
    """Shapes of one token's keys and values, for each layer that caches any."""
    found: dict[str, dict[str, ArraySpec]] = {}

    def read(params: Params) -> jax.Array:
        cache = _Cache(num_layers, 1)
        one = jnp.zeros((1, 1), jnp.int32)
        inputs = {"input_ids": one, "attention_mask": one + 1, "position_ids": one}
        logits = model.call(params, inputs, cache=cache)
        for i, layer in enumerate(cache.layers):
            if layer.is_initialized:
                parts = layer.parts().items()
                found[str(i)] = {
                    n: ArraySpec(x.shape, str(x.dtype), x.dtype.itemsize)
                    for n, x in parts
                }
        return logits

    specs = model.specs.items()
    jax.eval_shape(read, {n: jax.ShapeDtypeStruct(s.shape, dtype) for n, s in specs})
    return found


class _Layer(StaticLayer):
    """Keys and values of all slots; an update makes new tensors and changes none."""

    def fill(self, parts: Mapping[str, jax.Array]) -> None:
        self.keys, self.values = torch_view(parts["keys"]), torch_view(parts["values"])
        self.is_initialized = True

    def parts(self) -> dict[str, jax.Array]:
        return {"keys": jax_view(self.keys), "values": jax_view(self.values)}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = jax_view(key_states), jax_view(value_states)
        if not self.is_initialized:
            parts = {"keys": _room(keys, self), "values": _room(values, self)}
            first = jnp.zeros((keys.shape[0], 1), jnp.int32)
            self.cumulative_length = torch_view(first)
            self.fill(parts)
        at = jax_view(self.cumulative_length)[:, 0]
        old = self.parts()
        self.fill(
            {
                "keys": _put(old["keys"], keys, at),
                "values": _put(old["values"], values, at),
            }
        )
        return self.keys, self.values

    def get_seq_length(self) -> Any:
        # The number of slots before this call, (B, 1): see `attention.boolean_mask`.
        return self.cumulative_length


def _room(states: jax.Array, layer: StaticLayer) -> jax.Array:
    batch, heads, _, width = states.shape
    return jnp.zeros((batch, heads, layer.max_cache_len, width), states.dtype)


def _put(cache: jax.Array, states: jax.Array, at: jax.Array) -> jax.Array:
    """The cache (B, heads, slots, width), with the states of each row at its slot."""
    put = jax.vmap(jax.lax.dynamic_update_slice_in_dim, (0, 0, 0, None))
    return put(cache, states.astype(cache.dtype), at, 1)


class _Cache(Cache):
    def __init__(self, num_layers: int, num_slots: int):
        super().__init__(layers=[_Layer(num_slots) for _ in range(num_layers)])
