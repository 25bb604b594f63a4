"""`zinf plan --rl`: what a run from rewards costs, without weights."""

from pathlib import Path

import pytest

from tests.command import run
from tests.unit.hf.models import judge, model_folder

from zinf import hf  # isort: skip
from zinf.cli.errors import DOES_NOT_FIT  # isort: skip
from zinf.cli.foresight import rewards_config  # isort: skip
from zinf.core.config.load import override  # isort: skip
from zinf.core.machine.devices import on_devices  # isort: skip
from zinf.core.program import Tier  # isort: skip
from zinf.inference import Pace  # isort: skip

QUICKSTART = Path(__file__).parents[3] / "configs/quickstart.yaml"
LENGTHS = ("--prompt-length", 8, "--max-new-tokens", 8, "--samples", 16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "adapter"), [("grpo", 0), ("synced", 0), ("ppo", 0), ("ppo", 4)]
)
def test_what_is_planned_is_what_a_run_has(objective, adapter, tmp_path):
    """The same plan of a step, within what the frozen models are to hold."""
    folder, is_synced = model_folder(tmp_path), objective == "synced"
    judge(tmp_path / "judge")
    objective = "grpo" if is_synced else objective
    penalty = {"grpo": "grpo.beta=0.1", "ppo": "ppo.kl_coef=0.1"}[objective]
    given = [f"data.objective={objective}", penalty, "bf16.enabled=false"]
    given += [f"{objective}.rewards=[{tmp_path / 'judge'}]", "compile_cache=false"]
    given += [f"adapter.r={adapter}"] * (adapter > 0)
    given += ["grpo.sync_ref_model=true"] * is_synced
    given += ["memory.device=1GiB", "memory.host=1GiB"]
    length = {"grpo": "max_completion_length", "ppo": "response_length"}[objective]
    given += [f"{objective}.{length}=8", "data.sequence_length=16"]
    raw = override(rewards_config(str(folder), given, 16), given)
    config, mesh = on_devices(raw)
    task = hf.Task(config)
    found = hf.foresee(task, mesh, None, Pace(), prompt_length=8)
    engine = task.engine(mesh)
    try:
        has_copy = not adapter and not is_synced
        opened = [engine.reference.frozen] if has_copy else []
        opened.append(engine.judges[0].frozen)
        assert [x.title for x in found.frozen] == [x.title for x in opened]
        for planned, real in zip(found.frozen, opened, strict=True):
            for tier in Tier:
                assert planned.held_bytes[tier] <= real.held_bytes[tier]
                # Weights are read in parts, which a plan does not count.
                assert real.held_bytes[tier] < 2**20
        assert found.made.plan.homes == engine.plan.homes
    finally:
        engine.close()
    # The adapters are of the model in training alone.
    assert engine.judges[0].frozen.engine.adapted is None
    asks = {"the model in training", "the reward model judge"}
    asks.add("the reference (the base)" if adapter else "the reference")
    asks |= {"the critic"} if objective == "ppo" else set()
    assert {x.title for x in found.scorings} == asks
    assert all(x.seconds > 0 for x in found.scorings)
    times = found.num_steps / (4 if objective == "ppo" else 1)
    assert found.drawn == 16 and times == 1


@pytest.mark.slow
def test_a_table_says_what_each_model_holds_or_what_does_not_fit(tmp_path):
    folder = model_folder(tmp_path)
    judge(tmp_path / "judge")
    common = ("plan", "--rl", "--model", folder, *LENGTHS)
    rewards = ("--set", f"grpo.rewards=[{tmp_path / 'judge'}]")
    text = run(*common, *rewards, "--set", "grpo.beta=0.1").stdout
    for part in (
        "the reference ",
        "the reward model judge ",
        "the model in training ",
        "generation ",
        "scores of the reference ",
        "draws 16 completions of 8 tokens after prompts of 8",
    ):
        assert part in text, text
    budgets = ("--set", "memory.device=1MiB", "--set", "memory.host=100KB")
    found = run(*common, "--set", "grpo.beta=0.1", *budgets, code=DOES_NOT_FIT)
    assert "does not fit: The host budget is" in found.stdout + found.stderr
    found = run("plan", "--rl", QUICKSTART, code=2)
    assert "--rl is for a config with data.objective grpo or ppo" in found.stderr
