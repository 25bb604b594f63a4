r"""Opens or quantizes a checkpoint folder that is larger than the memory it may take.

    python scripts/bench/bench_import.py --folder /mnt/nvme [--modes run lora]
    python scripts/bench/bench_import.py --folder /mnt/nvme --form experts --modes run
    python scripts/bench/bench_import.py --folder /mnt/nvme --modes lkd \
        --num-layers 22 --hidden-size 2048 --intermediate-size 5632 --num-kv-heads 4 \
        --tokens 64 --device 320MiB --host 192MiB

Writes a model as sharded safetensors of about 8 GB: random numbers, drawn once and
taken from a random place for each tensor. --form is one of

* `llama`: of --num-layers and other sizes, in bfloat16;
* `experts`: a Qwen3-MoE of --num-layers with tensors of each expert, in bfloat16;
* `fp8`: the same in float8 with scales of blocks, half the bytes;
* `stacked`: a gpt-oss, experts of a layer in one tensor, in bfloat16;
* `mxfp4`: the same in blocks of mxfp4, about a quarter of the bytes.

Each mode then runs in a process of its own, all weights on the drive:

* `run`: `zinf.hf.open_model`, which has no optimizer state;
* `lora`: `zinf.hf.initialize` with adapters of rank 16 and AdamW, and a step;
* `gptq`, `lkd`: `zinf.hf.quantize` to 4 bits by one row of tokens, lkd in --steps.

Files are dropped from the page cache before. Memory is the most anonymous memory of the
process (`anonymous_memory.py`) over what it had when all modules were imported. "moved"
is the time from the first weight to the last, in which each byte is read
from a file and written to the tier; the bound copies as many bytes between two files
with O_DIRECT, before and after. "processor" are seconds of that part.

Needs `zinf[hf]`, and as much free space as three times the weights; lkd, eight times.
"""

import argparse
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from anonymous_memory import MemoryPeak

BLOCK, THREADS = 2**22, 8
DRAWN = 2**26
HEAD_DIM, FP8_BLOCK, MXFP4_BLOCK = 128, 128, 32
# Sizes of mixtures: a layer has 0.2 GB in bfloat16, and runs whole on the device.
MIXTURE = {"num_layers": 40, "hidden_size": 2048, "intermediate_size": 256}
QUANTIZING = ("gptq", "lkd")
LORA = {"adapter": {"r": 16}}

# A tensor of a file: its dtype as safetensors writes it, and its shape.
Tensors = dict[str, tuple[str, tuple[int, ...]]]
ITEMSIZE = {"BF16": 2, "F8_E4M3": 1, "F32": 4, "U8": 1}


