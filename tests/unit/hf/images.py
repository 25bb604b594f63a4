"""Tiny random models that read images, and batches for them and for torch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from tests.unit.hf.models import SMALL, VOCAB

import torch  # isort: skip
import transformers  # isort: skip

from zinf import hf  # isort: skip

IMAGE, LENGTH = 90, 32
# What the configuration of each architecture has, besides the sizes of `SMALL`.
TABLE: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_suffix(".json").read_text()
)
# Grids of images in patches, of which each 2 x 2 are a token.
GRIDS = ((1, 4, 4), (1, 2, 4), (1, 6, 4))
TYPES = {"gemma3": "token_type_ids"}
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def config_of(name: str, **changes: Any) -> transformers.PretrainedConfig:
    given = dict(TABLE[name]) | changes
    text = SMALL | {"max_position_embeddings": 128} | given.pop("text_config")
    return transformers.CONFIG_MAPPING[name](text_config=text, **given)


def make(
    name: str, kind: Any = transformers.AutoModelForImageTextToText, **changes: Any
) -> transformers.PreTrainedModel:
    """The model of torch, with random weights that are the same each time.

    Args:
        kind: the Auto class of `transformers`.
    """
    torch.manual_seed(0)
    config = config_of(name, **changes)
    model = kind.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Some are zero, and then hide what is multiplied with them.
            parameter += 0.05 * torch.randn_like(parameter)
    return model


def processed(kind: Any, num_images: int, seed: int) -> dict[str, np.ndarray]:
    """What an image processor gives for some images."""
    if not num_images:
        return {}
    rng = np.random.default_rng(seed)
    if kind.pieces == "patches":
        grid = np.array(GRIDS[:num_images])
        shape = (int(grid.prod(axis=1).sum()), kind.width)
        pixels = rng.normal(size=shape).astype(np.float32)
        return {"pixel_values": pixels, "image_grid_thw": grid}
    pixels = rng.normal(size=(num_images, *kind.shape)).astype(np.float32)
    found = {"pixel_values": pixels}
    if "patch_attention_mask" in kind.leaves:
        found["pixel_attention_mask"] = np.ones((num_images, *kind.shape[1:]), bool)
        found["pixel_attention_mask"][0, kind.shape[1] // 2 :] = False
    return found


def tokens_of(kind: Any, images: dict[str, np.ndarray]) -> list[int]:
    """Numbers of tokens of the images of a row."""
    if "image_grid_thw" in images:
        return [int(g.prod()) // kind.unit for g in images["image_grid_thw"]]
    return [kind.tokens_of[0]] * len(images.get("pixel_values", ()))


def batch_of(
    model: "hf.ImageModel", counts: Sequence[int]
) -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
    """A batch with so many images in each row, and what the image processor gave."""
    kind, rng = model.kind, np.random.default_rng(0)
    ids = rng.integers(3, 80, (len(counts), LENGTH)).astype(np.int32)
    images = [processed(kind, n, seed) for seed, n in enumerate(counts)]
    for row, given in zip(ids, images, strict=True):
        at = 2
        for number in tokens_of(kind, given):
            row[at : at + number] = IMAGE
            at += number + 1
    labels = np.where(ids == IMAGE, hf.IGNORED, ids)
    batch = {"input_ids": ids, "labels": labels}
    if not any(counts):
        return batch, images
    rows = [kind.read(x, i, model.module) for x, i in zip(images, ids, strict=True)]
    # One bucket more than is needed: filling has no effect.
    room = kind.unit + max(len(leaves["pixel_values"]) for leaves in rows)
    filled = [kind.filled(leaves, room, LENGTH) for leaves in rows]
    return batch | {n: np.stack([x[n] for x in filled]) for n in kind.leaves}, images


def in_torch(
    name: str, batch: dict[str, np.ndarray], images: list[dict[str, np.ndarray]]
) -> dict[str, torch.Tensor]:
    """The batch as `transformers` takes it."""
    ids = torch.tensor(batch["input_ids"]).long()
    found = {"input_ids": ids}
    given = [x for x in images if x]
    if not given:
        return found
    if name in ("idefics3", "smolvlm"):
        most = max(len(x["pixel_values"]) for x in given)
        for key in ("pixel_values", "pixel_attention_mask"):
            shape = given[0][key].shape[1:]
            values = np.zeros((len(images), most, *shape), given[0][key].dtype)
            for row, x in enumerate(images):
                if x:
                    values[row, : len(x[key])] = x[key]
            found[key] = torch.tensor(values)
        return found
    for key in given[0]:
        found[key] = torch.tensor(np.concatenate([x[key] for x in given]))
    if "image_grid_thw" in found:
        found["mm_token_type_ids"] = (ids == IMAGE).int()
    if name in TYPES:
        found[TYPES[name]] = (ids == IMAGE).long()
    return found


def torch_loss(logits: torch.Tensor, labels: np.ndarray) -> torch.Tensor:
    wanted = torch.tensor(labels[:, 1:]).long().reshape(-1)
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, VOCAB).float(), wanted
    )


# Whoever names the tokens of images, and what else is among the words.
MARKS = dict.fromkeys(("llava", "idefics3", "smolvlm"), "<image>") | {
    "gemma3": "<image_soft_token>",
    **dict.fromkeys(QWEN, "<|image_pad|>"),
}
SPECIAL = (
    *("<start_of_image>", "<end_of_image>", "IMAGE", "<|video_pad|>"),
    *("<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
)
CHAT = (
    "{% for m in messages %}{{ 'a: ' if m.role == 'assistant' else 'u: ' }}"
    "{% for p in m.content %}{% if p.type == 'image' %}PLACE {% else %}{{ p.text }} "
    "{% endif %}{% endfor %}{% if m.role == 'assistant' %}</s> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a: {% endif %}"
)
TAGGED = CHAT.replace(
    "{% for p in m.content %}",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content[0].text }} </s> "
    "{% endgeneration %}{% else %}{% for p in m.content %}",
).replace(
    "{% endfor %}{% if m.role == 'assistant' %}</s> {% endif %}{% endfor %}",
    "{% endfor %}{% endif %}{% endfor %}",
)


def tokenizer(name: str, chat: str = CHAT) -> transformers.PreTrainedTokenizerFast:
    """A token for each word; `w0` is token 5, and that of images is `IMAGE`."""
    mark, first = MARKS[name], 88
    words = ["<unk>", "</s>", "<pad>", "a:", "u:"]
    words += [f"w{i}" for i in range(first - len(words))]
    special = [mark if word == "IMAGE" else word for word in SPECIAL]
    vocabulary = {word: i for i, word in enumerate([*words, *special])}
    made = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = WhitespaceSplit()
    places = {
        "gemma3": "<start_of_image>",
        **dict.fromkeys(QWEN, f"<start_of_image> {mark} <end_of_image>"),
    }
    extra = {"image_token": mark}
    if name == "gemma3":
        extra |= {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token="<unk>",
        eos_token="</s>",
        additional_special_tokens=special,
        extra_special_tokens=extra,
        chat_template=chat.replace("PLACE", places.get(name, mark)),
    )


SQUARE = {"height": 8, "width": 8}
SPLIT = {"size": {"longest_edge": 16}, "max_image_size": {"longest_edge": 8}}
GRID = {
    "size": {"shortest_edge": 64, "longest_edge": 1024},
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
# Classes of processor and image processor, and what is in the file of each: first that
# of images.
PROCESSORS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llava": (
        *("LlavaProcessor", "CLIPImageProcessor"),
        {"size": {"shortest_edge": 8}, "crop_size": SQUARE},
        {
            "patch_size": 4,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    ),
    "gemma3": (
        *("Gemma3Processor", "Gemma3ImageProcessor", {"size": SQUARE}),
        {"image_seq_length": 4},
    ),
    "idefics3": (
        *("Idefics3Processor", "Idefics3ImageProcessor", SPLIT),
        {"image_seq_len": 1},
    ),
    "smolvlm": (
        *("SmolVLMProcessor", "SmolVLMImageProcessor", SPLIT),
        {"image_seq_len": 1},
    ),
    "qwen2_vl": ("Qwen2VLProcessor", "Qwen2VLImageProcessor", GRID, {}),
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", "Qwen2VLImageProcessor", GRID, {}),
    "qwen3_vl": ("Qwen3VLProcessor", "Qwen2VLImageProcessor", GRID, {}),
}


def processor_folder(name: str, folder: Path, chat: str = CHAT) -> Path:
    """Tokenizer and processor of a tiny model, as a published folder has them."""
    family, image, images, more = PROCESSORS[name]
    folder.mkdir(exist_ok=True)
    tokenizer(name, chat).save_pretrained(folder)
    images = images | {"image_processor_type": image}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    processor = more | {"processor_class": family}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return folder


def model_folder(name: str, folder: Path, chat: str = CHAT) -> Path:
    make(name).save_pretrained(folder)
    return processor_folder(name, folder, chat)


def judge(folder: Path) -> transformers.PreTrainedModel:
    """A reward model of torch that reads images, with a processor."""
    kind = transformers.AutoModelForSequenceClassification
    model = make("gemma3", kind, num_labels=1, pad_token_id=2)
    model.save_pretrained(folder)
    processor_folder("gemma3", folder)
    return model


def picture(seed: int, height: int = 20, width: int = 30) -> Image.Image:
    shape = (height, width, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    return Image.fromarray(pixels)


def reloaded(folder: Path) -> transformers.PreTrainedModel:
    """A model that zinf has exported, in torch."""
    kind = transformers.AutoModelForImageTextToText
    named = {"attn_implementation": "eager", "dtype": torch.float32}
    return kind.from_pretrained(folder, **named).eval()
