"""`zinf merge`: writes a model whose weights are means of those of several models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from zinf import hf
from zinf.core.text.complaint import complain, tell


def write_merged(
    names: Sequence[str],
    output: Path,
    *,
    shares: str | None,
    only: Literal["all", "experts"],
    threshold: float,
) -> None:
    """Writes the model.

    Raises:
        ValueError: the shares are no numbers; or see `zinf.hf.merge`.
        FileExistsError: the output is there.
    """
    try:
        given = None if shares is None else [float(x) for x in shares.split(",")]
    except ValueError:
        raise ValueError(
            f"--shares is {shares!r}; it must be numbers with commas, such as 0.7,0.3."
        ) from None
    models = [hf.load_as_stored(name) for name in names]
    rest = {"only": only, "threshold": threshold, "say": complain}
    hf.merge(models, output, shares=given, **rest)
    tell(f"wrote {output}")
