"""Generates with `accelerate`'s disk offload, for bench_generate.py.

Called by that script with one argument, its settings as JSON. Imports no zinf: the
interpreter needs torch, transformers and accelerate alone.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from served import answer, answer_texts


def load(settings: dict[str, Any]) -> Any:
    """The model, of which what has no room in `cpu` bytes is read at each use."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        settings["model"],
        dtype=torch.float32,
        device_map="auto",
        max_memory={"cpu": settings["cpu"].replace("iB", "IB")},
        offload_folder=settings["folder"],
    ).eval()


def drop(folders: list[Path]) -> None:
    """Drops the files of folders from the page cache."""
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file():
                file = os.open(path, os.O_RDONLY)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(file)


def main() -> None:
    settings = json.loads(sys.argv[1])
    model = load(settings)
    if settings["evicts"]:
        folders = [Path(settings["model"]), Path(settings["folder"])]
        model.register_forward_pre_hook(lambda *_: drop(folders))
    prompts = torch.tensor(np.load(settings["prompts"]))
    places = {str(place) for place in model.hf_device_map.values()}
    answer({"homes": sorted(places)})
    answer_texts(model, prompts, settings["tokens"])


if __name__ == "__main__":
    main()
