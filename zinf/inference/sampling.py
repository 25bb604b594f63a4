"""Chooses the next token from logits, as `transformers` does, with a key a sequence.

The order of the steps is that of `GenerationMixin._get_logits_processor`: repetition
penalty (Keskar et al., arXiv:1909.05858, section 4.1), least number of new tokens,
temperature, top-k, top-p (Holtzman et al., arXiv:1904.09751) and min-p (Nguyen et al.,
arXiv:2407.01082). The token is then drawn by the Gumbel-max trick from bits that depend
on the key of the sequence and on the number of the token alone, so that the other
sequences of a batch change nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf.core.jaxpr.keys import from_words

# Settings of `GenerationConfig` that change nothing at these values.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "guidance_scale": (1, 1.0),
    "length_penalty": (1.0,),
    "diversity_penalty": (0.0,),
    "early_stopping": (False,),
    "renormalize_logits": (False,),
    "remove_invalid_values": (False,),
    "min_length": (0,),
    "penalty_alpha": (),
    "top_h": (),
    "dola_layers": (),
    "bad_words_ids": (),
    "force_words_ids": (),
    "constraints": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "sequence_bias": (),
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "exponential_decay_length_penalty": (),
    "stop_strings": (),
    "watermarking_config": (),
    "assistant_early_exit": (),
}
NONE = -np.inf
# Tokens that end a sequence are an array of a multiple of so many elements.
NUM_ENDS = 8


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: logits are divided by it; 0 takes the likeliest token (greedy).
        top_k: the number of the likeliest tokens that may be drawn; 0 is all.
        top_p: the likeliest tokens that have this probability together may be drawn.
        min_p: tokens that have at least this share of the probability of the likeliest
            one may be drawn; 0 is all.
        repetition_penalty: logits of tokens of the prompt or the text so far are
            divided by it if positive, else multiplied; 1 changes nothing.
        eos_token_ids: tokens that end a sequence.
        min_new_tokens: before so many new tokens no sequence ends.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    eos_token_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        checks = {
            "temperature": (self.temperature >= 0, "at least 0 (greedy)"),
            "top_k": (self.top_k >= 0, "at least 0 (all tokens)"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1"),
            "repetition_penalty": (self.repetition_penalty > 0, "above 0"),
            "min_new_tokens": (self.min_new_tokens >= 0, "at least 0"),
        }
        for name, (is_valid, wanted) in checks.items():
            if not is_valid:
                found = getattr(self, name)
                raise ValueError(f"{name} must be {wanted}; found {found}.")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalizes(self) -> bool:
        """Whether the choice of a token depends on the tokens before it."""
        return self.repetition_penalty != 1

    @property
    def steps(self) -> tuple:
        """A key of the executable: which steps sampling has, without numbers."""
        filters = self.top_k > 0, self.top_p < 1, self.min_p > 0
        drawn = (False,) * 3 if self.is_greedy else filters
        can_end = self.eos_token_ids if self.min_new_tokens else ()
        return self.is_greedy, *drawn, self.penalizes, can_end, len(self.ends())

    def constants(self) -> dict[str, np.generic]:
        """The numbers of the sampling steps, which are the same for all tokens."""
        return {
            "temperature": np.float32(self.temperature),
            "top_k": np.int32(self.top_k),
            "top_p": np.float32(self.top_p),
            "min_p": np.float32(self.min_p),
            "repetition_penalty": np.float32(self.repetition_penalty),
            "min_new_tokens": np.int32(self.min_new_tokens),
        }

    def ends(self) -> np.ndarray:
        """`eos_token_ids` as int32, filled with -1 to a multiple of `NUM_ENDS`."""
        count = -(-max(1, len(self.eos_token_ids)) // NUM_ENDS) * NUM_ENDS
        found = np.full(count, -1, np.int32)
        found[: len(self.eos_token_ids)] = self.eos_token_ids
        return found

    def choose(
        self,
        logits: jax.Array,
        numbers: Mapping[str, jax.Array],
        num_tokens: jax.Array,
        words: jax.Array,
        kind: Any,
        seen: jax.Array | None,
    ) -> jax.Array:
        """The next token of each sequence, int32 (B,).

        Args:
            logits: float32 (B, V).
            numbers: see `constants`.
            num_tokens: the new tokens that each sequence has, int32 (B,).
            words: the keys of the sequences as 32-bit words, (B, W).
            kind: a key of the kind of these keys.
            seen: whether a sequence has a token already, bool (B, V), if `penalizes`.
        """
        if seen is not None:
            penalty = numbers["repetition_penalty"]
            penalized = jnp.where(logits > 0, logits / penalty, logits * penalty)
            logits = jnp.where(seen, penalized, logits)
        if self.min_new_tokens and self.eos_token_ids:
            ends = np.zeros(logits.shape[1], np.bool_)
            ends[list(self.eos_token_ids)] = True
            is_early = num_tokens < numbers["min_new_tokens"]
            is_refused = jnp.logical_and(ends[None], is_early[:, None])
            logits = jnp.where(is_refused, NONE, logits)
        if self.is_greedy:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        logits = self._filtered(logits / numbers["temperature"], numbers)

        def noise(words: jax.Array, number: jax.Array) -> jax.Array:
            key = jax.random.fold_in(from_words(words, kind), number)
            return jax.random.gumbel(key, logits.shape[1:], jnp.float32)

        noisy = logits + jax.vmap(noise)(words, num_tokens)
        return jnp.argmax(noisy, axis=-1).astype(jnp.int32)

    def _filtered(
        self, logits: jax.Array, numbers: Mapping[str, jax.Array]
    ) -> jax.Array:
        """Logits in which tokens that may not be drawn are -inf."""
        if self.top_k:
            ordered = jnp.sort(logits, axis=-1)[:, ::-1]
            last = jnp.minimum(numbers["top_k"], logits.shape[1]) - 1
            least = jax.lax.dynamic_slice_in_dim(ordered, last, 1, axis=1)
            logits = jnp.where(logits < least, NONE, logits)
        if self.top_p < 1:
            ordered = jnp.sort(logits, axis=-1)[:, ::-1]
            shares = jax.nn.softmax(ordered, axis=-1)
            before = jnp.cumsum(shares, axis=-1) - shares
            # The likeliest token stays in any case: nothing is before it.
            kept = jnp.where(before < numbers["top_p"], ordered, jnp.inf)
            logits = jnp.where(logits < kept.min(-1, keepdims=True), NONE, logits)
        if self.min_p:
            shares = jax.nn.softmax(logits, axis=-1)
            least = numbers["min_p"] * shares.max(-1, keepdims=True)
            logits = jnp.where(shares < least, NONE, logits)
        return logits


def read_settings(settings: Mapping[str, Any]) -> Sampling:
    """How a `GenerationConfig` of `transformers` samples.

    Args:
        settings: its keys and values. `do_sample` defaults to False, as there.

    Raises:
        NotImplementedError: a setting would change the text, and is not supported.
    """
    own = {field.name for field in fields(Sampling)}
    for name, neutral in NEUTRAL.items():
        found = settings.get(name)
        if found is not None and found not in neutral and found != []:
            raise NotImplementedError(
                f"The generation setting {name} = {found!r} is not supported. Remove "
                f"it; supported are do_sample, eos_token_id, {', '.join(sorted(own))}."
            )
    given = {n: settings[n] for n in own if settings.get(n) is not None}
    if not settings.get("do_sample", False):
        given = {n: x for n, x in given.items() if n not in ("top_k", "top_p", "min_p")}
        given["temperature"] = 0.0
    given.setdefault("eos_token_ids", token_ids(settings.get("eos_token_id")))
    return Sampling(**given)


def token_ids(found: int | Sequence[int] | None) -> tuple[int, ...]:
    """One token, several or none, as a tuple."""
    if found is None:
        return ()
    return (found,) if isinstance(found, int) else tuple(found)
