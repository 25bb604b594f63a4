"""What a process of a run does that generates: the GPT of `tests.unit.inference`.

It prints the texts and their log-probabilities of each call as a line of JSON.
"""

import json
import os
from pathlib import Path
from typing import Any

import jax

from tests.tiers import streamed
from zinf.distributed import AbstractGroup, Flags, Limits, find_seat, join
from zinf.inference import Scores, prompt_lookup

MIXTURE = {"num_experts": 8, "experts_per_token": 2}
CASES: tuple[tuple[dict[str, int], str, dict[str, Any]], ...] = (
    ({"fsdp": 4}, "nvme", {}),
    ({"fsdp": 2, "tensor": 2}, "none", {}),
    ({"fsdp": 1, "expert": 4}, "cpu", MIXTURE),
)


def texts(number: int, folder: Path, group: AbstractGroup | None = None) -> str:
    """Tokens and log-probabilities of all calls of a case, as JSON."""
    # It draws keys, before which processes must have joined.
    from tests.unit.inference import generating as given

    mesh, tier, shape = CASES[number]
    # Prompts that join later, and are copied; one, which devices cannot divide.
    calls: tuple[dict[str, Any], ...] = (
        {"prompts": given.PROMPTS * 3, "batch_size": 4, **given.DRAWN},
        {"prompts": given.PROMPTS[:1], "drafts": prompt_lookup(3)},
    )
    rest = {
        "max_new_tokens": 5,
        "rows": 2,
        "scores": Scores(),
        "key": jax.random.key(3),
    }
    config = streamed(tier, folder, segment={}, mesh=mesh)
    with given.make_engine(config, group=group, **shape) as engine:
        before = given.used_bytes(engine)
        found = [text for call in calls for text in engine.generate(**rest | call)]
        assert given.used_bytes(engine) == before
    return json.dumps([[x.tokens, x.log_probabilities.tolist()] for x in found])


def main(
    at: str, index: str, count: str, num_devices: str, folder: str, *numbers: str
) -> None:
    """The cases with these numbers."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={num_devices}"
    seat = find_seat(Flags(at, int(count), int(index)), {})
    with join(seat, Limits(join_seconds=40.0)) as group:
        for number in map(int, numbers):
            print(texts(number, Path(folder), group), flush=True)
