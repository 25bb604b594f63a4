"""Training with several processes: they join, compare settings and end together."""

from typing import TYPE_CHECKING

from zinf.core.process.lazy import make_lazy

if TYPE_CHECKING:
    from zinf.distributed.agreement import flat as flat
    from zinf.distributed.digests import Digests as Digests
    from zinf.distributed.group import AbstractGroup as AbstractGroup
    from zinf.distributed.group import Alone as Alone
    from zinf.distributed.group import leave as leave
    from zinf.distributed.join import join as join
    from zinf.distributed.launch import Flags as Flags
    from zinf.distributed.launch import find_seat as find_seat
    from zinf.distributed.limits import Limits as Limits
    from zinf.distributed.seat import JoinError as JoinError
    from zinf.distributed.seat import Seat as Seat

# Lazy, because the command line imports the options of this package for its help, which
# must not import jax.
make_lazy(__name__)
