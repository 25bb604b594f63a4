"""Saving and resuming: arrays streamed from and to any tier, committed by Orbax."""

from zinf.checkpoint.arrays import read_arrays as read_arrays
from zinf.checkpoint.arrays import write_arrays as write_arrays
from zinf.checkpoint.checkpoints import AbstractSaveable as AbstractSaveable
from zinf.checkpoint.checkpoints import Checkpoints as Checkpoints
from zinf.checkpoint.saved import Damage as Damage
from zinf.checkpoint.saved import Saved as Saved
