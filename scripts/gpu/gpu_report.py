"""Results of the sections of gpu_check.py, and how they are printed."""

from dataclasses import dataclass, field
from typing import Any

# Rows whose rates are passed to later sections, and the name that the rate has there.
GIVEN = {"h2d": "h2d", "d2h": "d2h", "matmul": "device", "mixed": "drive"}
LINKS = (*GIVEN.values(), "host")


@dataclass
class Result:
    """The result of one section."""

    section: str
    case: str
    num_layers: int
    status: str = "failed"
    reason: str = ""
    seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)

    def find(self, name: str) -> Any:
        """The value of the first row with this name, or None."""
        return next((row["value"] for row in self.rows if row["name"] == name), None)


def given(results: list[Result]) -> dict[str, float]:
    """The highest measured rate of each link, with which steps are compared."""
    found: dict[str, float] = {}
    for row in (row for result in results for row in result.rows):
        name = GIVEN.get(row["name"])
        is_adam = row["name"] == "adam" and row["of"].get("by") in ("zinf", "optax")
        name = "host" if is_adam else name
        if name is not None and row["value"] is not None:
            found[name] = max(found.get(name, 0.0), row["value"])
    return found


def table(result: Result) -> str:
    lines = [f"\n{_title(result)}: {result.status}, {result.seconds:.1f} s"]
    if result.reason:
        lines.append(f"  {result.reason}")
    for row in result.rows:
        of = ", ".join(f"{k} {_shown(v)}" for k, v in row["of"].items())
        value = "" if row["value"] is None else f"{_shown(row['value'])} {row['unit']}"
        if row["repeats"] > 1:
            low, high = _shown(row["low"]), _shown(row["high"])
            value += f" ({low} to {high}, {row['repeats']})"
        name = row["name"]
        lines.append(f"  {name:24} {of:46} {value}  {row['note']}".rstrip())
    return "\n".join(lines)


def summary(results: list[Result]) -> str:
    lines = ["\nsummary"]
    for result in results:
        title = _title(result)
        why = f"  {result.reason.splitlines()[-1][:120]}" if result.reason else ""
        lines.append(f"  {title:28} {result.status:8} {result.seconds:6.1f} s{why}")
    for name, rate in given(results).items():
        lines.append(f"  best rate seen: {name} {_shown(rate)}")
    for result in results:
        if result.find("step") is not None or result.find("out of memory"):
            shown = [f"{_shown(result.find('parameters'))} G parameters"]
            for name in ("step", "tokens", "MFU", "bound", "step / bound"):
                if result.find(name) is not None:
                    shown.append(f"{name} {_shown(result.find(name))}")
            if result.find("out of memory"):
                shown.append("out of memory")
            lines.append(f"  {_title(result)}: {', '.join(shown)}")
    return "\n".join(lines)


def _title(result: Result) -> str:
    if result.case in ("", result.section):
        return result.section
    is_beside = result.section == "largest" and result.case == "plain"
    beside = ", plain JAX" if is_beside else ""
    return f"{result.section}, {result.num_layers} layers{beside}"


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
