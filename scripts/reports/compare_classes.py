"""Draws tests/unit/hf/compared.json: which causal classes agree with torch.

A tiny model of each class of transformers is compared as `zinf.hf.comparison` does it,
in a process of its own with a time limit. Classes that the table has for the installed
versions are left out, so the script goes on where it was stopped. All that are missing,
and then two anew:

    nice -n 10 python scripts/reports/compare_classes.py
    nice -n 10 python scripts/reports/compare_classes.py llama opt
"""

import json
import os
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from zinf.hf.comparison import NOT_COMPARED, NOT_TINY, compare, versions
from zinf.hf.tiny import tiny

TABLE = Path(__file__).parents[2] / "tests/unit/hf/compared.json"
# Classes that tests compare with torch as well; they come last.
TESTED = json.loads(TABLE.with_name("architectures.json").read_text())
AUTO_CLASS = "AutoModelForCausalLM"
LIMIT_SECONDS = 300
SMALL = {"vocab_size": 96, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
Row = dict[str, str]


def unknown(state: str, reason: str) -> Row:
    return {"verdict": state, "reason": " ".join(reason.split())[:200]}


NOT_DRAWN = unknown(NOT_COMPARED, "not drawn yet")


def row(name: str) -> Row:
    """What the table says of a class, by its model_type."""
    torch.set_num_threads(1)
    given, found = TESTED.get(name, {}), NOT_DRAWN
    # Some classes have no complete defaults.
    for values in ({}, given.get("whole", SMALL | given)):
        try:
            config = tiny(transformers.CONFIG_MAPPING[name](**values))
        except Exception as error:
            found = unknown(NOT_TINY, f"{type(error).__name__}: {error}")
            continue
        verdict = compare(config, AUTO_CLASS)
        if not verdict.reason:
            figures = f"{verdict.logits:.1e}", f"{verdict.gradients:.1e}"
            numbers = dict(zip(("logits", "gradients"), figures, strict=True))
            return {"verdict": verdict.state, **numbers}
        found = unknown(verdict.state, verdict.reason)
        if verdict.state != NOT_TINY:
            return found
    return found


def apart(name: str) -> Row:
    """`row` in a process of its own."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        try:
            found = row(name)
        except BaseException as error:
            found = unknown(NOT_COMPARED, f"{type(error).__name__}: {error}")
        os.write(write, json.dumps(found).encode())
        os._exit(0)
    os.close(write)
    end = time.monotonic() + LIMIT_SECONDS
    while not os.waitpid(child, os.WNOHANG)[0]:
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return unknown(NOT_COMPARED, f"it took over {LIMIT_SECONDS} s")
        time.sleep(0.1)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    return json.loads(text) if text else unknown(NOT_COMPARED, "its process died")


def save(rows: dict[str, Row]) -> None:
    lines = [f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(rows.items())]
    date = datetime.now(UTC).date().isoformat()
    TABLE.write_text(
        f'{{\n  "date": "{date}",\n  "versions": "{versions()}",\n  "classes": {{\n'
        + ",\n".join(lines)
        + "\n  }\n}\n"
    )


def main(asked: list[str]) -> None:
    names = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, key=lambda n: (n in TESTED, n))
    rows = dict.fromkeys(names, NOT_DRAWN)
    if TABLE.is_file():
        found = json.loads(TABLE.read_text())
        if found["versions"] == versions():
            rows |= found["classes"]
    for name in asked or [name for name in names if rows[name] == NOT_DRAWN]:
        rows[name] = apart(name)
        print(name, rows[name], flush=True)
        save(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
