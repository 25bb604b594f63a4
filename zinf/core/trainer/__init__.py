"""The training loop: data, evaluation, checkpoints, metrics, resuming, interrupts."""

from zinf.core.trainer.hook import Hook as Hook
from zinf.core.trainer.trainer import Trainer as Trainer
