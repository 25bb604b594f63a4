"""`zinf prune`: writes a model of transformers with fewer experts or layers."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from zinf import hf
from zinf.cli.quantize import rows_of
from zinf.core.config import Config
from zinf.core.text.complaint import tell


def write_pruned(
    name: str,
    data: Sequence[Path],
    output: Path,
    config: Config,
    *,
    experts: int | None,
    layers: str | None,
    samples: int,
    sequence_length: int | None,
) -> None:
    """Writes the smaller model, and how much of the choices the kept experts had.

    Raises:
        ValueError: neither experts nor layers are given, or both, or texts are missing;
            or see `zinf.hf.prune_experts` and `zinf.hf.prune_layers`.
        FileExistsError: the output is there.
    """
    if (experts is None) == (layers is None):
        raise ValueError("Give one of --experts and --layers.")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(f"{output} is there already. Name another folder.")
    if layers is not None:
        model = hf.load_as_stored(name)
        hf.prune_layers(model, output, _numbers(layers))
    elif not data:
        raise ValueError(
            "Experts are kept by how often texts use them, and no texts are given: "
            "--data FILE."
        )
    else:
        assert experts is not None
        model = hf.load_as_stored(name)
        hf.check_pruning(model, experts)
        rows = rows_of(model, data, samples, sequence_length)
        use = hf.use_of_experts(model, rows, config)
        kept = hf.most_used(use, experts)
        for owner, numbers in kept.items():
            share = use[owner][numbers].sum() / np.maximum(use[owner].sum(), 1)
            tell(
                f"{owner}: {experts} of {len(use[owner])} experts, which had "
                f"{share:.1%} of the choices"
            )
        hf.prune_experts(model, output, kept)
    tell(f"wrote {output}")


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--layers is {text!r}; it must be numbers with commas, such as 0,4,8."
        ) from None
