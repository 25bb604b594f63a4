"""Files of measured rates; a config may name one for predicting plan times."""

from dataclasses import asdict
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, model_validator

from zinf.core.plan import Link, Rates
from zinf.core.program import Tier
from zinf.core.text.complaint import naming


class RatesFile(BaseModel):
    """Measured rates of the links, devices and updates of a machine; see `Rates`.

    A rate that was not measured is the one with which the measured steps were planned.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True
    )

    measured: str
    """When, and on what machine."""

    link_bytes_per_second: dict[Link, PositiveFloat]
    """For each transfer link: nvme read, nvme write, h2d and d2h."""

    flops_per_second: PositiveFloat
    """Of the device, with flops as the compiler counts them."""

    update_bytes_per_second: dict[Tier, PositiveFloat]
    """Bytes of optimizer results per second, by the tier where updates run."""

    overhead_seconds: float = Field(ge=0)
    """Fixed time of each instruction."""

    exchange_bytes_per_second: PositiveFloat
    """Bytes per second that a device sends to other devices."""

    @model_validator(mode="after")
    def _has_all(self) -> Self:
        usual = Rates()
        missing: list[Link | Tier] = [
            *usual.link_bytes_per_second.keys() - self.link_bytes_per_second,
            *usual.update_bytes_per_second.keys() - self.update_bytes_per_second,
        ]
        if missing:
            raise ValueError(f"no rate of {', '.join(sorted(missing))}")
        return self

    @classmethod
    def of(cls, rates: Rates, measured: str) -> Self:
        return cls(measured=measured, **asdict(rates))

    @property
    def rates(self) -> Rates:
        return Rates(**self.model_dump(exclude={"measured"}))


def save_rates(rates: Rates, file: Path, measured: str) -> None:
    """Write a file of rates; an existing file is replaced.

    Args:
        measured: when the rates were measured, and on what machine.

    Raises:
        OSError: the file cannot be written; an existing one is unchanged.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_name(f"{file.name}.new")
    text = RatesFile.of(rates, measured).model_dump_json(indent=2) + "\n"
    with naming(fresh):
        fresh.write_text(text, encoding="utf-8")
    fresh.replace(file)


def load_rates(file: Path) -> Rates:
    """The rates in a file that `save_rates` wrote.

    Raises:
        ValueError: the file cannot be read, or is damaged.
    """
    advice = "Measure anew with `zinf bench step`, or remove `rates` from the config."
    try:
        return RatesFile.model_validate_json(file.read_text("utf-8")).rates
    except OSError as error:
        text = f"The file of measured rates cannot be read: {error}. {advice}"
        raise ValueError(text) from error
    except ValueError as error:
        raise ValueError(f"{file} is no file of rates: {error}. {advice}") from error
