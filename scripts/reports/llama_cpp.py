"""Compares texts of llama.cpp with those of zinf, for each kind of export.

    pip install sentencepiece xllamacpp
    python scripts/reports/llama_cpp.py LLAMA_CPP

LLAMA_CPP is a folder with llama.cpp's `convert_*_to_gguf.py`, `conversion/` and
`gguf-py/`: a clone, or `vendor/llama.cpp` of the source distribution of
llama-cpp-python. A small Llama with a tokenizer of its own is tuned on made-up texts,
wholly and by LoRA, and quantized to 4 bits; each folder is converted to a GGUF file in
float32. Both programs complete five prompts greedily; rows say how many texts agree.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

VOCABULARY, TOKENS, PROMPTS = 400, 24, 5
TUNED = "--sequence-length 64 --samples 8 --steps 250 --learning-rate 5e-3".split()


def call(*command: object) -> None:
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")


def make_model(folder: Path) -> list[str]:
    """Writes a random Llama, and texts to tune it on. Returns the texts."""
    import sentencepiece
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    letters, draw = "abcdefghijklmnopqrstuvwxyz", random.Random(0)
    words = ["".join(draw.choices(letters, k=draw.randint(2, 7))) for _ in range(150)]
    texts = [" ".join(draw.choices(words, k=12)) for _ in range(200)]
    rows = [json.dumps({"text": text}) for text in texts]
    (folder.parent / "data.jsonl").write_text("\n".join(rows))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=VOCABULARY,
        model_type="bpe",
        byte_fallback=True,
        pad_id=-1,
        minloglevel=2,
    )
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return texts


def texts_of_zinf(folder: Path, prompts: Sequence[str]) -> list[str]:
    asked, found = folder.parent / "prompts.jsonl", Path(f"{folder}.jsonl")
    asked.write_text("\n".join(json.dumps({"prompt": text}) for text in prompts))
    options = ["--output", found, "--temperature", 0, "--max-new-tokens", TOKENS]
    call("-m", "zinf", "generate", folder, "--prompts", asked, *options)
    return [json.loads(line)["completion"] for line in found.read_text().splitlines()]


def texts_of_llama_cpp(
    model: Path, prompts: Sequence[str], adapter: Path | None = None
) -> list[str]:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.n_ctx, params.n_gpu_layers, params.warmup = 256, 0, False
    if adapter is not None:
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(adapter), 1.0)]
    server = xllamacpp.Server(params)
    asked = {"n_predict": TOKENS, "temperature": 0, "cache_prompt": False}
    found = [server.handle_completions({**asked, "prompt": text}) for text in prompts]
    return [answer["choices"][0]["text"] for answer in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("llama_cpp", type=Path)
    sources = parser.parse_args().llama_cpp.resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, whole, lora = (folder / part for part in ("model", "whole", "lora"))
        prompts = [
            " ".join(text.split()[: 2 + i])
            for i, text in enumerate(make_model(model)[:PROMPTS])
        ]
        tune = ("-m", "zinf", "finetune", model, "--data", folder / "data.jsonl")
        call(*tune, *TUNED, "--output", whole)
        call(*tune, *TUNED, "--lora", 8, "--output", lora)
        quantize = ("-m", "zinf", "quantize", whole, "--group-size", 32)
        few_bits, adapter = folder / "int4", folder / "lora.adapter"
        call(*quantize, "--method", "rtn", "--output", few_bits)

        def converted(part: Path, script: str, *options: object) -> Path:
            into = part.with_name(part.name + ".gguf")
            command = (sources / script, part, "--outfile", into, "--outtype", "f32")
            call(*command, *options)
            return into

        base, *files = (
            converted(part, "convert_hf_to_gguf.py")
            for part in (model, whole, lora, few_bits)
        )
        rows = {
            part.name: (part, file, None)
            for part, file in zip((whole, lora, few_bits), files, strict=True)
        }
        file = converted(adapter, "convert_lora_to_gguf.py", "--base", model)
        rows["adapter"] = (adapter, base, file)
        for row, (part, *read) in rows.items():
            pairs = zip(
                texts_of_zinf(part, prompts),
                texts_of_llama_cpp(read[0], prompts, read[1]),
                strict=True,
            )
            equal = [one.strip() == other.strip() for one, other in pairs]
            print(f"{row}: {sum(equal)} of {len(equal)} texts agree")


if __name__ == "__main__":
    main()
