"""The record of a run: its config, package versions and planned figures.

`zinf train` writes the record as `run.json` when a run begins. `zinf report` draws it
with the metrics and the trace of the first steps, by default in the same folder.
"""

import os
import platform
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from zinf.core.config import Config, notices
from zinf.core.config.section import dotted
from zinf.core.plan import Plan
from zinf.core.process.installed import installed_version
from zinf.core.program import Tier
from zinf.core.text.complaint import naming

RUN, METRICS, TRACE = "run.json", "metrics.jsonl", "trace.json"
PACKAGES = (
    "zinf",
    "jax",
    "jaxlib",
    "optax",
    "flax",
    "numpy",
    "numba",
    "orbax-checkpoint",
    "tensorstore",
    "grain",
)


Bytes = Annotated[int, Field(ge=0, lt=2**63)]


class Held(BaseModel):
    """Bytes of one tier: at rest between steps, peak in a step, and budget."""

    model_config = ConfigDict(frozen=True)

    rest: Bytes
    peak: Bytes
    budget: Bytes


class RunRecord(BaseModel):
    """The content of `run.json`: what was run or planned, and by which versions.

    Attributes:
        title: the config file and the size of the model, in one line.
        begun: when the run began, in ISO 8601 with the zone; None for a plan.
        after_step: the step after which the run was resumed; 0 for a new run.
        num_tokens, num_steps: tokens per step, and steps in total.
        config: every key of the config, including those with their defaults.
        given: dotted keys that the file or the command line sets.
        notices: what a user should know of the config; one sentence each.
        resolved: the values that automatic settings received, by name.
        held: planned bytes by tier.
        predicted_seconds: predicted time of a step.
        has_measured_rates: the run measured its rates, or the config names a file of
            rates.
        decides: what the numbers of the run depend on, by dotted key, for a resumed run
            to compare; None in records of plans and of older versions.
        changes: settings that a resumed run changed, each {"after_step", "changed"}
            with the old and the new value of each key.
        metrics, trace: absolute paths of the metrics file and the trace file.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    title: str
    begun: str | None = None
    after_step: int = Field(default=0, ge=0)
    num_tokens: int
    num_steps: int
    config: dict[str, Any]
    given: list[str]
    notices: list[str]
    resolved: dict[str, str]
    held: dict[Tier, Held]
    predicted_seconds: float = Field(gt=0, allow_inf_nan=False)
    has_measured_rates: bool
    versions: dict[str, str]
    machine: dict[str, str]
    decides: dict[str, Any] | None = None
    changes: list[dict[str, Any]] = []
    metrics: Path | None = None
    trace: Path | None = None

    @field_validator("metrics", "trace")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        return path and path.absolute()

    @field_validator("held")
    @classmethod
    def _has_every_tier(cls, held: dict[Tier, Held]) -> dict[Tier, Held]:
        missing = [str(tier) for tier in Tier if tier not in held]
        if missing:
            raise ValueError(f"has no {', '.join(missing)}")
        return held

    @classmethod
    def of(
        cls,
        config: Config,
        plan: Plan,
        *,
        title: str,
        num_tokens: int,
        devices: str,
        has_measured_rates: bool,
        **of_run: Any,
    ) -> Self:
        """The record of a config and its plan, with the versions of this process.

        Args:
            devices: number and kind of the devices, such as "1 of cpu".
            of_run: the fields of a run: `begun`, `after_step`, `decides`, ...
        """
        return cls(
            title=title,
            num_tokens=num_tokens,
            num_steps=config.run.steps,
            config=config.model_dump(mode="json"),
            given=list(dotted(config.model_dump(mode="json", exclude_unset=True))),
            notices=list(notices(config)),
            resolved=_resolved(config, plan, devices),
            held={
                tier: Held(
                    rest=plan.home_bytes[tier],
                    peak=plan.peak_bytes[tier],
                    budget=plan.capacity_bytes[tier],
                )
                for tier in Tier
            },
            predicted_seconds=plan.timeline.seconds,
            has_measured_rates=has_measured_rates,
            versions=_versions(),
            machine=_machine(),
            **of_run,
        )

    def save(self, folder: Path) -> None:
        """Writes `run.json` into the folder of the run; replaces an earlier one.

        Raises:
            OSError: the file cannot be written; the earlier one is unchanged.
        """
        folder.mkdir(parents=True, exist_ok=True)
        fresh = folder / f"{RUN}.new"
        with naming(fresh):
            fresh.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
        fresh.replace(folder / RUN)


_ANEW = "zinf train CONFIG writes a new one; without resume it moves what is there."


def read_record(folder: Path) -> RunRecord:
    """The record in the folder of a run.

    Raises:
        FileNotFoundError: the folder has no `run.json`.
        ValueError: the file is damaged, or a later version wrote it.
    """
    path = folder / RUN
    try:
        return RunRecord.model_validate_json(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"{folder} has no {RUN}, which zinf train writes into the folder "
            "run.output of its config. Name that folder, or train again with this "
            "version."
        ) from None
    except ValidationError as error:
        found = "; ".join(
            f"{'.'.join(map(str, each['loc'])) or 'the file'}: {each['msg']}"
            for each in error.errors(include_url=False)
        )
        raise ValueError(f"{path} is damaged: {found}. {_ANEW}") from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}. {_ANEW}") from error


def _execution(plan: Plan) -> str:
    if plan.is_offloaded:
        return "one executable, state on the host"
    return "one executable" if plan.is_fused else "streamed by segments"


def _resolved(config: Config, plan: Plan, devices: str) -> dict[str, str]:
    samples = config.batch_size
    return {
        "execution": _execution(plan),
        "instructions of a step": f"{len(plan.instructions):,}",
        "dtype of computing": config.compute_dtype,
        "samples of a step": "as the batch has" if samples is None else f"{samples:,}",
        "microbatches of a step": f"{config.num_microbatches:,}",
        "devices": devices,
    }


def _versions() -> dict[str, str]:
    packages = {package: installed_version(package) for package in PACKAGES}
    return {"python": platform.python_version(), **packages}


def _machine() -> dict[str, str]:
    return {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "processors": str(os.cpu_count()),
    }
