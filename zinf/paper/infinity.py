"""What massive transformers need ("ZeRO-Infinity", section 3 and figure 2a).

`hd` is the hidden size, `nl` the number of layers, `bsz` the batch, `seq` the sequence
length and `ci` the number of layers between two activation checkpoints.
Rajbhandari et al., https://arxiv.org/abs/2104.07857
"""

from dataclasses import dataclass

# The setting of the figure. A node has 16 GPUs.
SEQUENCE_LENGTH = 1024
BATCH_PER_NODE = 64
BATCH_PER_GPU = BATCH_PER_NODE // 16
# The checkpoints are those of half the batch.
BATCH_OF_CHECKPOINTS = 32
LAYERS_PER_CHECKPOINT = 1

# Bytes per parameter: 2 of parameter, 2 of gradient and 16 of optimizer state, in which
# the paper counts the gradient in 32 bits.
STATE_BYTES = 20


@dataclass(frozen=True)
class Transformer:
    """A model of the figure; its linear layers alone count."""

    num_layers: int
    hidden: int
    num_heads: int

    @property
    def num_params(self) -> int:
        """12 nl hd^2, of (hd, 3hd), (hd, hd), (hd, 4hd) and (4hd, hd) in a layer."""
        return 12 * self.num_layers * self.hidden**2

    @property
    def model_state_bytes(self) -> int:
        """240 nl hd^2, of the whole model."""
        return STATE_BYTES * self.num_params

    def checkpoint_bytes(
        self, *, batch: int, sequence: int, layers_per_checkpoint: int
    ) -> int:
        """2 bsz seq hd nl / ci, of activations that are kept for the backward pass."""
        kept = self.num_layers // layers_per_checkpoint
        return 2 * batch * sequence * self.hidden * kept

    @property
    def model_working_bytes(self) -> int:
        """4 hd 4hd: parameter and gradient, 2 bytes each, of the largest layer."""
        return 4 * self.hidden * 4 * self.hidden

    def activation_working_bytes(
        self, *, batch: int, sequence: int, layers_per_checkpoint: int
    ) -> int:
        """bsz seq ci (16 hd + 2 heads seq), of what is recomputed at a time."""
        of_token = 16 * self.hidden + 2 * self.num_heads * sequence
        return batch * sequence * layers_per_checkpoint * of_token

    def activation_bytes(self, *, batch: int, sequence: int) -> int:
        """Of all layers, if nothing is recomputed."""
        return self.num_layers * self.activation_working_bytes(
            batch=batch, sequence=sequence, layers_per_checkpoint=1
        )


KIBI = 1024
MODELS = (
    Transformer(80, 10 * KIBI, 128),
    Transformer(100, 20 * KIBI, 160),
    Transformer(128, 25 * KIBI, 256),
    Transformer(195, 64 * KIBI, 512),
    Transformer(315, 160 * KIBI, 1024),
)
