"""What the sections of gpu_check.py share: their setting, their rows, their clock."""

import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, TextIO

MIB = 2**20
GIB = 2**30


class Skipped(Exception):
    """Why a section, or a part of one, did not run; no failure."""


@dataclass(frozen=True)
class Setting:
    """What one run of a section is told.

    Attributes:
        case, num_layers: which contender of a section that has several, and how large.
        is_dry: tiny sizes on the CPU backend, to see that everything runs.
        seconds: how long it may take, from when its process starts.
        folder: on the drive to use.
        ram_bytes: of this machine, as far as it may be used.
        given: rates that earlier sections measured, by name.
    """

    section: str
    case: str
    num_layers: int
    is_dry: bool
    seconds: float
    folder: str
    ram_bytes: int
    given: Mapping[str, float]

    @classmethod
    def from_json(cls, text: str) -> "Setting":
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def device(self) -> Any:
        """The GPU; in a dry run whatever jax has.

        Raises:
            Skipped: there is no GPU.
        """
        device = import_module("jax").devices()[0]
        if device.platform != "gpu" and not self.is_dry:
            raise Skipped(f"no GPU: the first of jax.devices() is {device}")
        return device


def imported(name: str) -> Any:
    """A module that the machine may lack.

    Raises:
        Skipped: it, or something that it imports, is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise Skipped(f"{name} cannot be imported: {error}") from error


@dataclass
class Rows:
    """Writes what a section finds, row by row, so that nothing is lost if it dies."""

    section: str
    file: TextIO
    ends: float = field(default=float("inf"))

    @property
    def seconds_left(self) -> float:
        return self.ends - time.monotonic()

    def add(
        self, name: str, value: Any, unit: str = "", note: str = "", **of: Any
    ) -> None:
        """One figure; `of` says what was varied."""
        self._write(name=name, value=value, unit=unit, of=of, note=note)

    def add_all(
        self, name: str, values: list[float], unit: str, note: str = "", **of: Any
    ) -> None:
        """What was measured several times: the median and the range."""
        self._write(
            name=name,
            value=median(values),
            unit=unit,
            of=of,
            note=note,
            low=min(values),
            high=max(values),
            repeats=len(values),
        )

    def add_rate(
        self, name: str, amount: float, times: list[float], unit: str, **of: Any
    ) -> None:
        """`amount` over each of `times`."""
        self.add_all(name, [amount / seconds for seconds in times], unit, **of)

    def skip(self, name: str, reason: object, **of: Any) -> None:
        """A figure that cannot be had here, and why."""
        note = " ".join(f"skipped: {reason}".split())[:400]
        self._write(name=name, value=None, unit="", of=of, note=note)

    def attempt(self, name: str, function: Callable[[], None], **of: Any) -> None:
        """Calls what adds a row; if it cannot, the row says why.

        For paths that may be unknown to this jax, driver or machine: that is a result.
        """
        if self.seconds_left <= 0:
            self.skip(name, "no time left", **of)
            return
        try:
            function()
        except Skipped as reason:
            self.skip(name, reason, **of)
        except Exception as error:
            self.skip(name, f"{type(error).__name__}: {error}", **of)

    def end(self, status: str, reason: str, seconds: float) -> None:
        line = {"end": status, "reason": reason, "seconds": seconds}
        self._print({"section": self.section, **line})

    def _write(self, **row: Any) -> None:
        empty = {"low": None, "high": None, "repeats": 1, "note": ""}
        self._print({"section": self.section, **empty, **row})

    def _print(self, row: Mapping[str, Any]) -> None:
        print(json.dumps(row), file=self.file, flush=True)


def timed(
    call: Callable[[Any], object],
    prepare: Callable[[], Any] = lambda: None,
    *,
    seconds: float,
    most: int = 20,
) -> list[float]:
    """Seconds of each call, after one that warms up: at least 3, for about `seconds`.

    `prepare` makes what `call` gets, and is not timed.
    """
    call(prepare())
    times: list[float] = []
    while len(times) < 3 or (sum(times) < seconds and len(times) < most):
        given = prepare()
        began = time.perf_counter()
        call(given)
        times.append(time.perf_counter() - began)
    return times


def free_bytes(folder: str) -> int:
    """What may be written to the drive, with a tenth of it left alone."""
    usage = shutil.disk_usage(Path(folder))
    return int(usage.free - usage.total * 0.1)
