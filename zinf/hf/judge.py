"""Reward models as rewards of completions, frozen beside the model in training.

A reward model is a classifier of texts with one label, as `zinf finetune --objective
reward` writes it. As in TRL it reads the text of a prompt with its completion: laid out
by its own chat template if the prompt is a conversation, and tokenized by its own
tokenizer, which adds no token of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from zinf.core.config import Config
from zinf.core.interchange.names import listed
from zinf.core.rollouts.asking import Failures, Samples
from zinf.core.rollouts.calls import AbstractRewardModel, Reward
from zinf.core.rollouts.functions import code_digest, load_functions, place_of_model
from zinf.distributed import AbstractGroup
from zinf.hf.engine import ModelEngine
from zinf.hf.frozen import ALONE, Frozen, place
from zinf.hf.heads import HeadModel, load_head
from zinf.hf.model import in_stored_precision
from zinf.hf.prefill import Prefill, Row
from zinf.hf.reader import Limit
from zinf.hf.records import has_images, with_content
from zinf.hf.scoring import as_row
from zinf.hf.template import apply_template

# Rows that pass a layer before the next one is fetched, at most.
ROWS_AT_ONCE = 64
# Room for a text of a row, in tokens of the model in training: another tokenizer may
# need more of them.
ROOM = 2


@dataclass(frozen=True)
class Judge(AbstractRewardModel):
    """A reward model; `open` reads its weights.

    Attributes:
        max_length: most tokens of a text that it was made for; None: any number.
        frozen: its engine, and what that holds; None before it is opened.
        prefill: what runs it, for texts of at most `longest` tokens.
    """

    model: HeadModel
    max_length: int | None
    frozen: Frozen | None = None
    prefill: Prefill | None = None
    longest: int = 0

    @property
    def name(self) -> str:
        """The last part of the model's name, as TRL has it in its metrics."""
        return Path(self.model.name).name

    def check(self, prompts: Sequence[Any], where: Sequence[str]) -> None:
        """Refuse images, and conversations if no template says how they are laid out.

        Raises:
            ValueError: see above; it names the first of them.
        """
        for prompt, place_of_it in zip(prompts, where, strict=True):
            if has_images({"messages": prompt}):
                raise ValueError(
                    f"{place_of_it}: the prompt has images, and the reward model "
                    f"{self.model.name} reads text alone. Give a function as reward."
                )
        if self.model.tokenizer.chat_template is not None:
            return
        for prompt, place_of_it in zip(prompts, where, strict=True):
            if not isinstance(prompt, str):
                raise ValueError(
                    f"{place_of_it}: the prompt is a conversation, and the reward "
                    f"model {self.model.name} has no chat template that says how it "
                    "reads one. Put chat_template.jinja beside its tokenizer, or give "
                    "prompts as texts."
                )

    def open(
        self,
        config: Config,
        mesh: Mesh,
        *,
        rows: int,
        length: int,
        number: int,
        group: AbstractGroup = ALONE,
    ) -> "Judge":
        """This model with its weights, within its share of what a config has left.

        Args:
            rows: completions of a step.
            length: tokens of a prompt with its completion, of the model in training.
            number, group: see `zinf.hf.frozen.place`.

        Raises:
            InfeasibleError: it does not fit its share.
        """
        longest, prefills = self.longest_of(length), list[Prefill]()

        def run(own: Config) -> ModelEngine:
            prefill = self.prefill_of(own, rows=rows, length=length, group=group)
            prefills.append(prefill)
            prefill.run([self._row([0] * longest)] * min(rows, ROWS_AT_ONCE))
            return prefill.engine(longest)

        num_bytes = min(rows, ROWS_AT_ONCE) * np.float32().itemsize
        named = {"number": number, "output_bytes": num_bytes}
        title = f"the reward model {self.name}"
        frozen = place(title, config, mesh, run, **named, group=group)
        return replace(self, frozen=frozen, prefill=prefills[0], longest=longest)

    def longest_of(self, length: int) -> int:
        """The most tokens of a text; for `length` see `open`."""
        return min(x for x in (ROOM * length, self.max_length) if x is not None)

    def prefill_of(
        self,
        config: Config,
        *,
        rows: int,
        length: int,
        group: AbstractGroup = ALONE,
    ) -> Prefill:
        """What runs the model within a config; see `open`. No weight is read now."""
        return Prefill(
            self.model,
            self.model.logits,
            config.model_copy(update={"weight_quantization": None}),
            padding={"input_ids": self.model.padding},
            longest=self.longest_of(length),
            batch_size=min(rows, ROWS_AT_ONCE),
            group=group,
        )

    def close(self) -> None:
        if self.frozen is not None:
            self.frozen.close()

    def scores(self, samples: Samples) -> tuple[np.ndarray, Failures]:
        """The score of each completion with its prompt, float64 (completions,).

        Raises:
            ValueError: the tokenizer has words that the model has not.
        """
        assert self.prefill is not None, "it is not opened"
        values, failures = np.full(len(samples), np.nan), Failures()
        rows: dict[int, Row] = {}
        pairs = zip(samples.prompts, samples.completions, strict=True)
        for number, (prompt, completion) in enumerate(pairs):
            try:
                rows[number] = self._row(self._tokens(prompt, completion))
            except _Unread as error:
                failures[number] = str(error)
        logits = self.prefill.run([*rows.values()])
        for number, found in zip(rows, logits, strict=True):
            values[number] = found[0]
            if not np.isfinite(values[number]):
                failures[number] = "its score is not finite"
        return values, failures

    def _tokens(self, prompt: Any, completion: Any) -> list[int]:
        """The tokens of a prompt with its completion.

        Raises:
            _Unread: the model cannot read them.
            ValueError: see `scores`.
        """
        tokenizer = self.model.tokenizer
        if isinstance(prompt, str):
            text = prompt + completion
        else:
            messages = [*with_content(prompt, "the prompt"), *completion]
            try:
                text = apply_template(tokenizer, messages, tokenize=False)
            except Exception as error:
                # A template is a program, and raises what it likes.
                reason = f"its chat template refuses the conversation: {error}"
                raise _Unread(reason) from error
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if not ids or len(ids) > self.longest:
            raise _Unread(
                f"its tokenizer makes {len(ids):,} tokens of the text, and it reads 1 "
                f"to {self.longest:,}"
            )
        if max(ids) >= self.model.vocab_size:
            raise ValueError(
                f"The tokenizer beside the reward model {self.model.name} gives token "
                f"{max(ids)}, and the model has {self.model.vocab_size} words. Put the "
                "tokenizer of this model there."
            )
        return ids

    def _row(self, ids: list[int]) -> Row:
        return as_row(self.model, {"input_ids": ids})


