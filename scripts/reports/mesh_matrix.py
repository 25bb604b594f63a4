"""Compares every mesh, ZeRO stage and tier with one device, and tiers to each other.

On 8 virtual CPU devices, from the root of the repository:

    PYTHONPATH=. python scripts/reports/mesh_matrix.py

A deviation is the largest relative difference of any loss or norm of a run. The tiers
that run segment by segment must have bit-equal losses, norms and parameters. Exits with
1 if a deviation exceeds the bound or these tiers differ.
"""

import os
import sys
from collections.abc import Sequence

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

from tests.equivalence.meshes import BOUND, MESHES, ONE, STAGES, TIERS, train


def main() -> None:
    expected = train(ONE, 0, "device")
    columns = [f"{tier:>18}" for tier in TIERS]
    print(f"{'mesh':<6}{'stage':<6}", *columns, "  tiers bit-equal", sep="")
    fails = False
    for mesh in MESHES:
        for stage in STAGES:
            runs = {tier: train(mesh, stage, tier) for tier in TIERS}
            found = [run.deviation(expected) for run in runs.values()]
            is_equal = _are_equal([runs[t] for t, where in TIERS.items() if where])
            fails |= max(found) > BOUND or not is_equal
            cells = [f"{deviation:18.1e}" for deviation in found]
            told = "yes" if is_equal else "NO"
            print(f"{mesh:<6}{stage:<6}", *cells, f"  {told}", sep="", flush=True)
    print(f"bound {BOUND:.1e}: {'exceeded' if fails else 'kept'}")
    sys.exit(fails)


def _are_equal(runs: Sequence) -> bool:
    return all(run.is_bit_equal(runs[0]) for run in runs)


if __name__ == "__main__":
    main()
