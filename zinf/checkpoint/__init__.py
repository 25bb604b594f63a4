"""Saving and resuming: arrays streamed from and to any tier, committed by Orbax."""

from typing import TYPE_CHECKING

from zinf.lazy import make_lazy

if TYPE_CHECKING:
    from zinf.checkpoint.arrays import read_arrays as read_arrays
    from zinf.checkpoint.arrays import write_arrays as write_arrays
    from zinf.checkpoint.checkpoints import AbstractSaveable as AbstractSaveable
    from zinf.checkpoint.checkpoints import Checkpoints as Checkpoints
    from zinf.checkpoint.saved import Damage as Damage
    from zinf.checkpoint.saved import Saved as Saved

# An engine saves and restores without Orbax, which only `Checkpoints` needs.
make_lazy(
    __name__,
    {
        "AbstractSaveable": "zinf.checkpoint.checkpoints",
        "Checkpoints": "zinf.checkpoint.checkpoints",
        "Damage": "zinf.checkpoint.saved",
        "Saved": "zinf.checkpoint.saved",
        "read_arrays": "zinf.checkpoint.arrays",
        "write_arrays": "zinf.checkpoint.arrays",
    },
)
