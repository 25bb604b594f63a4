"""Shared by the sections of gpu_check.py: settings, rows of results, and timing."""

import json
import shutil
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, TextIO

MIB = 2**20
GIB = 2**30


class Skipped(Exception):
    """A section, or a part of one, cannot run here. This is no failure."""


@dataclass(frozen=True)
class Setting:
    """Settings of one run of a section.

    Attributes:
        case, num_layers: contender, if the section has several, and size of its model.
        is_dry: tiny sizes on the CPU backend, to check that everything runs.
        seconds: time limit, from the start of the process.
        folder: folder on the drive to use.
        ram_bytes: bytes of host memory that may be used.
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
        """The GPU; in a dry run the default device of jax.

        Raises:
            Skipped: there is no GPU.
        """
        device = import_module("jax").devices()[0]
        if device.platform != "gpu" and not self.is_dry:
            raise Skipped(f"no GPU: the first of jax.devices() is {device}")
        return device


def imported(name: str) -> Any:
    """Imports a module that may be missing on this machine.

    Raises:
        Skipped: the module, or one that it imports, is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise Skipped(f"{name} cannot be imported: {error}") from error


@dataclass
class Rows:
    """Writes each row of a section at once, so that no row is lost if it crashes."""

    section: str
    file: TextIO
    ends: float = field(default=float("inf"))

    @property
    def seconds_left(self) -> float:
        return self.ends - time.monotonic()

    def add(
        self, name: str, value: Any, unit: str = "", note: str = "", **of: Any
    ) -> None:
        """Adds a row with one value; `of` names the parameters that were varied."""
        self._write(name=name, value=value, unit=unit, of=of, note=note)

    def add_all(
        self, name: str, values: list[float], unit: str, note: str = "", **of: Any
    ) -> None:
        """Adds a row with the median and the range of several measurements."""
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
        """Adds a row with the rates `amount / time`, for each of `times`."""
        self.add_all(name, [amount / seconds for seconds in times], unit, **of)

    def skip(self, name: str, reason: object, **of: Any) -> None:
        """Adds a row without a value, with the reason why it cannot be measured."""
        trace = ""
        if isinstance(reason, Exception) and not isinstance(reason, Skipped):
            reason, trace = f"{type(reason).__name__}: {reason}", _trace(reason)
        note = " ".join(f"skipped: {reason}".split())[:400]
        self._write(name=name, value=None, unit="", of=of, note=note, trace=trace)

    def fail(self, error: Exception) -> str:
        """Adds a row with the error that ended the section; returns its last line."""
        reason = f"{type(error).__name__}: {error}"
        note = " ".join(reason.split())[:2000]
        trace = _trace(error)
        self._write(name="failed", value=True, unit="", of={}, note=note, trace=trace)
        return note

    def attempt(
        self, name: str, function: Callable[[], None], **of: Any
    ) -> Exception | None:
        """Calls a function that adds rows; if it raises, adds a row with the error.

        For features that this jax, driver or machine may lack: an error is a result.
        Returns it, unless it says that something is left out.
        """
        if self.seconds_left <= 0:
            self.skip(name, "no time left", **of)
            return None
        try:
            function()
        except Skipped as reason:
            self.skip(name, reason, **of)
        except Exception as error:
            self.skip(name, error, **of)
            return error
        return None

    def end(self, status: str, reason: str, seconds: float) -> None:
        line = {"end": status, "reason": reason, "seconds": seconds}
        self._print({"section": self.section, **line})

    def _write(self, **row: Any) -> None:
        empty = {"low": None, "high": None, "repeats": 1, "note": "", "trace": ""}
        self._print({"section": self.section, **empty, **row})

    def _print(self, row: Mapping[str, Any]) -> None:
        print(json.dumps(row), file=self.file, flush=True)


def _trace(error: Exception) -> str:
    return "".join(traceback.format_exception(error))[-4000:]


def timed(
    call: Callable[[Any], object],
    prepare: Callable[[], Any] = lambda: None,
    *,
    seconds: float,
    most: int = 20,
) -> list[float]:
    """Seconds of each of at least 3 calls, for about `seconds`, after a warm-up call.

    `prepare` makes the argument of `call` and is not timed.
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
    """Free bytes of the drive, less a tenth of its size, which stays free."""
    usage = shutil.disk_usage(Path(folder))
    return int(usage.free - usage.total * 0.1)
