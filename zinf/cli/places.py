"""Where the checkpoints of a config's run are."""

from pathlib import Path

from zinf.checkpoint import Place, as_place
from zinf.checkpoint.bucket.store import Store
from zinf.core.config import Config


def place_of_checkpoints(config: Config) -> Place:
    named = config.run.checkpoints
    if named is None:
        return config.run.output / "checkpoints"
    return as_place(named if "://" in named else Path(named).expanduser())


def has_any(checkpoints: Place) -> bool:
    """Whether anything is there."""
    if isinstance(checkpoints, Path):
        return checkpoints.is_dir() and any(checkpoints.iterdir())
    return bool(Store(checkpoints).names(is_first=True))
