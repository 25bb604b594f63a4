"""Memory that large transformers need ("ZeRO-Infinity", section 3 and figure 2a).

`hd` is the hidden size, `nl` the number of layers, `bsz` the batch, `seq` the sequence
length and `ci` the number of layers between two activation checkpoints.
Rajbhandari et al., https://arxiv.org/abs/2104.07857
"""

from dataclasses import dataclass

# The setting of figure 2a. A node has 16 GPUs.
SEQUENCE_LENGTH = 1024
BATCH_PER_NODE = 64
BATCH_PER_GPU = BATCH_PER_NODE // 16
# The figure counts activation checkpoints for half the batch.
BATCH_OF_CHECKPOINTS = 32
LAYERS_PER_CHECKPOINT = 1

# Bytes per parameter: 2 for the parameter, 2 for the gradient and 16 for optimizer
# state, in which the paper includes a gradient in 32 bits.
STATE_BYTES = 20


@dataclass(frozen=True)
class Transformer:
    """A model of figure 2a; only its linear layers are counted."""

    num_layers: int
    hidden: int
    num_heads: int

    @property
    def num_params(self) -> int:
        """12 nl hd^2: a layer has (hd, 3hd), (hd, hd), (hd, 4hd) and (4hd, hd)."""
        return 12 * self.num_layers * self.hidden**2

    @property
    def model_state_bytes(self) -> int:
        """240 nl hd^2: bytes of the states of the whole model."""
        return STATE_BYTES * self.num_params

    def checkpoint_bytes(
        self, *, batch: int, sequence: int, layers_per_checkpoint: int
    ) -> int:
        """2 bsz seq hd nl / ci: bytes of activations saved for the backward pass."""
        kept = self.num_layers // layers_per_checkpoint
        return 2 * batch * sequence * self.hidden * kept

    @property
    def model_working_bytes(self) -> int:
        """4 hd 4hd: parameter and gradient of the largest layer, 2 bytes each."""
        return 4 * self.hidden * 4 * self.hidden

    def activation_working_bytes(
        self, *, batch: int, sequence: int, layers_per_checkpoint: int
    ) -> int:
        """bsz seq ci (16 hd + 2 heads seq): activations that are recomputed at once."""
        of_token = 16 * self.hidden + 2 * self.num_heads * sequence
        return batch * sequence * layers_per_checkpoint * of_token

    def activation_bytes(self, *, batch: int, sequence: int) -> int:
        """Bytes of the activations of all layers, if nothing is recomputed."""
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
