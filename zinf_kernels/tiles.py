"""The piece of a matmul that one warpgroup computes at a time."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """Rows, columns and contracted elements; two warpgroups lie one below the other."""

    m: int
    n: int
    k: int

    def obstacle(self, m: int, n: int, k: int) -> str | None:
        """Why a matmul of such sizes cannot be cut into these tiles; None if it
        can."""
        sizes = {"m": (m, 2 * self.m), "n": (n, self.n), "k": (k, self.k)}
        for name, (size, unit) in sizes.items():
            if size % unit or not size:
                return f"{name} is {size}, which is no positive multiple of {unit}."
        return None


# The sums of a warpgroup take 128 of the 168 or so registers that threads can have.
TILES = Tiles(m=128, n=128, k=64)
