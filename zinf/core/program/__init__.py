"""The terms that all packages share: tiers, array names, and programs as plain data.

Nothing here imports jax or numpy, so that `plan` can be built and tested without them.
"""

from zinf.core.program.array import FLOAT32_BYTES as FLOAT32_BYTES
from zinf.core.program.array import ArrayId as ArrayId
from zinf.core.program.array import ArraySpec as ArraySpec
from zinf.core.program.array import Role as Role
from zinf.core.program.array import Rows as Rows
from zinf.core.program.array import covers as covers
from zinf.core.program.array import overlaps as overlaps
from zinf.core.program.chosen import Chosen as Chosen
from zinf.core.program.chosen import expected_experts as expected_experts
from zinf.core.program.chosen import is_worthwhile as is_worthwhile
from zinf.core.program.program import KEY as KEY
from zinf.core.program.program import Leaf as Leaf
from zinf.core.program.program import Program as Program
from zinf.core.program.program import RowSum as RowSum
from zinf.core.program.program import SegmentSpec as SegmentSpec
from zinf.core.program.program import Tiling as Tiling
from zinf.core.program.tier import HOPS as HOPS
from zinf.core.program.tier import MOVING as MOVING
from zinf.core.program.tier import ROUTES as ROUTES
from zinf.core.program.tier import TRANSFER_LINKS as TRANSFER_LINKS
from zinf.core.program.tier import Hop as Hop
from zinf.core.program.tier import Link as Link
from zinf.core.program.tier import Tier as Tier
from zinf.core.program.tier import open_tiers as open_tiers
