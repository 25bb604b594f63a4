"""Reward models as rewards of completions, frozen beside the model in training.

A reward model is a classifier of texts with one label, as `zinf finetune --objective
reward` writes it. As in TRL it reads the text of a prompt with its completion: laid out
by its own chat template if the prompt is a conversation, and tokenized by its own
tokenizer, which adds no token of its own. One that reads images gets those of the
prompt too, and reads conversations with images as its processor does, and training.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from zinf.core.config import Config
from zinf.core.interchange.names import listed
from zinf.core.rollouts.asking import Failures, Samples
from zinf.core.rollouts.calls import AbstractRewardModel, Reward
from zinf.core.rollouts.functions import code_digest, load_functions, place_of_model
from zinf.core.rollouts.sizes import Prompt
from zinf.distributed import AbstractGroup
from zinf.hf.answers import laid_out
from zinf.hf.engine import ModelEngine
from zinf.hf.frozen import ALONE, Frozen, place
from zinf.hf.heads import HeadModel, load_head
from zinf.hf.images.kinds import reads_images
from zinf.hf.images.model import PIXELS, ImageModel, load_head_with_images
from zinf.hf.images.reader import ImageReader
from zinf.hf.images.rows import ImagesBeside
from zinf.hf.model import in_stored_precision
from zinf.hf.prefill import Prefill, Row
from zinf.hf.reader import Limit
from zinf.hf.records import has_images, parts_of, with_content
from zinf.hf.scoring import as_row

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
        most: the prompt with the most images, if prompts have any.
        frozen: its engine, and what that holds; None before it is opened.
        prefill: what runs it, for texts of at most `longest` tokens.
    """

    model: HeadModel
    max_length: int | None
    most: Row | None = None
    frozen: Frozen | None = None
    prefill: Prefill | None = None
    longest: int = 0

    @property
    def name(self) -> str:
        """The last part of the model's name, as TRL has it in its metrics."""
        return Path(self.model.name).name

    @cached_property
    def _reader(self) -> ImageReader:
        assert isinstance(self.model, ImageModel), "it reads images"
        return ImageReader(self.model)

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Refuse what the model does not read: images, or all conversations.

        Raises:
            ValueError: it reads no images, or no template says how conversations are
                laid out; the message names the first of them. Or its processor of
                images is not there.
        """
        for prompt in prompts:
            if not has_images({"messages": prompt.shown}):
                continue
            if not isinstance(self.model, ImageModel):
                raise ValueError(
                    f"{prompt.where}: the prompt has images, and the reward model "
                    f"{self.model.name} reads text alone. Give a function as reward, "
                    "or a reward model that reads images."
                )
            _ = self._reader
            break
        if self.model.tokenizer.chat_template is not None:
            return
        for prompt in prompts:
            if not isinstance(prompt.shown, str):
                raise ValueError(
                    f"{prompt.where}: the prompt is a conversation, and the reward "
                    f"model {self.model.name} has no chat template that says how it "
                    "reads one. Put chat_template.jinja beside its tokenizer, or give "
                    "prompts as texts."
                )

    def seeing(self, prompts: Sequence[Prompt]) -> "Judge":
        """This model, which is opened with room for the images of all prompts.

        Raises:
            ValueError: its processor or its template refuses some; the message names
                the prompt.
        """
        most: Row | None = None
        for prompt in prompts:
            if prompt.beside:
                try:
                    row = self._row_of(prompt.shown, [], prompt.beside)
                except (_Unread, ValueError) as error:
                    raise ValueError(
                        f"{prompt.where}: the reward model {self.model.name} cannot "
                        f"read the prompt: {error}"
                    ) from error
                if most is None or _num_pieces(row) > _num_pieces(most):
                    most = row
        return replace(self, most=most)

    def image_specs(self, rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of the images of a batch of rows, if prompts have any."""
        if self.most is None or self.most.beside is None:
            return {}
        assert isinstance(self.model, ImageModel), "it read them"
        (room,) = self.most.beside.shape
        return self.model.kind.specs(rows, room, length)

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
            prefill.run([self._longest_row(longest)] * min(rows, ROWS_AT_ONCE))
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
        images = samples.beside or [()] * len(samples)
        texts = zip(samples.prompts, samples.completions, images, strict=True)
        for number, given in enumerate(texts):
            try:
                rows[number] = self._checked(self._row_of(*given))
            except _Unread as error:
                failures[number] = str(error)
        logits = self.prefill.run([*rows.values()])
        for number, found in zip(rows, logits, strict=True):
            values[number] = found[0]
            if not np.isfinite(values[number]):
                failures[number] = "its score is not finite"
        return values, failures

    def _row_of(self, prompt: Any, completion: Any, images: Sequence[bytes]) -> Row:
        """The row of a prompt with its images and its completion.

        Raises:
            _Unread: the chat template refuses them.
            ValueError: the processor refuses the images.
        """
        tokenizer, where = self.model.tokenizer, "a prompt"
        if isinstance(prompt, str):
            text = prompt + completion
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            return as_row(self.model, {"input_ids": ids})
        messages, seen = [*with_content(prompt, "the prompt"), *completion], None
        if isinstance(self.model, ImageModel) and any(map(parts_of, prompt)):
            line = {"messages": messages, "images": [*images]}
            line, _, seen = self._reader.read(line, where, None)
            messages, tokenizer = line["messages"], self._reader.layout(seen)
        try:
            ids = laid_out(tokenizer, messages)
        except Exception as error:
            # A template is a program, and raises what it likes.
            reason = f"its chat template refuses the conversation: {error}"
            raise _Unread(reason) from error
        row = as_row(self.model, {"input_ids": ids})
        if not images or seen is None:
            return row
        leaves = self._reader.row(seen, np.array(ids, np.int32), where)
        beside = ImagesBeside(self._reader, tuple(images), len(leaves[PIXELS]), where)
        return replace(row, beside=beside)

    def _checked(self, row: Row) -> Row:
        """The row.

        Raises:
            _Unread: it has no token, or too many.
            ValueError: see `scores`.
        """
        ids = row.tokens["input_ids"]
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
        return row

    def _longest_row(self, longest: int) -> Row:
        """A row of so many tokens, with the images of the prompt with the most."""
        most = self.most
        ids = [] if most is None else [*most.tokens["input_ids"]]
        if len(ids) > longest:
            raise ValueError(
                f"A prompt has {len(ids):,} tokens with its images, and the reward "
                f"model {self.model.name} reads at most {longest:,}. Leave it out, or "
                "make images smaller (the settings of the processor)."
            )
        row = as_row(self.model, {"input_ids": [*ids, *[0] * (longest - len(ids))]})
        return row if most is None else replace(row, beside=most.beside)


def _num_pieces(row: Row) -> int:
    assert isinstance(row.beside, ImagesBeside), "it is of a prompt with images"
    return row.beside.num_pieces


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
    if reads_images(model.config):
        model = load_head_with_images(name)
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


def judges_among(
    rewards: Sequence[Reward], prompts: Sequence[Prompt]
) -> tuple[Judge, ...]:
    """The reward models among rewards of completions of these prompts."""
    return tuple(x.seeing(prompts) for x in rewards if isinstance(x, Judge))
