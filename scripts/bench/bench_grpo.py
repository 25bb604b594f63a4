"""Steps of GRPO of a model of the shape of SmolLM2-135M, by zinf and by TRL.

    python scripts/bench/bench_grpo.py [--trl-python VENV/bin/python] [--folder PATH]
        [--layers 30] [--vocab 49152] [--tokens 32] [--steps 2] [--turns 1]

The model has random weights, written once. Both sides train all parameters in float32
with AdamW from rewards, with the same settings: 8 completions of each of some prompts,
of `--tokens` tokens, one prompt a step, TRL's defaults otherwise. They draw by other
keys, so texts differ; no text ends early, so the work does not. The contenders:

    trl            TRL's GRPOTrainer on torch
    zinf           zinf.hf.GRPOTrainer with all in memory
    zinf-budgets   the same within budgets, with AdamW's moments on the drive

They run one after another, each in a process of its own, and the other way round in
every second turn. A step is from the end of the one before to its own end: draws,
rewards and update; the first one compiles, and is given apart. Memory is the most
anonymous memory of the process (`anonymous_memory.py`).

The interpreter of TRL needs `trl` (1.16.0 was measured), torch and `transformers`; this
one needs `zinf[hf]`.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from anonymous_memory import MemoryPeak

# https://huggingface.co/HuggingFaceTB/SmolLM2-135M/blob/main/config.json
SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
PROMPT, GROUP = 8, 8
COMMON = {
    "learning_rate": 1e-6,
    "lr_scheduler_type": "constant",
    "num_generations": GROUP,
    "per_device_train_batch_size": GROUP,
    "logging_steps": 1,
    "bf16": False,
}
CONTENDERS = ("trl", "zinf", "zinf-budgets")


def write_model(folder: Path, layers: int, vocab: int) -> int:
    """Writes the model and a tokenizer of words; returns the number of parameters."""
    import torch
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    changed = {"num_hidden_layers": layers, "vocab_size": vocab}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE | changed))
    model.save_pretrained(folder)
    names = ["<s>", "</s>", "<pad>", *(f"w{i}" for i in range(vocab - 3))]
    ids = {name: number for number, name in enumerate(names)}
    words = Tokenizer(WordLevel(ids, unk_token="<s>"))
    words.pre_tokenizer = WhitespaceSplit()
    ends = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **ends)
    fast.save_pretrained(folder)
    return sum(x.numel() for x in model.parameters())


def prompts(count: int) -> list[dict[str, str]]:
    words = [[f"w{7 * n + i}" for i in range(PROMPT)] for n in range(count)]
    return [{"prompt": " ".join(each)} for each in words]


def evens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(t % 2 == 0 for t in ids) / len(ids) for ids in completion_ids]


def run_trl(model: str, output: str, options: argparse.Namespace) -> None:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Tells(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            print(f"step {state.global_step}", flush=True)

    args = GRPOConfig(
        output_dir=output,
        max_steps=options.steps,
        max_completion_length=options.tokens,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **COMMON,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=evens,
        args=args,
        train_dataset=Dataset.from_list(prompts(options.steps)),
        callbacks=[Tells()],
    )
    trainer.train()
    for line in trainer.state.log_history:
        if "reward" in line:
            print(f"told {line['completions/mean_length']:g} tokens", flush=True)


def run_zinf(
    model: str, output: str, options: argparse.Namespace, config: dict[str, Any]
) -> None:
    import zinf

    zinf.tune_malloc()  # As the command does.
    args = zinf.hf.GRPOConfig(
        output_dir=output,
        max_steps=options.steps,
        max_completion_length=options.tokens,
        **COMMON,
    )
    rows = prompts(options.steps)
    made = {"model": model, "reward_funcs": evens, "args": args, "train_dataset": rows}
    with zinf.hf.GRPOTrainer(**made, config=config) as trainer:
        print(trainer.engine.plan.summary(), flush=True)
        trainer.train()
    for line in (Path(output) / "metrics.jsonl").read_text().splitlines():
        told = json.loads(line)
        parts = {n: x for n, x in told.items() if n.endswith("seconds")}
        print(f"told {told['completions/mean_length']:g} tokens", parts, flush=True)


def budgets(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    tiers = {"device": options.device, "host": options.host, "nvme": str(place)}
    return {"memory": tiers, "zero_optimization": {"stage": 3}}


def one(name: str, model: str, place: Path, options: argparse.Namespace) -> None:
    """What a contender does, in this process."""
    output = str(place / "out")
    if name == "trl":
        run_trl(model, output, options)
        return
    in_memory = {"execution": "fused"}
    config = in_memory if name == "zinf" else budgets(options, place / "tier")
    run_zinf(model, output, options, config)


def measure(name: str, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of steps, and bytes, of a contender in a process of its own."""
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="zinf-grpo-") as place:
        python = options.trl_python if name == "trl" else sys.executable
        command = [python, __file__, *sys.argv[1:]]
        command += ["--one", name, "--model", str(model), "--place", place]
        root = str(Path(__file__).parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": ":".join(paths)}
        began = time.perf_counter()
        ran = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        peak, ends = MemoryPeak(ran.pid), [began]
        assert ran.stdout is not None
        for line in ran.stdout:
            print(f"{name}: {line}", end="", flush=True)
            if line.startswith("step "):
                ends.append(time.perf_counter())
        peak.stop()
        if ran.wait():
            raise SystemExit(f"{name} ended with {ran.returncode}.")
    seconds = [b - a for a, b in zip(ends, ends[1:], strict=False)]
    return {"first": seconds[0], "later": seconds[1:], "bytes": peak.nbytes()}


def main() -> None:
    options = parse()
    if options.one is not None:
        one(options.one, options.model, Path(options.place), options)
        return
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="zinf-grpo-") as place:
        model = Path(place) / "model"
        command = [sys.executable, __file__, *sys.argv[1:], "--write", str(model)]
        subprocess.run(command, check=True)
        found: dict[str, list[dict[str, Any]]] = {n: [] for n in options.contenders}
        for turn in range(options.turns):
            for name in options.contenders[:: 1 if turn % 2 == 0 else -1]:
                found[name].append(measure(name, model, options))
    tell(found)


def tell(found: dict[str, list[dict[str, Any]]]) -> None:
    names = ("jax", "torch", "transformers")
    versions = [f"{name} {version(name)}" for name in names]
    print(
        f"\n{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:g}"
    )
    print(", ".join(versions))
    for name, turns in found.items():
        later = [s for turn in turns for s in turn["later"]]
        span = f"{min(later):.2f} to {max(later):.2f}" if later else "none"
        peak = max(turn["bytes"] for turn in turns) / 2**30
        middle = median(later) if later else float("nan")
        first = median(turn["first"] for turn in turns)
        print(
            f"{name}: {middle:.2f} s a step ({span}, {len(later)}), first after "
            f"{first:.1f} s, most anonymous memory {peak:.2f} GiB"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trl-python", default=sys.executable)
    parser.add_argument("--folder", help="on the drive; a temporary folder by default")
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--vocab", type=int, default=SHAPE["vocab_size"])
    parser.add_argument("--tokens", type=int, default=32, help="of a completion")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--device", default="1100MiB", help="budget of zinf-budgets")
    parser.add_argument("--host", default="256MiB", help="budget of zinf-budgets")
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS)
    for name in ("one", "model", "place", "write"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write is not None:
        size = write_model(Path(options.write), options.layers, options.vocab)
        raise SystemExit(print(f"{size:,} parameters"))
    return options


if __name__ == "__main__":
    main()
