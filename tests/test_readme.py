"""The README is short, and its example does what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
# About 900 words are read in five minutes; the rest is in the packages' READMEs.
MOST_WORDS = 1000


def blocks(language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return [text for found, text in fenced if found == language]


def operations(plan: str) -> list[str]:
    """What each instruction of a printed plan does, without bytes and times."""
    rows = re.findall(r"^ *\d+  (.*)$", plan, re.MULTILINE)
    return [re.split(r" {2,}(?=[\d.])", row)[0] for row in rows]


def test_the_readme_is_read_in_five_minutes():
    assert len(README.split()) <= MOST_WORDS


def test_the_example_trains_and_prints_the_plan_that_is_shown(tmp_path):
    (example,) = blocks("python")
    (shown,) = blocks("")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", example]
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    plan, losses = ran.stdout.splitlines()[:-20], ran.stdout.splitlines()[-20:]
    # The comment beside the call, to its two digits.
    assert f"{float(losses[0]):.2f} in the first step" in example
    assert f"{float(losses[-1]):.2f} in the last" in example
    printed = operations("\n".join(plan))
    assert operations(shown)
    assert [row for row in operations(shown) if row not in printed] == []
