"""The papers' tables, printed from their formulas."""

from decimal import ROUND_HALF_UP, Decimal

from rich.table import Table

from zinf.core.paper.infinity import (
    BATCH_OF_CHECKPOINTS,
    BATCH_PER_GPU,
    BATCH_PER_NODE,
    KIBI,
    LAYERS_PER_CHECKPOINT,
    MODELS,
    SEQUENCE_LENGTH,
    Transformer,
)
from zinf.core.paper.zero import Stage, model_state_bytes

NUM_PARAMS, NUM_DEVICES = 7_500_000_000, 64
STAGES: dict[Stage, str] = {
    0: "16 N",
    1: "4 N + 12 N/d",
    2: "2 N + 14 N/d",
    3: "16 N/d",
}


def zero_table() -> Table:
    """ZeRO, figure 1: model state on a device of 64 with 7.5 billion parameters."""
    table = Table(
        "stage",
        "bytes",
        "GB",
        title="ZeRO: model state per device",
        caption=f"N = {NUM_PARAMS / 1e9} billion parameters, d = {NUM_DEVICES} devices",
        box=None,
        min_width=48,
    )
    for stage, formula in STAGES.items():
        nbytes = model_state_bytes(NUM_PARAMS, stage, num_devices=NUM_DEVICES)
        table.add_row(str(stage), formula, f"{nbytes / 1e9:.4g}")
    return table


def infinity_table() -> Table:
    """ZeRO-Infinity, figure 2a: memory of models of 0.1 to 101 trillion parameters."""
    table = Table(
        title="ZeRO-Infinity: memory of massive models",
        caption=f"In 2^40 or 2^30 bytes; sequences of {SEQUENCE_LENGTH}, batches of "
        f"{BATCH_PER_NODE} on a node and {BATCH_PER_GPU} on a GPU, checkpoints of "
        f"{BATCH_OF_CHECKPOINTS}.",
        box=None,
    )
    for name, formula in COLUMNS:
        table.add_column(f"{name}\n{formula}", justify="right", vertical="bottom")
    for model in MODELS:
        table.add_row(*infinity_row(model))
    return table


COLUMNS = (
    ("params (10^12)", "12 nl hd^2"),
    ("layers", "nl"),
    ("hidden", "hd"),
    ("heads", "ah"),
    ("model states (TB)", "240 nl hd^2"),
    ("activations (TB/node)", "nl bsz seq (16 hd + 2 ah seq)"),
    ("checkpoints (TB/node)", "2 bsz seq hd nl / ci"),
    ("model working (GB/GPU)", "4 hd 4hd"),
    ("activation working (GB/GPU)", "bsz seq ci (16 hd + 2 ah seq)"),
)


def infinity_row(model: Transformer) -> tuple[str, ...]:
    """The table row of a model, with the paper's rounding."""
    checkpoints = model.checkpoint_bytes(
        batch=BATCH_OF_CHECKPOINTS,
        sequence=SEQUENCE_LENGTH,
        layers_per_checkpoint=LAYERS_PER_CHECKPOINT,
    )
    working = model.activation_working_bytes(
        batch=BATCH_PER_GPU,
        sequence=SEQUENCE_LENGTH,
        layers_per_checkpoint=LAYERS_PER_CHECKPOINT,
    )
    activations = model.activation_bytes(batch=BATCH_PER_NODE, sequence=SEQUENCE_LENGTH)
    return (
        _rounded(model.num_params / 1e12),
        str(model.num_layers),
        f"{model.hidden // KIBI}K",
        str(model.num_heads),
        _rounded(model.model_state_bytes / 2**40),
        _rounded(activations / 2**40),
        _rounded(checkpoints / 2**40),
        _rounded(model.model_working_bytes / 2**30),
        _rounded(working / 2**30),
    )


def _rounded(value: float) -> str:
    """Two decimals; halves are rounded up, since some values end exactly in a half."""
    return str(Decimal(value).quantize(Decimal("0.01"), ROUND_HALF_UP))
