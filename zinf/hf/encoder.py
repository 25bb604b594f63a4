"""Models of texts without a head, and one vector of each text from their states."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES

from zinf.hf.folder import find_folder
from zinf.hf.heads import HeadModel
from zinf.hf.model import Batch, Params
from zinf.hf.module import ENCODER, TEXT_ENCODER, read_config
from zinf.hf.quantized.packed import Dequantized
from zinf.hf.weights import StoredWeights

# How the states of the tokens of a text become one vector: their mean, that of the last
# token, or that of the first.
Pooling = Literal["mean", "last", "cls"]


class Encoder(HeadModel):
    """A model without a head; `logits` are the states of its last layer."""

    def _stored(self, files: Dequantized) -> StoredWeights:
        """The weights, without those that only a pooler has: vectors need none."""
        found = super()._stored(files)
        found.new = ()
        return found


def load_encoder(path_or_id: str | Path, *, dtype: str = "float32") -> Encoder:
    """The base model of any architecture of `transformers`. No weight is read now.

    Of an encoder-decoder such as T5 it is the encoder.

    Args:
        path_or_id: a folder, a config.json, or the name of a model on the hub.
        dtype: of the weights.

    Raises:
        FileNotFoundError, OSError: see `find_folder`.
        ValueError, NotImplementedError: see `read_config`; or the architecture has no
            such class.
    """
    folder = find_folder(path_or_id)
    config = read_config(folder)
    # Others are there too that `ENCODER` has as well, such as Llama 4's.
    kind = MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES.get(config.model_type, "")
    auto_class = TEXT_ENCODER if kind.endswith("EncoderModel") else ENCODER
    return Encoder(str(path_or_id), folder, config, auto_class, dtype)


@dataclass(frozen=True)
class Pooled:
    """One vector of each text: the function that `Prefill` runs to embed."""

    model: Encoder
    pooling: Pooling

    def __call__(self, params: Params, batch: Batch) -> jax.Array:
        """float32 (B, D).

        Args:
            batch: arguments of the module, with `attention_mask` (B, T), 1 for the
                first tokens of a row and then 0; and `first` (B,): a mean leaves out
                the tokens before.
        """
        inputs: Mapping[str, jax.Array] = {n: x for n, x in batch.items() if n != FIRST}
        states = self.model.logits(params, dict(inputs)).astype(jnp.float32)
        mask = batch["attention_mask"]
        if self.pooling == "cls":
            return states[:, 0]
        if self.pooling == "last":
            last = jnp.sum(mask, axis=1)[:, None, None] - 1
            return jnp.take_along_axis(states, last, axis=1)[:, 0]
        places = jnp.arange(mask.shape[1], dtype=jnp.int32)[None]
        counts = jnp.where(places >= batch[FIRST][:, None], mask, 0)
        weights = counts.astype(jnp.float32)
        total = jnp.maximum(jnp.sum(weights, axis=1, keepdims=True), 1e-9)
        return jnp.sum(states * weights[..., None], axis=1) / total


FIRST = "first"
