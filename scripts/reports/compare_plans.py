"""Plans with two trees of zinf: are the plans equal, and what does each take?

    python scripts/reports/compare_plans.py BEFORE AFTER \\
        configs/quickstart.yaml "--model 70b/config.json --set memory.nvme=/data"

`BEFORE` and `AFTER` are checkouts. Each case has the arguments of one `zinf plan`. It
runs in the checkouts in turn, in processes of their own. Plans are equal if all their
instructions (order, arrays, tiers, bytes, what each waits for), homes and bytes are. A
case may name several configs: instructions and seconds a step are then sums. Processor
seconds and resident memory are those of the process; other work on the machine makes
the seconds longer, in both trees.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

# Runs in a process of its own, in the checkout. Prints one line of JSON at its end.
WORKER = """
import contextlib, hashlib, io, json, os, resource, sys
import zinf
from zinf.cli.entry import main

zinf.initialize  # Imports the planner, which trees have under different names.
names = [n for n in sys.modules if n.startswith("zinf.") and n.endswith(".planner")]
Planner = sys.modules[names[0]].Planner

made = []
plan_batch = Planner.plan_batch
def kept(planner, batch):
    made.append(plan_batch(planner, batch))
    return made[-1]
Planner.plan_batch = kept
sys.argv = ["zinf", "plan", *sys.argv[1:]]
said = io.StringIO()
code = 0
with contextlib.redirect_stdout(said):
    try:
        main()
    except SystemExit as ended:
        code = ended.code
used = resource.getrusage(resource.RUSAGE_SELF)
found = {
    "code": code,
    "seconds": used.ru_utime + used.ru_stime,
    "gib": used.ru_maxrss / 2**20,
}
if made:
    text = hashlib.sha256()
    plans = [each.plan for each in made]
    for plan in plans:
        for line in plan.instructions:
            text.update(repr(line).encode())
        homes = sorted((str(a), str(t)) for a, t in plan.homes.items())
        # Not budgets: that of a drive is what is free on it, which changes.
        rest = homes, plan.home_bytes, plan.peak_bytes, plan.why
        text.update(repr(rest).encode())
    found |= {
        "digest": text.hexdigest(),
        "instructions": sum(len(plan.instructions) for plan in plans),
        "step_seconds": sum(plan.timeline.seconds for plan in plans),
    }
else:
    found["digest"] = hashlib.sha256(said.getvalue().encode()).hexdigest()
print(json.dumps(found), file=sys.__stdout__)
"""


def planned(tree: Path, case: str) -> dict[str, Any]:
    """What the worker says of one case in one tree.

    Raises:
        SystemExit: the worker failed; its message is that of the command.
    """
    environment = {**os.environ, "PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", WORKER, *shlex.split(case)],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{tree}: zinf plan {case}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("cases", nargs="+", help="arguments of `zinf plan`")
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    trees = given.before.resolve(), given.after.resolve()
    print("plans | instructions | s a step | processor s | GiB | case")
    all_equal = True
    for case in given.cases:
        runs = [[planned(t, case) for t in trees] for _ in range(given.rounds)]
        digests = {run["digest"] for pair in runs for run in pair}
        all_equal &= len(digests) == 1
        before, after = zip(*runs, strict=True)
        columns = ("instructions", "{}"), ("step_seconds", "{:.6g}")
        columns += ("seconds", "{:.1f}"), ("gib", "{:.3f}")
        cells = ["equal" if len(digests) == 1 else "DIFFER"]
        for key, form in columns:
            values = (
                median(run.get(key, 0) for run in runs) for runs in (before, after)
            )
            cells.append(" -> ".join(map(form.format, values)))
        print(" | ".join([*cells, case]), flush=True)
    raise SystemExit(0 if all_equal else 1)


if __name__ == "__main__":
    main()
