"""Saves and restores the arrays of every tier; Orbax commits and keeps checkpoints."""

from typing import TYPE_CHECKING

from zinf.core.process.lazy import make_lazy

if TYPE_CHECKING:
    from zinf.checkpoint.arrays import read_arrays as read_arrays
    from zinf.checkpoint.arrays import write_arrays as write_arrays
    from zinf.checkpoint.checkpoints import AbstractSaveable as AbstractSaveable
    from zinf.checkpoint.checkpoints import Checkpoints as Checkpoints
    from zinf.checkpoint.place import Place as Place
    from zinf.checkpoint.place import as_place as as_place
    from zinf.checkpoint.saved import Damage as Damage
    from zinf.checkpoint.saved import Saved as Saved

# Lazy: only `Checkpoints` imports Orbax; an engine saves and restores without it.
make_lazy(__name__)
