"""A language model and the critic of what it writes, as one model that is trained.

Both are in one engine: one plan, one optimizer and one checkpoint, as TRL's
`PolicyAndValueWrapper` has them in one module. The parameters of the policy have their
own names, and those of the critic the same behind `CRITIC`; a program that needs one of
the two alone streams the weights of that one.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property
from typing import Any

import jax
import numpy as np

from zinf.core.interchange.names import Terms
from zinf.core.program import ArraySpec
from zinf.core.sharding import Box
from zinf.hf.critic import Critic
from zinf.hf.model import Batch, Model, Params
from zinf.hf.quantized.codes import Codes
from zinf.hf.weights import AbstractWeights

CRITIC = "critic."
OPTION = "--critic, ppo.critic"


class ActorCritic(Model):
    """A policy with its critic.

    As a model it is the policy: it has its tokenizer and its logits. It is trained with
    the parameters of both.

    Raises:
        ValueError: the critic reads other tokens than the policy.
    """

    def __init__(self, policy: Model, critic: Critic) -> None:
        super().__init__(policy.name, policy.folder, policy.config, policy.dtype)
        self._modules, self._stored_buffers = policy._modules, policy._stored_buffers
        self.policy, self.critic = policy, critic
        check_tokens(policy, critic.model)

    @property
    def parts(self) -> Mapping[str, Model]:
        """The two models, by what their parameters' names begin with."""
        return {"": self.policy, CRITIC: self.critic.model}

    @cached_property
    def specs(self) -> dict[str, ArraySpec]:
        return {
            prefix + name: spec
            for prefix, model in self.parts.items()
            for name, spec in model.specs.items()
        }

    @cached_property
    def untrained(self) -> tuple[str, ...]:
        parts = self.parts.items()
        return tuple(prefix + n for prefix, model in parts for n in model.untrained)

    @cached_property
    def new_modules(self) -> tuple[str, ...]:
        parts = self.parts.items()
        return tuple(prefix + n for prefix, model in parts for n in model.new_modules)

    @cached_property
    def is_random(self) -> bool:
        """Never: ratios of probabilities would be of other dropped units, not of steps.

        TRL turns dropout off here too.
        """
        return False

    @property
    def max_length(self) -> int | None:
        found = [model.max_length for model in self.parts.values()]
        return min((x for x in found if x is not None), default=None)

    @property
    def digest(self) -> str:
        return f"{self.policy.digest}, critic {self.critic.model.digest}"

    @property
    def terms(self) -> Terms:
        policy, critic = (model.terms for model in self.parts.values())
        ignored = (*policy.ignore, *(CRITIC + name for name in critic.ignore))
        return Terms(ignore=ignored, may_round=True, remedy=policy.remedy)

    def values(
        self, params: Params, batch: Batch, *key: jax.Array, train: bool = False
    ) -> jax.Array:
        """The critic's value before each token, float32 (rows, tokens - 1)."""
        own = {
            name.removeprefix(CRITIC): value
            for name, value in params.items()
            if name.startswith(CRITIC)
        }
        return self.critic.values(own, batch, *key, train=train)

    def check_files(self) -> None:
        for model in self.parts.values():
            model.check_files()

    def read_buffers(self) -> None:
        for model in self.parts.values():
            model.read_buffers()

    def open_weights(self) -> tuple[AbstractContextManager, AbstractWeights]:
        with ExitStack() as opened:
            found: dict[str, AbstractWeights] = {}
            for prefix, model in self.parts.items():
                files, found[prefix] = model.open_weights()
                opened.enter_context(files)
            return opened.pop_all(), JoinedWeights(found)

    def _run(
        self,
        params: Params,
        inputs: Batch,
        options: Mapping[str, Any],
        **rest: Any,
    ) -> jax.Array:
        own = {name: params[name] for name in self.policy.specs}
        return super()._run(own, inputs, options, **rest)


class JoinedWeights(AbstractWeights):
    """The weights of several models, each behind the prefix of its names."""

    def __init__(self, parts: Mapping[str, AbstractWeights]) -> None:
        self._places = {
            prefix + name: (tensors, name)
            for prefix, tensors in parts.items()
            for name in tensors.specs
        }
        places = self._places.items()
        self.specs = {name: tensors.specs[own] for name, (tensors, own) in places}
        self.unused = [p + name for p, x in parts.items() for name in x.unused]
        self.new = [p + name for p, x in parts.items() for name in x.new]
        codes = ((p, x.codes.weights) for p, x in parts.items())
        self.codes = Codes({p + n: w for p, own in codes for n, w in own.items()})

    def block(self, name: str) -> tuple[int, ...]:
        tensors, own = self._places[name]
        return tensors.block(own)

    def read(self, name: str, box: Box) -> np.ndarray:
        tensors, own = self._places[name]
        return tensors.read(own, box)

    def copies_of(self, name: str) -> int:
        tensors, own = self._places[name]
        return tensors.copies_of(own)


def check_tokens(
    policy: Model, other: Model, title: str = "critic", option: str = OPTION
) -> None:
    """Refuse a critic, or a teacher, that reads other tokens than the policy writes.

    Args:
        title: what the other model is.
        option: how it is named, for the message.

    Raises:
        ValueError: a token of the policy is no token, or another one, of the other.
    """
    ours, theirs = policy.tokenizer.get_vocab(), other.tokenizer.get_vocab()
    for text, token in sorted(ours.items(), key=lambda item: item[1]):
        if theirs.get(text) != token or token >= other.vocab_size:
            found = theirs.get(text)
            there = "no token" if found is None else f"token {found}"
            raise ValueError(
                f"The {title} {other.name} reads other tokens than {policy.name}: "
                f"{text!r} is token {token} of {policy.name}, and {there} of the "
                f"{title}, which has {other.vocab_size:,} words. Name a model with the "
                f"same tokenizer as the {title} ({option}), such as {policy.name} "
                "itself."
            )
