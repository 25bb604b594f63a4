"""Lives of a run that learns from rewards, each but the last killed at a counted call.

    python -m tests.unit.rollouts.killed FOLDER

Prints, as JSON, how each life ended, and what each step said. A life is a fork of this
process, which has imported all and started no backend (`scripts/faults`).
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.unit.rollouts import test_rollouts as rig
from zinf.checkpoint import Checkpoints, durable
from zinf.core.config.grpo import Grpo
from zinf.core.engine.engine import Engine
from zinf.core.rollouts.asking import Call
from zinf.core.rollouts.texts import Told

STEPS = 6
# A rollout is for four steps, so that a life may begin within one.
SETTINGS = Grpo(
    num_generations=8,
    max_completion_length=6,
    num_iterations=2,
    steps_per_generation=2,
)
# Before which call of what a life ends: in a step within the first rollout, as the
# second is drawn, as it is rewarded, as a checkpoint gets its name, and before the
# texts of a step are written. "" is the last life.
INSTANTS: list[tuple[str, Any, str, int]] = [
    ("step", Engine, "step", 3),
    ("draw", Engine, "sample", 1),
    ("reward", Call, "__init__", 1),
    ("rename", durable, "_rename", 1),
    ("texts", Told, "after_step", 1),
    ("", None, "", 0),
]


def dies_at(owner: Any, name: str, number: int) -> None:
    """Have this process killed as a function is called for the nth time."""
    function, calls = getattr(owner, name), iter(range(1, number))

    def counted(*given: Any, **named: Any) -> Any:
        if next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*given, **named)

    setattr(owner, name, counted)


def life(folder: Path, instant: tuple[str, Any, str, int]) -> int:
    """Go on with the run in a folder; how the process ended."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        if instant[0]:
            dies_at(*instant[1:])
        run(folder)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    os._exit(code)


def run(folder: Path) -> None:
    seen = (folder / "seen.jsonl").open("a", encoding="utf-8", buffering=1)

    def tell(metrics: dict[str, Any]) -> None:
        told = [metrics["step"], *rig.numbers([metrics])]
        seen.write(json.dumps(told) + "\n")

    with Checkpoints(folder / "saved", keep=3) as checkpoints:
        rig.train(
            SETTINGS,
            STEPS,
            config={"compile_cache": str(folder.parent / "compiled")},
            checkpoints=checkpoints,
            texts=folder / "completions.jsonl",
            tell=tell,
        )


def main() -> None:
    found: dict[str, Any] = {}
    place = Path(sys.argv[1])
    for name, instants in {"whole": INSTANTS[-1:], "killed": INSTANTS}.items():
        folder = place / name
        folder.mkdir(parents=True)
        ended = {instant[0]: life(folder, instant) for instant in instants}
        lines = (folder / "seen.jsonl").read_text().splitlines()
        found[name] = {"ended": ended, "seen": [json.loads(line) for line in lines]}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
