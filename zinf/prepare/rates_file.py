"""Files of measured rates, which plans go by where a config names one."""

from dataclasses import asdict
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, model_validator

from zinf.plan import Link, Rates
from zinf.program import Tier


class RatesFile(BaseModel):
    """What links, devices and updates of a machine did; see `Rates`.

    Rates that nothing was measured of are those that the steps were planned with.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True
    )

    measured: str
    """When, and on what."""

    link_bytes_per_second: dict[Link, PositiveFloat]
    """Of the transfer links: nvme read, nvme write, h2d and d2h."""

    flops_per_second: PositiveFloat
    """Of the device, by the compiler's count."""

    update_bytes_per_second: dict[Tier, PositiveFloat]
    """Optimizer results written, by where updates run: device and host."""

    overhead_seconds: float = Field(ge=0)
    """Of any instruction."""

    exchange_bytes_per_second: PositiveFloat
    """Of a device, to others."""

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
    """Write a file, in place of one that is there; `measured` says when and on what.

    Raises:
        OSError: it cannot be written; what was there stays.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_name(f"{file.name}.new")
    fresh.write_text(
        RatesFile.of(rates, measured).model_dump_json(indent=2) + "\n", encoding="utf-8"
    )
    fresh.replace(file)


def load_rates(file: Path) -> Rates:
    """The rates in a file that `save_rates` wrote.

    Raises:
        ValueError: there is none, or it is damaged.
    """
    advice = "Measure anew with `zinf bench step`, or remove `rates` from the config."
    try:
        return RatesFile.model_validate_json(file.read_text("utf-8")).rates
    except OSError as error:
        text = f"The file of measured rates cannot be read: {error}. {advice}"
        raise ValueError(text) from error
    except ValueError as error:
        raise ValueError(f"{file} is no file of rates: {error}. {advice}") from error
