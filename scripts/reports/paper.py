"""The tables of the ZeRO papers, memory and traffic of training, from the formulas.

    python scripts/reports/paper.py

* Rajbhandari et al., "ZeRO", https://arxiv.org/abs/1910.02054, figure 1 and section 7.
  Adam in mixed precision needs, per parameter, 2 bytes for the parameter, 2 for the
  gradient and 12 for optimizer state (master parameter and two moments in 32 bits).
* Rajbhandari et al., "ZeRO-Infinity", https://arxiv.org/abs/2104.07857, section 3 and
  figure 2a. It counts linear layers only, and 20 bytes of states per parameter, with a
  gradient in 32 bits. `hd` is the hidden size, `nl` the number of layers, `ah` that of
  heads, `bsz` the batch, `seq` the sequence length and `ci` the number of layers
  between two activation checkpoints, here 1.

zinf uses none of these figures: it counts the bytes of its own programs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal

from zinf.core.text.tables import aligned

NUM_PARAMS, NUM_DEVICES = 7_500_000_000, 64
STAGES = ("16 N", "4 N + 12 N/d", "2 N + 14 N/d", "16 N/d")
PARAM_BYTES, GRAD_BYTES, OPTIMIZER_BYTES = 2, 2, 12
STATE_BYTES = 20

# The setting of figure 2a. A node has 16 GPUs.
SEQUENCE_LENGTH = 1024
BATCH_PER_NODE = 64
BATCH_PER_GPU = BATCH_PER_NODE // 16
# The figure counts activation checkpoints for half the batch.
BATCH_OF_CHECKPOINTS = 32
COLUMNS = (
    ("params, 10^12", "12 nl hd^2"),
    ("layers", "nl"),
    ("hidden", "hd"),
    ("heads", "ah"),
    ("model states, TB", "240 nl hd^2"),
    ("activations, TB/node", "nl bsz seq (16 hd + 2 ah seq)"),
    ("checkpoints, TB/node", "2 bsz seq hd nl"),
    ("model working, GB/GPU", "4 hd 4hd"),
    ("activation working, GB/GPU", "bsz seq (16 hd + 2 ah seq)"),
)


def model_state_bytes(num_params: int, stage: int, *, num_devices: int) -> float:
    """Bytes of parameters, gradients and optimizer state on each device.

    Stage 1 shards optimizer state over the devices, stage 2 gradients too, stage 3
    parameters too.
    """
    sharded_from = ((PARAM_BYTES, 3), (GRAD_BYTES, 2), (OPTIMIZER_BYTES, 1))
    return sum(
        num_params * nbytes / (num_devices if stage >= first else 1)
        for nbytes, first in sharded_from
    )


def sent_params(stage: int) -> int:
    """Bytes that a device sends in a step over the bytes of all parameters.

    Gradients are reduce-scattered and parameters are gathered once; in stage 0 both are
    one all-reduce of gradients. Stage 3 gathers parameters for the forward pass and
    again for the backward pass. A ring of n devices sends (n - 1) / n of this.
    """
    return 3 if stage == 3 else 2


@dataclass(frozen=True)
class Transformer:
    """A model of figure 2a."""

    num_layers: int
    hidden: int
    num_heads: int

    @property
    def num_params(self) -> int:
        """A layer has (hd, 3hd), (hd, hd), (hd, 4hd) and (4hd, hd)."""
        return 12 * self.num_layers * self.hidden**2

    def working_bytes(self, batch: int) -> int:
        """Bytes of the activations of a layer, which are recomputed at once."""
        of_token = 16 * self.hidden + 2 * self.num_heads * SEQUENCE_LENGTH
        return batch * SEQUENCE_LENGTH * of_token

    def row(self) -> tuple[str, ...]:
        """The table row, with the paper's rounding."""
        activations = self.num_layers * self.working_bytes(BATCH_PER_NODE)
        sequences = BATCH_OF_CHECKPOINTS * SEQUENCE_LENGTH
        checkpoints = 2 * sequences * self.hidden * self.num_layers
        return (
            _rounded(self.num_params / 1e12),
            str(self.num_layers),
            f"{self.hidden // 1024}K",
            str(self.num_heads),
            _rounded(STATE_BYTES * self.num_params / 2**40),
            _rounded(activations / 2**40),
            _rounded(checkpoints / 2**40),
            # Parameter and gradient of the largest layer, 2 bytes each.
            _rounded(4 * self.hidden * 4 * self.hidden / 2**30),
            _rounded(self.working_bytes(BATCH_PER_GPU) / 2**30),
        )


MODELS = (
    Transformer(80, 10 * 1024, 128),
    Transformer(100, 20 * 1024, 160),
    Transformer(128, 25 * 1024, 256),
    Transformer(195, 64 * 1024, 512),
    Transformer(315, 160 * 1024, 1024),
)


def tables() -> Iterator[str]:
    """Figure 1 of ZeRO and figure 2a of ZeRO-Infinity, line by line."""
    yield "ZeRO: model state per device"
    rows = [("stage", "bytes", "GB")]
    for stage, formula in enumerate(STAGES):
        nbytes = model_state_bytes(NUM_PARAMS, stage, num_devices=NUM_DEVICES)
        rows.append((str(stage), formula, f"{nbytes / 1e9:.4g}"))
    yield from aligned(rows, left=(0, 1))
    yield f"N = {NUM_PARAMS / 1e9} billion parameters, d = {NUM_DEVICES} devices\n"
    yield "ZeRO-Infinity: memory of massive models"
    figures = zip(COLUMNS, *(model.row() for model in MODELS), strict=True)
    yield from aligned([(*names, *row) for names, *row in figures], left=(0, 1))
    yield (
        f"In 2^40 or 2^30 bytes; sequences of {SEQUENCE_LENGTH}, batches of "
        f"{BATCH_PER_NODE} on a node and {BATCH_PER_GPU} on a GPU, checkpoints of "
        f"{BATCH_OF_CHECKPOINTS}."
    )


def _rounded(value: float) -> str:
    """Two decimals; halves are rounded up, since some values end exactly in a half."""
    return str(Decimal(value).quantize(Decimal("0.01"), ROUND_HALF_UP))


if __name__ == "__main__":
    print(*tables(), sep="\n")
