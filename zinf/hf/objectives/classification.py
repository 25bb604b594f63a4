"""Classification of texts: lines have a `text` and its `label`, a name or a number."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import grain
import numpy as np

from zinf.core.config import Config
from zinf.core.interchange.names import listed
from zinf.hf.batch import IGNORED
from zinf.hf.dataset import Samples
from zinf.hf.heads import HeadModel, load_head
from zinf.hf.model import Model
from zinf.hf.objectives.objective import Objective, Say, Spec, tokens_spec
from zinf.hf.records import records
from zinf.hf.samples import DROPPED, Reading, Tokenizing


@dataclass(frozen=True)
class ClassTokenizing(Tokenizing):
    """How lines with `text` and `label` become samples.

    Attributes:
        classes: names of the classes, in the order of the model's outputs.
    """

    classes: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: Model, **settings: Any) -> Self:
        assert isinstance(model, HeadModel)
        return super().of(model, classes=model.labels, **settings)

    def read(self, line: Any, where: str, folder: Path | None = None) -> Reading:
        """The tokens of the text; the last one has the class as its label.

        Raises:
            ValueError: the line has no such fields, the label is no class of the model,
                or the text is too long (with too_long error); the message names the
                line.
        """
        del folder
        self.check_kind(line, where)
        text, label = _fields(line, where)
        ids = self.tokenizer(text).input_ids
        is_long = len(ids) > self.sequence_length
        if is_long:
            if not self.is_cut(len(ids), where):
                return DROPPED
            # Tokens that end every text of this tokenizer stay at the end.
            ids = self.tokenizer(
                text, truncation=True, max_length=self.sequence_length
            ).input_ids
        if not ids:
            raise ValueError(
                f"{where}: the tokenizer makes no token of the text {text!r:.40}. "
                "Leave the line out."
            )
        self.check_words(ids, where)
        number = self.classes.index(label) if label in self.classes else label
        is_number = isinstance(number, int) and not isinstance(number, bool)
        if not is_number or not 0 <= number < len(self.classes):
            raise ValueError(
                f"{where}: label {label!r} is no class of the model; those are "
                f"{listed(self.classes)}. Change the line, or name all classes in "
                "data.labels."
            )
        labels = [*[IGNORED] * (len(ids) - 1), number]
        return Reading(((ids, labels),), is_long)


class Classified(grain.sources.RandomAccessDataSource):
    """Texts with their classes.

    Args:
        samples: of `ClassTokenizing`.
    """

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """`input_ids` and `attention_mask`, int32 (length,); `labels`, int32 ()."""
        ids, labels = self._samples.tokens(index)
        row = self._samples.empty()["input_ids"]
        row[: len(ids)] = ids
        mask = np.arange(len(row), dtype=np.int32) < len(ids)
        return {
            "input_ids": row,
            "attention_mask": mask.astype(np.int32),
            "labels": labels[-1],
        }


def class_names(paths: Sequence[Path], known: Sequence[str]) -> tuple[str, ...]:
    """Names of the classes that the lines of files have.

    Args:
        known: names of the classes of a model that was trained as a classifier; empty
            for another.

    Returns:
        `known`, if the files have no other; else the labels in order, or LABEL_0 to
        LABEL_N for numbers, as `transformers` names them.

    Raises:
        FileNotFoundError, ValueError: a file or a line is wrong.
    """
    files = ", ".join(map(str, paths))
    found = {_fields(*line)[1] for path in paths for line in records(path)}
    numbers = {label for label in found if isinstance(label, int)}
    names = {label for label in found if isinstance(label, str)}
    if numbers and names:
        raise ValueError(
            f"{files}: some labels are numbers "
            f"({min(numbers)}), and some are names ({listed(sorted(names))}). Use one "
            "of both."
        )
    classes = tuple(sorted(names))
    if numbers:
        classes = tuple(f"LABEL_{i}" for i in range(max(numbers) + 1))
    if names <= {*known} and len(classes) <= len(known):
        return tuple(known)
    if len(classes) == 1:
        raise ValueError(
            f"{files}: every label is {min(found)!r}, and a classifier has two classes "
            "or more. Add lines of another one, or name all classes in data.labels."
        )
    return classes


def _fields(line: Any, where: str) -> tuple[str, str | int]:
    """The text and the label of a line."""
    fields = line if isinstance(line, Mapping) else {}
    text, label = fields.get("text"), fields.get("label")
    has_label = isinstance(label, str | int) and not isinstance(label, bool)
    if not isinstance(text, str) or not text or not has_label or label == "":
        shown = f"{line!r:.60}" if {*fields} >= {"text", "label"} else ", ".join(fields)
        raise ValueError(
            f"{where}: with data.objective classification a line must have a text that "
            f"is not empty, and a label, a name or a number; found {shown or line}."
        )
    assert isinstance(label, str | int)
    return text, label


@cache
def _loaded(name: str, labels: tuple[str, ...] | None, seed: int) -> HeadModel:
    return load_head(name, labels=labels, seed=seed)


def _model(config: Config) -> HeadModel:
    assert config.model is not None and config.model.huggingface is not None
    return _loaded(config.model.huggingface, config.data.labels, config.run.seed)


def _spec(config: Config, rows: int, length: int) -> Spec:
    names = ("input_ids", "attention_mask")
    texts = dict.fromkeys(names, tokens_spec(rows, length))
    return texts | {"labels": tokens_spec(rows)}


def _settings(config: Config, say: Say) -> dict[str, Any]:
    """Names of the classes that the files have, unless the config names them.

    Those of the model, if it was trained as a classifier of no fewer.

    Raises:
        FileNotFoundError, ValueError: see `class_names`.
    """
    del say
    data, model = config.data, _model(config)
    if data.labels is not None:
        return {}
    paths = [] if isinstance(data.paths, str) else [*data.paths]
    names = class_names(
        [*paths, *(data.evaluation_paths or ())],
        model.labels if model.is_trained_so else (),
    )
    return {"labels": list(names)}


OBJECTIVE = Objective(
    loss=lambda model, config: model.loss,
    batch_spec=_spec,
    rows=lambda samples, model, config: Classified(samples),
    model=_model,
    tokenizing=ClassTokenizing,
    settings_of_data=_settings,
)