def layer_of(options: argparse.Namespace) -> Tensors:
    """The tensors of a layer, named without the layer."""
    dim, inner = options.hidden_size, options.intermediate_size
    heads = options.num_kv_heads * HEAD_DIM
    linear = {
        "self_attn.q_proj": (dim, dim),
        "self_attn.k_proj": (heads, dim),
        "self_attn.v_proj": (heads, dim),
        "self_attn.o_proj": (dim, dim),
    }
    norms = ["input_layernorm", "post_attention_layernorm"]
    found: Tensors = {}
    if options.form == "llama":
        linear |= {"mlp.gate_proj": (inner, dim), "mlp.up_proj": (inner, dim)}
        linear["mlp.down_proj"] = (dim, inner)
    elif options.form in ("experts", "fp8"):
        for expert in range(options.num_experts):
            stem = f"mlp.experts.{expert}"
            linear |= {f"{stem}.{name}_proj": (inner, dim) for name in ("gate", "up")}
            linear[f"{stem}.down_proj"] = (dim, inner)
        found["mlp.gate.weight"] = "BF16", (options.num_experts, dim)
        found |= {
            f"self_attn.{name}_norm.weight": ("BF16", (HEAD_DIM,)) for name in "qk"
        }
    else:
        found |= _stacked(options)
    for name, shape in linear.items():
        if options.form == "fp8":
            found[f"{name}.weight"] = "F8_E4M3", shape
            blocks = tuple(-(-size // FP8_BLOCK) for size in shape)
            found[f"{name}.weight_scale_inv"] = "F32", blocks
        else:
            found[f"{name}.weight"] = "BF16", shape
    return found | {f"{name}.weight": ("BF16", (dim,)) for name in norms}


def _stacked(options: argparse.Namespace) -> Tensors:
    """Experts, router and biases of a layer of gpt-oss."""
    dim, inner, count = (
        options.hidden_size,
        options.intermediate_size,
        options.num_experts,
    )
    found: Tensors = {
        "self_attn.sinks": ("BF16", (dim // HEAD_DIM,)),
        "mlp.router.weight": ("BF16", (count, dim)),
        "mlp.router.bias": ("BF16", (count,)),
        "mlp.experts.gate_up_proj_bias": ("BF16", (count, 2 * inner)),
        "mlp.experts.down_proj_bias": ("BF16", (count, dim)),
    }
    heads = options.num_kv_heads * HEAD_DIM
    for name, size in {"q": dim, "k": heads, "v": heads, "o": dim}.items():
        found[f"self_attn.{name}_proj.bias"] = "BF16", (size,)
    for name, width, height in [
        ("mlp.experts.gate_up_proj", dim, 2 * inner),
        ("mlp.experts.down_proj", inner, dim),
    ]:
        if options.form == "stacked":
            found[name] = "BF16", (count, width, height)
        else:
            shape = count, height, width // MXFP4_BLOCK
            found[f"{name}_blocks"] = "U8", (*shape, MXFP4_BLOCK // 2)
            found[f"{name}_scales"] = "U8", shape
    return found


def config_of(options: argparse.Namespace) -> Any:
    """The configuration of the model that is written."""
    import transformers

    sizes = {
        "vocab_size": options.vocab_size,
        "hidden_size": options.hidden_size,
        "intermediate_size": options.intermediate_size,
        "num_hidden_layers": options.num_layers,
        "num_attention_heads": options.hidden_size // HEAD_DIM,
        "num_key_value_heads": options.num_kv_heads,
        "max_position_embeddings": 2048,
        "head_dim": HEAD_DIM,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    if options.form == "llama":
        return transformers.LlamaConfig(**sizes, architectures=["LlamaForCausalLM"])
    count, inner = options.num_experts, options.intermediate_size
    if options.form in ("experts", "fp8"):
        routed = {"num_experts": count, "moe_intermediate_size": inner}
        config = transformers.Qwen3MoeConfig(**sizes, **routed)
    else:
        config = transformers.GptOssConfig(**sizes, num_local_experts=count)
    if options.form == "fp8":
        blocks = [FP8_BLOCK, FP8_BLOCK]
        section = {"quant_method": "fp8", "weight_block_size": blocks}
        config.quantization_config = section
    if options.form == "mxfp4":
        config.quantization_config = {"quant_method": "mxfp4"}
    return config


def write_model(folder: Path, options: argparse.Namespace) -> int:
    """Writes config.json and a file for each layer; returns the bytes of weights."""
    folder.mkdir()
    config_of(options).save_pretrained(folder)
    rng = np.random.default_rng(0)
    drawn = 0.02 * rng.standard_normal(DRAWN, np.float32)
    # Codes without NaN; scales of mxfp4 are exponents of 2, less 127.
    sources = {
        "BF16": drawn.astype(ml_dtypes.bfloat16).view(np.uint8),
        "F8_E4M3": rng.integers(0, 0x70, DRAWN, np.uint8),
        "F32": np.full(DRAWN // 4, 1e-3, np.float32).view(np.uint8),
        "U8": rng.integers(118, 125, DRAWN, np.uint8),
    }
    words = "BF16", (options.vocab_size, options.hidden_size)
    ends: Tensors = {"model.embed_tokens.weight": words, "lm_head.weight": words}
    ends["model.norm.weight"] = "BF16", (options.hidden_size,)
    layer = layer_of(options)
    files = [ends] + [
        {f"model.layers.{i}.{name}": x for name, x in layer.items()}
        for i in range(options.num_layers)
    ]
    total, places = 0, {}
    for number, tensors in enumerate(files):
        name = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        total += write_file(folder / name, tensors, sources, rng)
        places |= dict.fromkeys(tensors, name)
        drop(folder / name)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def write_file(
    path: Path,
    tensors: Tensors,
    sources: dict[str, np.ndarray],
    rng: np.random.Generator,
) -> int:
    """Writes a safetensors file of bytes of the sources; returns those of tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + int(np.prod(shape)) * ITEMSIZE[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for dtype, shape in tensors.values():
            left, source = int(np.prod(shape)) * ITEMSIZE[dtype], sources[dtype]
            first = int(rng.integers(len(source) // 4)) * 4
            while left:
                file.write(source[first : first + left].data)
                left -= min(left, len(source) - first)
                first = 0
    return end


def drop(path: Path) -> None:
    """Take a file from the page cache."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def copy_seconds(folder: Path, target: Path) -> float:
    """The time to copy all files into one past the page cache, parts at once."""
    files = sorted(folder.glob("*.safetensors"))
    ends = np.cumsum([path.stat().st_size // BLOCK for path in files])
    sources = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in files]
    into = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    memory = [mmap.mmap(-1, BLOCK) for _ in range(THREADS)]

    def work(number: int) -> None:
        for block in range(number, int(ends[-1]), THREADS):
            file = int(np.searchsorted(ends, block, side="right"))
            first = 0 if file == 0 else int(ends[file - 1])
            os.preadv(sources[file], [memory[number]], (block - first) * BLOCK)
            os.pwritev(into, [memory[number]], block * BLOCK)

    began = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))
    seconds = time.perf_counter() - began
    for file in (*sources, into):
        os.close(file)
    target.unlink()
    return seconds


def measure(given: dict[str, Any]) -> dict[str, Any]:
    """Opens the model in this process; sizes in bytes and times in seconds."""
    import zinf
    from zinf.core.program import Tier
    from zinf.hf.engine import ModelEngine

    zinf.tune_malloc()
    peak = MemoryPeak()
    own = peak.nbytes()
    times: dict[str, float] = {}
    engines: list[ModelEngine] = []
    reads = ModelEngine.initialize_state

    def timed(engine: ModelEngine) -> None:
        engines.append(engine)
        times["planned_bytes"] = peak.nbytes()
        began, processor = time.perf_counter(), time.process_time()
        reads(engine)
        times["moved"] = time.perf_counter() - began
        times["processor"] = time.process_time() - processor

    ModelEngine.initialize_state = timed  # type: ignore[method-assign]
    offload = {"device": "nvme"}
    config = {
        "memory": {
            "device": given["device"],
            "host": given["host"],
            "nvme": [given["tier"]],
        },
        "zero_optimization": {
            "stage": 3,
            "offload_param": offload,
            "offload_optimizer": offload,
        },
        "persistence_threshold": 1,
    }
    began = time.perf_counter()
    ids = np.random.default_rng(0).integers(3, 1000, (1, given["tokens"]), np.int32)
    if given["mode"] in QUANTIZING:
        found = quantized(given, ids, config)
        found |= {"quantized": time.perf_counter() - began}
        found |= {f"{x}_bytes": engines[0].stores.peak_bytes(x) for x in Tier}
    else:
        engine = opened(given, ids, config)
        found = {"opened": time.perf_counter() - began}
        found["opened_bytes"] = peak.nbytes() - own
        with engine:
            if given["mode"] == "lora":
                metrics = engine.step({"input_ids": ids})
                found |= {"loss": metrics["loss"], "step": metrics["step_seconds"]}
    times["planned_bytes"] -= own
    peak.stop()
    return times | found | {"peak_bytes": peak.nbytes() - own, "own_bytes": own}


def opened(given: dict[str, Any], ids: np.ndarray, config: dict[str, Any]) -> Any:
    """The engine of a mode that opens the model."""
    import optax

    from zinf import hf

    if given["mode"] == "run":
        model = hf.load_as_stored(given["model"])
        return hf.open_model(model, config, rows=1, length=given["tokens"])
    model, config = hf.load(given["model"], dtype="bfloat16"), config | LORA
    return hf.initialize(model, optax.adamw(1e-4), config, batch={"input_ids": ids})


def quantized(
    given: dict[str, Any], ids: np.ndarray, config: dict[str, Any]
) -> dict[str, Any]:
    """Quantizes the model beside it; returns the bytes that are written."""
    from zinf import hf

    output, method = Path(given["model"]).with_name("quantized"), given["mode"]
    hf.quantize(
        hf.load_as_stored(given["model"]),
        output,
        ids,
        config,
        method=method,
        distilling=hf.Distilling(steps=given["steps"]) if method == "lkd" else None,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    written = {"written_bytes": sum(x.stat().st_size for x in output.iterdir())}
    shutil.rmtree(output)
    return written


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="zinf-import-") as name:
        place = Path(name)
        nbytes = write_model(place / "model", options)
        print(f"{options.form}: {nbytes / 1e9:.2f} GB of weights in files")
        for mode in options.modes:
            drive = [copy_seconds(place / "model", place / "copy")]
            for path in (place / "model").iterdir():
                drop(path)
            given = {
                "mode": mode,
                "model": str(place / "model"),
                "tier": str(place / "tier"),
                "device": options.device,
                "host": options.host,
                "tokens": options.tokens,
                "steps": options.steps,
            }
            report(mode, run(given), drive, place)
            shutil.rmtree(place / "tier", ignore_errors=True)


def run(given: dict[str, Any]) -> dict[str, Any]:
    """`measure` in a process of its own."""
    root = Path(__file__).parents[2]
    command = [sys.executable, __file__, "--measure", json.dumps(given)]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
    done.check_returncode()
    return json.loads(done.stdout.splitlines()[-1])


def report(mode: str, found: dict[str, Any], drive: list[float], place: Path) -> None:
    drive.append(copy_seconds(place / "model", place / "copy"))
    load = os.getloadavg()[0]
    print(f"\n{mode}, load {load:.1f}")
    for name, value in found.items():
        size = f"{value / 2**20:,.0f} MiB"
        print(f"  {name:14}", size if name.endswith("bytes") else f"{value:.4g}")
    bound = min(drive)
    print(f"  copies by the drive: {drive[0]:.1f} s before, {drive[1]:.1f} s after")
    print(
        f"  read and written at {bound / found['moved']:.2f} of the faster", flush=True
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", help="on the drive; a temporary folder by default")
    parser.add_argument("--modes", nargs="+", default=["run", "lora"])
    forms = ["llama", "experts", "fp8", "stacked", "mxfp4"]
    parser.add_argument("--form", choices=forms, default=forms[0])
    parser.add_argument("--num-experts", type=int, default=64)
    parser.add_argument("--num-layers", type=int, default=38)
    parser.add_argument("--hidden-size", type=int, default=3072)
    parser.add_argument("--intermediate-size", type=int, default=8192)
    parser.add_argument("--num-kv-heads", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--tokens", type=int, default=16, help="of a batch of one row")
    parser.add_argument("--steps", type=int, default=2, help="of lkd")
    parser.add_argument("--device", default="768MiB", help="budget")
    parser.add_argument("--host", default="256MiB", help="budget")
    if parser.parse_args().form != forms[0]:
        parser.set_defaults(**MIXTURE)
    return parser.parse_args()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(json.loads(sys.argv[2]))))
    else:
        main()
