"""The types of values that keys take. All are strict: "3" is not a number."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, AllowInfNan, BeforeValidator, Field, Strict


def _whole(value: object) -> object:
    # JSON writes large counts as 1e9, which parses as a float.
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _path(value: object) -> object:
    if not isinstance(value, str | Path) or not str(value).strip():
        raise ValueError("must be a path")
    return value


Flag = Annotated[bool, Strict()]
Number = Annotated[float, Strict(), AllowInfNan(False)]
NonNegative = Annotated[Number, Field(ge=0)]
Positive = Annotated[Number, Field(gt=0)]
Seconds = Positive
Fraction = Annotated[Number, Field(ge=0, lt=1)]
Integer = Annotated[int, BeforeValidator(_whole), Strict()]
Whole = Annotated[Integer, Field(ge=0)]
Count = Annotated[Integer, Field(ge=1)]
# Steps and positions are int32 in XLA.
Int32 = Annotated[Count, Field(lt=2**31)]
# jax and grain take the lower 32 bits of a seed: 2**32 would be 0.
Seed = Annotated[Whole, Field(lt=2**32)]
Text = Annotated[str, Field(min_length=1)]
Folder = Annotated[Path, BeforeValidator(_path), AfterValidator(Path.expanduser)]
