"""Fine-tunes a model of the shape of Qwen3-0.6B within 2 GiB, by the command.

    python scripts/bench/bench_finetune.py --folder /mnt/nvme [--steps 3]

Writes the model with random weights in bfloat16, a tokenizer of words and a file of
texts, and then runs `zinf finetune` of all parameters, with masters and AdamW's state
in float32 on the drive. Printed are the seconds from the start of the command to the
end of its first step, and the most anonymous memory of its process. Of the budgets,
1.25 GiB are for the device: the embedding (297 MiB) is the head too, and is whole there
beside the sum of its gradients. With less it is read by tile.

Needs `zinf[hf]`, and 20 GB of free space.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from anonymous_memory import MemoryPeak

# https://huggingface.co/Qwen/Qwen3-0.6B/blob/main/config.json
SHAPE = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
WORDS = 2000


def write_model(folder: Path, **changed: Any) -> int:
    """Writes the model and its tokenizer; returns the number of parameters.

    Args:
        changed: entries of `SHAPE` that have other values.
    """
    import torch
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    config = transformers.Qwen3Config(**SHAPE | changed, eos_token_id=1, pad_token_id=2)
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    names = ["<unk>", "</s>", "<pad>", *(f"w{i}" for i in range(WORDS))]
    vocabulary = {name: number for number, name in enumerate(names)}
    words = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    ends = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, **ends
    ).save_pretrained(folder)
    return sum(x.numel() for x in model.parameters())


def write_texts(path: Path, options: argparse.Namespace) -> None:
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for _ in range(options.samples * options.steps):
            words = rng.integers(0, WORDS, options.tokens - 1)
            text = " ".join(f"w{word}" for word in words)
            file.write(json.dumps({"text": text}) + "\n")


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="zinf-tune-") as name:
        place = Path(name)
        # In a process of its own, so that none of its memory is there later.
        command = [sys.executable, __file__, "--write", str(place / "model")]
        subprocess.run(command, check=True)
        write_texts(place / "texts.jsonl", options)
        tune(place, options)


def tune(place: Path, options: argparse.Namespace) -> None:
    given = {
        "data": place / "texts.jsonl",
        "output": place / "tuned",
        "nvme": place / "tier",
        "steps": options.steps,
        "samples": options.samples,
        "sequence-length": options.tokens,
    }
    command = [sys.executable, "-m", "zinf", "finetune", str(place / "model")]
    for key, value in given.items():
        command += [f"--{key}", str(value)]
    budgets = f"memory.device={options.device}", f"memory.host={options.host}"
    for setting in (*budgets, "run.log_every=1"):
        command += ["--set", setting]
    root = Path(__file__).parents[2]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
    began = time.perf_counter()
    ran = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    peak, steps = MemoryPeak(ran.pid), []
    assert ran.stdout is not None
    for line in ran.stdout:
        print(line, end="", flush=True)
        if line.startswith("step "):
            steps.append(time.perf_counter() - began)
    peak.stop()
    if ran.wait():
        raise SystemExit(ran.returncode)
    ended = time.perf_counter() - began
    print(f"\nload {os.getloadavg()[0]:.1f}")
    print(f"first step after {steps[0]:.1f} s, written after {ended:.1f} s")
    later = np.diff(steps)
    if len(later):
        print(f"later steps: {np.median(later):.1f} s, median of {len(later)}")
    print(f"most anonymous memory: {peak.nbytes() / 2**30:.2f} GiB")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", help="on the drive; a temporary folder by default")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--samples", type=int, default=1, help="of a step")
    parser.add_argument("--tokens", type=int, default=64, help="of a sample")
    parser.add_argument("--device", default="1280MiB", help="budget")
    parser.add_argument("--host", default="720MiB", help="budget")
    return parser.parse_args()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write"]:
        print(f"{write_model(Path(sys.argv[2])):,} parameters")
    else:
        main()
