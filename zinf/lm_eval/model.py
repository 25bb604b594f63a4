"""The model `zinf` of `lm-eval`: weights stream from where they rest.

Requests are tokenized, cut and scored as by the model `hf` there, so results are equal
up to rounding.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from zinf import hf
from zinf.core.config import Config
from zinf.hf.likelihood import Request, TokenScores, scored
from zinf.hf.prefill import Prefill
from zinf.hf.template import apply_template
from zinf.inference import ROWS

# With batch_size=auto: microbatches of `ROWS` texts that are written together.
AUTO, MICROBATCHES = "auto", 8
MAX_LENGTH = 2048  # For a model that does not say the longest sequence.
Scored = tuple[float, bool]


@register_model("zinf")
class StreamedLM(TemplateLM):
    """A causal language model of `transformers` whose weights need not fit in memory.

    Args:
        pretrained: a folder with a model or an adapter, or a name on the hub.
        base: of an adapter, in place of the one that it names.
        nvme: a folder on a drive, for weights that memory has no room for.
        batch_size: sequences for which each weight is fetched once; "auto" (also
            "auto:N") is 64 for texts, and for scores as many as saturate.
        max_length: most tokens of a sequence; that of the model if None.
        max_gen_toks: most new tokens of a text, if the task does not say.
        add_bos_token: whether texts begin with the token that begins texts; None leaves
            it to the tokenizer.
        settings: keys of a config of zinf and their values, such as
            `memory.host="8GiB"`. `device`, `max_batch_size` and `dtype` of lm-eval have
            no effect: zinf runs where jax does, in the precision of the files.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        base: str | None = None,
        nvme: str | None = None,
        batch_size: int | str = AUTO,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        device: str | None = None,
        max_batch_size: int | None = None,
        dtype: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self._model = hf.load_as_stored(pretrained, base=base)
        raw = {} if nvme is None else {"memory": {"nvme": str(Path(nvme))}}
        overrides = [f"{key}={value}" for key, value in settings.items()]
        self.batch_size = _batch_size(batch_size)
        self.max_length = int(max_length or self._model.max_length or MAX_LENGTH)
        self._max_gen_toks, self._add_bos_token = max_gen_toks, add_bos_token
        self.tokenizer = self._model.tokenizer
        self._prefill = Prefill(
            self._model,
            TokenScores(self._model),
            Config.load(raw, overrides),
            longest=self.max_length,
            batch_size=None if _is_auto(batch_size) else self.batch_size,
        )

    def close(self) -> None:
        """Free the weights; the next request reads them again."""
        self._prefill.close()

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else first

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return apply_template(
            self.tokenizer,
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        adds = self._add_bos_token if add_special_tokens is None else add_special_tokens
        first = self.tokenizer.decode(self.prefix_token_id)
        if add_special_tokens is None and has_bos_prefix(string, first):
            adds = False
        given = {} if adds is None else {"add_special_tokens": adds}
        return self.tokenizer.encode(string, **given)

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-probability of each text, cut into windows of `max_length`."""
        windows, owners = [], []
        for number, request in enumerate(requests):
            found = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, rest in map(make_disjoint_window, found):
                windows.append((None, context, rest))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (total, _) in zip(owners, self._score(windows), strict=True):
            totals[owner] += total
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[Scored]:
        found = self._score(requests)
        for (texts, *_rest), score in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, score)
        return found

    def _score(
        self, requests: Sequence[tuple[Any, list[int], list[int]]]
    ) -> list[Scored]:
        """Of each continuation: its log-probability, and whether it is the likeliest.

        Args:
            requests: of each the last two parts are tokens: a context, a continuation.

        Raises:
            ValueError: one of the two is empty, or the continuation does not fit.
        """
        for texts, context, rest in requests:
            self._check(texts, context, rest)
        # As `hf` of lm-eval does: what is too long is cut on the left.
        asked = [
            Request(tuple((c + r)[-(self.max_length + 1) :]), len(r))
            for _, c, r in requests
        ]
        found = scored(self._prefill, asked)
        return [(x.log_likelihood, x.is_likeliest) for x in found]

    def _check(self, texts: Any, context: list[int], rest: list[int]) -> None:
        """Refuse what `hf` of lm-eval asserts, where no score would be right."""
        if context and 0 < len(rest) <= self.max_length:
            return
        found = f"{len(context):,} tokens of context and {len(rest):,} to score"
        shown = "" if texts is None else f" ({texts!r:.80})"
        raise ValueError(
            f"A request has {found}{shown}; both must have some, and at most "
            f"max_length = {self.max_length:,} are scored at once. Raise max_length, "
            "or leave the sample out."
        )

    def generate_until(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[str]:
        """The text after each context, up to the first of the sequences that end it."""
        found = [""] * len(requests)

        def settings(number: int) -> str:
            return repr(requests[number].args[1])

        order = sorted(range(len(requests)), key=settings)
        for _, numbers in groupby(order, key=settings):
            for some in _batches(list(numbers), self.batch_size):
                texts = self._texts([requests[i].args for i in some])
                for i, text in zip(some, texts, strict=True):
                    found[i] = text
                    args = requests[i].args
                    self.cache_hook.add_partial("generate_until", args, text)
        return found

    def _texts(self, asked: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
        given: dict[str, Any] = dict(
            normalize_gen_kwargs(asked[0][1], self._max_gen_toks)
        )
        end = self.tokenizer.decode([self.eot_token_id], skip_special_tokens=False)
        until = handle_stop_sequences(given.pop("until", None), eos=end)
        max_new_tokens = given.pop("max_gen_toks")
        room = self.max_length - max_new_tokens
        if room < 1:
            raise ValueError(
                f"The task asks for {max_new_tokens:,} new tokens, and the model has "
                f"room for {self.max_length:,} with the prompt. Lower max_gen_toks."
            )
        prompts = [np.array(self.tok_encode(c)[-room:], np.int32) for c, _ in asked]
        made: list[list[int]] = [[] for _ in asked]

        def is_over(number: int, token: int) -> bool:
            made[number].append(token)
            text = self._text(made[number])
            return any(stop in text for stop in until if stop)

        engine = self._prefill.engine(max(map(len, prompts)))
        sampling = hf.settings_of(self._model, given)
        tokens = engine.generate(
            prompts,
            max_new_tokens=max_new_tokens,
            key=jax.random.key(0),
            rows=min(self.batch_size, ROWS),
            on_token=is_over,
            **vars(sampling),
        )
        return [
            postprocess_generated_text(self._text(one), until, None) for one in tokens
        ]

    def _text(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


def _batches(numbers: Sequence[int], size: int) -> Iterator[list[int]]:
    rest = iter(numbers)
    while some := list(islice(rest, size)):
        yield some


def _batch_size(given: int | str) -> int:
    """The number of sequences of a batch.

    Raises:
        ValueError: it is no positive number and not "auto".
    """
    # lm-eval looks for the largest batch anew N times with "auto:N"; here it is fixed.
    if _is_auto(given):
        return ROWS * MICROBATCHES
    try:
        count = int(given)
    except ValueError:
        count = 0
    if count < 1:
        raise ValueError(
            f"batch_size is {given!r}; it must be a positive number, auto or auto:N."
        )
    return count


def _is_auto(given: int | str) -> bool:
    return isinstance(given, str) and given.partition(":")[0] == AUTO
