"""Reads images, and conversations with images, as the processor beside a model does."""

import json
import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from transformers.models.auto.image_processing_auto import (
    IMAGE_PROCESSOR_MAPPING_NAMES,
)
from transformers.models.auto.processing_auto import (
    PROCESSOR_MAPPING_NAMES,
    processor_class_from_name,
)
from transformers.utils.chat_template_utils import render_jinja_template

from zinf.hf.images.model import ImageModel
from zinf.hf.images.placing import replaced
from zinf.hf.images.sources import content_of, in_parts, opened

FILES = ("processor_config.json", "preprocessor_config.json")


def processor_of(model: ImageModel) -> Any:
    """The processor of `transformers` beside a model, for images and text alone.

    Images are read by PIL, so numbers do not depend on what else is installed.

    Raises:
        ValueError: there is none, it cannot be read, or it is of another architecture.
    """
    folder, kind = model.folder, model.config.model_type
    paths = [folder / file for file in FILES if (folder / file).is_file()]
    if not paths:
        raise ValueError(
            f"{folder} has no processor of images. Put {' and '.join(FILES)} of the "
            "model there."
        )
    name = PROCESSOR_MAPPING_NAMES[kind]
    family = processor_class_from_name(name)
    try:
        names = (json.loads(path.read_bytes()).get("processor_class") for path in paths)
        given = next(filter(None, names), name)
        raw, _ = family.get_processor_dict(folder, local_files_only=True)
        images = transformers.AutoImageProcessor.from_pretrained(
            folder, backend="pil", trust_remote_code=False
        )
        if given == name:
            parts = {"image_processor": images, "tokenizer": model.tokenizer}
            # Videos need torchvision, which nothing else here does.
            own = {"check_argument_for_proper_class": _unchecked}
            made: Any = type(name, (family,), own)
            args = [parts.get(x) for x in family.get_attributes()]
            # SmolVLM's class asks for this library, which is for videos alone.
            with replaced(sys.modules[family.__module__], num2words=True):
                return made.from_args_and_dict(args, raw)
    except Exception as error:  # Of any kind, as the files are anybody's.
        raise ValueError(
            f"{folder} has no processor of images that transformers can read: "
            f"{type(error).__name__}: {error} Put {' and '.join(FILES)} of the model "
            "there."
        ) from error
    raise ValueError(
        f"{folder} has a processor of another model: {given}, and models of the "
        f"architecture {kind!r} have {name}. Put {' and '.join(FILES)} of the model "
        "there."
    )


def _unchecked(self: Any, name: str, argument: Any) -> None:
    """A processor of videos may be None."""


@dataclass(frozen=True)
class Seen:
    """The images of one conversation.

    Attributes:
        leaves: what the image processor gave, by name; empty without images.
        replacements: the text that stands for each image.
    """

    leaves: Mapping[str, Any]
    replacements: Sequence[str]


