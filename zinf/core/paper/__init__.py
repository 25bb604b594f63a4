"""Formulas of the ZeRO papers for the memory and traffic of training."""

from zinf.core.paper.infinity import MODELS, Transformer
from zinf.core.paper.table import infinity_table, zero_table
from zinf.core.paper.zero import model_state_bytes, sent_params

__all__ = [
    "MODELS",
    "Transformer",
    "infinity_table",
    "model_state_bytes",
    "sent_params",
    "zero_table",
]