class _Unread(Exception):
    """Why a reward model cannot read a text."""


def load_judge(name: str | Path) -> Judge:
    """A reward model, without its weights.

    Args:
        name: a folder, or a name on the hub.

    Raises:
        ValueError: it is no classifier, or has several labels.
        FileNotFoundError, OSError, NotImplementedError: see `load_head`.
    """
    model = load_head(name)
    what = "A reward model is a classifier of texts with one label, as `zinf finetune "
    what += "--objective reward` writes it."
    if not model.is_trained_so:
        kinds = listed(list(model.config.architectures or ["model without a name"]))
        raise ValueError(f"The reward {str(name)!r} is a {kinds} (config.json). {what}")
    if model.config.num_labels != 1:
        raise ValueError(
            f"The reward {str(name)!r} has {model.config.num_labels} labels "
            f"({listed(list(model.labels))}). {what}"
        )
    model = in_stored_precision(model)
    return Judge(model, Limit.of(model, None, "drop").max_length)


def load_rewards(names: Sequence[str], folders: Sequence[Path]) -> tuple[Reward, ...]:
    """Reward functions and reward models by their names; see `load_functions`.

    Raises:
        ValueError, FileNotFoundError, OSError, NotImplementedError: see
            `load_functions` and `load_judge`.
    """
    places = {name: place_of_model(name, folders) for name in names}
    functions = iter(load_functions([n for n in names if places[n] is None], folders))
    return tuple(
        next(functions) if (found := places[name]) is None else load_judge(found)
        for name in names
    )


def digest_of_rewards(names: Sequence[str], folders: Sequence[Path]) -> str:
    """A digest of the code of functions and of the weights of models, in order."""
    digest = sha256()
    for name in names:
        found = place_of_model(name, folders)
        if found is None:
            own = code_digest([name], folders)
        else:
            own = load_judge(found).model.digest
        digest.update(f"{own}\n".encode())
    return digest.hexdigest()[:16]


def judges_among(rewards: Sequence[Reward]) -> tuple[Judge, ...]:
    return tuple(each for each in rewards if isinstance(each, Judge))