class ImageReader:
    """What reads the images and the conversations of a model."""

    def __init__(self, model: ImageModel) -> None:
        self.model, self.processor = model, processor_of(model)
        tokenizer = self.processor.tokenizer
        self.chat_template = self.processor.chat_template or tokenizer.chat_template

    def see(self, images: Sequence[bytes], where: str) -> Seen:
        """The images of a conversation, from the bytes of their files.

        Raises:
            ValueError: an image cannot be read.
        """
        if not images:
            return Seen({}, ())
        processor = self.processor
        pictures = [opened(x, f"{where}, image {n}") for n, x in enumerate(images, 1)]
        text = processor.image_token * len(pictures)
        try:
            laid = processor.prepare_inputs_layout(images=pictures, text=[text])[0]
            settings = processor._merge_kwargs(
                tokenizer_init_kwargs=processor.tokenizer.init_kwargs
            )
            leaves, replacements = processor._process_images(
                laid, **settings["images_kwargs"]
            )
        except Exception as error:  # Each processor refuses images in its own way.
            raise ValueError(
                f"{where}: the processor of {self.model.name} refuses the images: "
                f"{type(error).__name__}: {error}.{self._other_class()}"
            ) from error
        return Seen(dict(leaves), tuple(replacements))

    def _other_class(self) -> str:
        """A sentence about an image processor of another architecture, or nothing."""
        kind = self.model.config.model_type
        found = type(self.processor.image_processor).__name__
        expected = IMAGE_PROCESSOR_MAPPING_NAMES[kind].get("pil")
        if expected is None or found == expected:
            return ""
        return (
            f" It is of another model: {found}, and models of the architecture "
            f"{kind!r} have {expected}. Put {FILES[1]} of the model there."
        )

    def read(
        self, line: Any, where: str, folder: Path | None
    ) -> tuple[Any, tuple[bytes, ...], Seen]:
        """A record in parts, the bytes of its images, and the images.

        Args:
            folder: from which paths of images begin.

        Raises:
            ValueError: see `in_parts`, `content_of` and `see`.
        """
        line, sources = in_parts(line, where)
        images = tuple(
            content_of(x, folder, f"{where}, image {n}")
            for n, x in enumerate(sources, 1)
        )
        return line, images, self.see(images, where)

    def layout(self, seen: Seen) -> "Layout":
        return Layout(self, seen)

    def row(self, seen: Seen, ids: np.ndarray, where: str) -> dict[str, np.ndarray]:
        """The leaves of a row of a batch, not filled up.

        Args:
            ids: the tokens of the conversation, int32 (tokens,).

        Raises:
            ValueError: the images do not fit the model, or the places in the text.
        """
        model, kind = self.model, self.model.kind
        word = self.processor.tokenizer.convert_ids_to_tokens(model.image_token)
        made = sum(text.count(word) for text in seen.replacements)
        num_tokens = int(np.count_nonzero(ids == model.image_token))
        if num_tokens != made:
            raise ValueError(
                f"{where}: the text has {num_tokens:,} image tokens ({word}), and its "
                f"{len(seen.replacements)} images have {made:,}. Use a chat template "
                f"with a place for each image, and no {word} in a text."
            )
        try:
            tokens, pieces = kind.tokens_of
            given = kind.num_made(seen.leaves)
            if made * pieces != given * tokens:
                raise ValueError(
                    f"the processor makes {made:,} image tokens for {given:,} "
                    f"{kind.pieces}, and the model has {tokens} for {pieces}"
                )
            return dict(kind.read(seen.leaves, ids, model.module))
        except ValueError as error:
            raise ValueError(
                f"{where}: {error}. Use the processor of {model.name}."
            ) from None


class Layout:
    """A tokenizer in whose conversations images have all their tokens.

    It has what `Tokenizing` needs of a tokenizer.
    """

    def __init__(self, reader: ImageReader, seen: Seen) -> None:
        self._processor, self._seen = reader.processor, seen
        self._tokenizer = reader.processor.tokenizer
        self.chat_template = reader.chat_template

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, **named: Any) -> Any:
        """The tokens of a text; the first is the one that begins texts.

        As `apply_chat_template` of processors does; a template may have it already.
        """
        first = self._tokenizer.bos_token
        adds = first is None or not text.startswith(first)
        return self._tokenizer(text, **{"add_special_tokens": adds} | named)

    def apply_chat_template(
        self,
        messages: Sequence[Any],
        *,
        tools: Any = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        return_assistant_tokens_mask: bool = False,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> Any:
        """As that of a tokenizer, with the tokens of images.

        Raises:
            ValueError: there are more places for images in the text than images.
        """
        texts, spans = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=self.chat_template,
            add_generation_prompt=add_generation_prompt,
            return_assistant_tokens_mask=return_assistant_tokens_mask,
            **self._tokenizer.special_tokens_map,
        )
        places = texts[0].count(self._processor.image_token)
        count = len(self._seen.replacements)
        if places > count:
            raise ValueError(
                f"the text has places for {places} images "
                f"({self._processor.image_token}), and {count} are given"
            )
        (text,), offsets = self._processor.get_text_with_replacements(
            texts, list(self._seen.replacements)
        )
        if not tokenize:
            return text
        if not return_assistant_tokens_mask:
            return self(text, **tokenizer_kwargs or {})
        found = self(text, return_offsets_mapping=True)
        moved = _Moved(offsets[0] if offsets else [])
        marked = [(moved(begin), moved(end)) for begin, end in spans[0]]
        mask = [
            int(any(first < end and last > begin for begin, end in marked))
            for first, last in found["offset_mapping"]
        ]
        return {"input_ids": list(found["input_ids"]), "assistant_masks": mask}


class _Moved:
    """Where a character of a text is after images before it got their tokens."""

    def __init__(self, offsets: Sequence[Mapping[str, Any]]) -> None:
        self._ends = [x["span"][1] for x in offsets]
        self._gained = [0, *(x["new_span"][1] - x["span"][1] for x in offsets)]

    def __call__(self, place: int) -> int:
        return place + self._gained[bisect_right(self._ends, place)]
