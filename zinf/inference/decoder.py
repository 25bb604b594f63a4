"""What generation needs of a model: one function that makes logits, and its cache."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from zinf.core.problem.source import WrongResult, described, named_leaves


@dataclass(frozen=True)
class Decoder:
    """A model that reads tokens in parts and remembers the earlier ones in a cache.

    Sequences are padded on the left: position `p` of a sequence is in slot
    `start + p` of the cache, and the slots before `start` hold no token.

    Attributes:
        apply: `(params[, model_state], tokens, cache) -> (logits, cache)`. `tokens` are
            int32 (B, S), for the next S slots. `logits` are those of the token after
            the last one, (B, V), or of all, (B, S, V). The new cache has the structure,
            shapes and dtypes of the old one.
        init_cache: `(starts, length) -> cache`, the cache before the first token: a
            pytree of arrays with room for `length` slots. `starts` are int32 (B,); a
            model that reads no padding must keep them in its cache.
        max_length: the most tokens of a sequence; None if there is no limit.
        switches_at: the most tokens of a sequence for which the model has the cache of
            its beginning. A sequence that gets longer is read anew, once, from its
            first token. None: no sequence is.
        apply_all: as `apply`, with logits after each token, (B, S, V). Drafts need it.
        take_back: `(cache, num_tokens) -> cache`, the cache before so many of the last
            tokens of each sequence were read, int32 (B,). Drafts need it, and prompts
            that are read in parts; a model whose state cannot forget a token has none.
        reads_whole_prompts: a prompt is one call of `apply`, since the cache of its
            beginning depends on its end. Else long ones may be read in several calls,
            which needs `take_back`.
        reads: whether the model reads a parameter, by its key path, where others are
            beside it; None: it reads all.
    """

    apply: Callable
    init_cache: Callable
    max_length: int | None = None
    switches_at: int | None = None
    apply_all: Callable | None = None
    take_back: Callable | None = None
    reads_whole_prompts: bool = False
    reads: Callable[[str], bool] | None = None

    def check_drafts(self) -> None:
        """Raise unless the model can check guesses and forget the wrong ones."""
        absent = [n for n in ("apply_all", "take_back") if getattr(self, n) is None]
        if absent:
            raise NotImplementedError(
                f"The decoder has no {' and no '.join(absent)}, so tokens that were "
                "guessed wrong cannot be taken back. Generate without drafts, or give "
                "the decoder these functions."
            )


def checked_all(decoder: Decoder, *arguments: Any) -> tuple[jax.Array, Any]:
    """The float32 logits (B, S, V) after each token, and the new cache.

    Raises:
        ValueError: `apply_all` returned something else.
    """
    *_, tokens, cache = arguments
    assert decoder.apply_all is not None
    logits, new = decoder.apply_all(*arguments)
    _check_cache(cache, new)
    if jnp.ndim(logits) != 3 or logits.shape[:2] != tokens.shape:
        raise WrongResult(
            "apply_all of a decoder must return logits (B, S, V) for tokens "
            f"{list(tokens.shape)}; it returned {described(logits)}."
        )
    return logits.astype(jnp.float32), new


def checked_apply(decoder: Decoder, *arguments: Any) -> tuple[jax.Array, Any]:
    """The float32 logits (B, V) of the next token, and the new cache.

    Raises:
        ValueError: `apply` returned something else.
    """
    cache = arguments[-1]
    result = decoder.apply(*arguments)
    if not isinstance(result, tuple) or len(result) != 2:
        raise WrongResult(
            "apply of a decoder must return (logits, cache); it returned "
            f"{described(result)}."
        )
    logits, new = result
    _check_cache(cache, new)
    if jnp.ndim(logits) == 3:
        logits = logits[:, -1]
    tokens = arguments[-2]
    if jnp.ndim(logits) != 2 or logits.shape[0] != tokens.shape[0]:
        raise WrongResult(
            "apply of a decoder must return logits (B, V) or (B, S, V) for "
            f"{tokens.shape[0]} sequences; it returned {described(logits)}."
        )
    return logits.astype(jnp.float32), new


def _check_cache(old: Any, new: Any) -> None:
    if jax.tree.structure(old) != jax.tree.structure(new):
        raise WrongResult(
            "apply of a decoder must return its cache with the structure "
            f"{jax.tree.structure(old)}; it returned {jax.tree.structure(new)}."
        )
    found = named_leaves(new)
    for path, leaf in named_leaves(old).items():
        kinds = [(jnp.shape(x), jnp.result_type(x)) for x in (leaf, found[path])]
        if kinds[0] != kinds[1]:
            raise WrongResult(
                f"apply of a decoder returned the leaf {path!r} of its cache as "
                f"{described(found[path])}; it was {described(leaf)}. Shapes and "
                "dtypes of a cache stay what they are."
            )
