"""Parses and checks the scalars of a checkpoint, which are not trusted.

[Note: saved scalars] A checkpoint may come from anywhere, and its checksum only says
that nothing changed since it was written. All scalars are parsed and checked before any
state of a run is replaced.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zinf.core.program import Role

Count = Annotated[int, Field(ge=0, lt=2**63)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)


class SavedShared(_Part):
    """Optimizer state that all leaves share; `value` is a number or nested lists."""

    name: Annotated[str, Field(strict=True)]
    dtype: Annotated[str, Field(strict=True)]
    value: Any

    def array(self, like: np.ndarray) -> np.ndarray:
        """The value as an array.

        Args:
            like: this run's value; dtype and shape must be the same.

        Raises:
            ValueError: dtype or shape differ, or the value is no array of numbers.
        """
        found = f"{self.dtype} of which the value cannot be read"
        if self.dtype == str(like.dtype):
            try:
                array = np.asarray(self.value, dtype=like.dtype)
            except (TypeError, ValueError, OverflowError):
                pass
            else:
                if array.shape == like.shape:
                    return array
                found = f"{self.dtype}{list(array.shape)}"
        raise damaged(
            f"{self.name!r} is {found}, and {like.dtype}{list(like.shape)} here"
        )


class SavedScale(_Part):
    """The state of dynamic loss scaling (`optim.loss_scale.LossScale`)."""

    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    step: Annotated[Count, Field(strict=True)]
    last_overflow: Annotated[int, Field(ge=-1, strict=True)]
    patience: Annotated[Count, Field(strict=True)]


class SavedScalars(_Part):
    num_steps: Annotated[Count, Field(strict=True)]
    shared: list[SavedShared]
    loss_scale: SavedScale | None
    # Checkpoints from before `skip_nonfinite` have neither.
    num_skipped: Annotated[Count, Field(strict=True)] = 0
    num_skipped_in_row: Annotated[Count, Field(strict=True)] = 0
    # Absent unless gradients of `forward_backward` wait for their update.
    num_summed: Annotated[Count, Field(strict=True)] = 0


def parse_scalars(saved: Mapping[str, Any]) -> SavedScalars:
    """The scalars of a checkpoint, without the random key.

    Raises:
        ValueError: a scalar is missing or has a wrong type or value.
    """
    try:
        return SavedScalars.model_validate(dict(saved))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise damaged(f"{place}: {first['msg']}") from None


def roles_without_content(saved: Mapping[str, Any]) -> tuple[Role, ...]:
    """Roles of arrays that hold nothing: sums, if no gradient was added to them.

    Raises:
        ValueError: see `parse_scalars`.
    """
    return () if parse_scalars(saved).num_summed else (Role.SUM,)


def damaged(found: str) -> ValueError:
    return ValueError(
        f"The scalars of the checkpoint are not what zinf saves: {found}. Nothing was "
        "taken from it; restore another one."
    )
