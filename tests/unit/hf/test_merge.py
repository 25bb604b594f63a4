"""`zinf merge`: means of the weights of several models, tensor by tensor."""

import numpy as np
import pytest

from tests.command import run
from tests.unit.hf.models import (
    llama,
    make,
    mixtral,
    model_folder,
    off,
    refusals,
    reloaded,
    save,
    tokens,
    torch_logits,
)

import torch  # isort: skip
from safetensors.numpy import load_file  # isort: skip

from zinf import hf  # isort: skip

pytestmark = pytest.mark.slow


def models(folder, config, *, dtype=torch.float32):
    """A model with a tokenizer, and two that differ from it, of which some weights.

    Returns:
        Their folders, and their tensors as files have them, in float32.
    """
    folders, found = [], []
    for number in range(3):
        path = model_folder(folder / f"m{number}")
        module = make(config, dtype=dtype)
        generator = torch.Generator().manual_seed(number)
        for name, value in module.named_parameters():
            if number and "norm" not in name:
                noise = torch.randn(value.shape, generator=generator)
                value.data += (0.01 * number * noise).to(dtype)
        for old in path.glob("*.safetensors*"):
            old.unlink()
        module.save_pretrained(path)
        folders.append(path)
        tensors = load_file(path / "model.safetensors")
        found.append({n: x.astype(np.float32) for n, x in tensors.items()})
    return folders, found


def means(found, shares):
    """The weighted means of NumPy, in float32."""
    shares = np.float32(np.array(shares) / sum(shares))
    return {
        n: sum(x[n] * s for x, s in zip(found, shares, strict=True)) for n in found[0]
    }


def written(folder):
    (path,) = folder.glob("*.safetensors")
    return load_file(path)


def check(output, wanted, dtype):
    tensors = written(output)
    assert tensors.keys() == wanted.keys()
    for name, value in wanted.items():
        assert tensors[name].dtype.name == dtype
        np.testing.assert_array_equal(tensors[name], value.astype(tensors[name].dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_the_means_of_numpy_and_open_in_transformers(dtype, tmp_path):
    folders, found = models(tmp_path, llama(), dtype=getattr(torch, dtype))
    output = tmp_path / "merged"
    run("merge", *folders, "--output", output, "--shares", "2,1,1")
    check(output, means(found, [2, 1, 1]), dtype)
    names = {path.name for path in output.iterdir()}
    assert {"tokenizer.json", "config.json", "README.md"} <= names
    assert "(0.5)" in (output / "README.md").read_text()
    module = reloaded(output)
    logits = torch_logits(module, tokens())
    state = {name: torch.tensor(x) for name, x in means(found, [2, 1, 1]).items()}
    if dtype == "float32":
        module.load_state_dict(state)
        np.testing.assert_array_equal(torch_logits(module, tokens()), logits)


def test_experts_alone_are_merged_where_they_differ(tmp_path):
    """Routers, attention and embeddings stay; an expert of a layer is a tensor."""
    folders, found = models(tmp_path, mixtral())
    is_expert = {name: ".experts." in name for name in found[0]}
    assert sum(is_expert.values()) == 2 * 4 * 3
    whole = means(found[:2], [0, 1])
    wanted = {n: x if is_expert[n] else found[0][n] for n, x in whole.items()}
    output = tmp_path / "experts"
    run(
        "merge", *folders[:2], "--output", output, "--only", "experts",
        "--shares", "0,1",
    )  # fmt: skip
    check(output, wanted, "float32")
    assert off(torch_logits(reloaded(output), tokens()), 1.0) > 0
    # Of the third model one expert differs by more than the others do.
    name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    assert name in found[1]
    module = make(mixtral())
    module.load_state_dict(reloaded(folders[1]).state_dict())
    module.model.layers[1].mlp.experts.down_proj.data[2] += 1
    module.save_pretrained(folders[1])
    changed = load_file(folders[1] / "model.safetensors")
    output = tmp_path / "some"
    done = run("merge", *folders[:2], "--output", output, "--threshold", 0.5)
    # An expert has two tensors in the model: one of both halves of its first product.
    parts = sum("experts" in n for n in dict(module.named_parameters())) * 4
    others = sum("experts" not in n for n in dict(module.named_parameters()))
    assert f"{parts + others - 1} of {parts + others} tensors differ by" in done.output
    wanted = found[0] | means([found[0], changed], [1, 1]) | {
        n: x for n, x in found[0].items() if n != name
    }  # fmt: skip
    check(output, wanted, "float32")


def test_other_settings_of_a_merged_model_are_said(tmp_path):
    save(llama(), tmp_path / "first")
    save(llama(hidden_act="gelu"), tmp_path / "second")
    given, said = [hf.load(tmp_path / n) for n in ("first", "second")], []
    hf.merge(given, tmp_path / "merged", say=said.append)
    assert "second has other values of hidden_act in config.json; those" in said[0]
    said.clear()
    hf.merge([given[0], given[0]], tmp_path / "same", say=said.append)
    assert not said


def test_models_that_cannot_be_merged_are_refused_by_name(tmp_path, golden):
    folder, mixture = model_folder(tmp_path / "a"), tmp_path / "mixture"
    make(mixtral()).save_pretrained(mixture)
    wider = tmp_path / "wider"
    make(llama(intermediate_size=64)).save_pretrained(wider)
    first, other, wide = map(hf.load, (folder, mixture, wider))
    output = tmp_path / "out"
    two = [first, first]
    mistakes = {
        "one model": lambda: hf.merge([first], output),
        "another architecture": lambda: hf.merge([first, other], output),
        "other shapes": lambda: hf.merge([first, wide], output),
        "too few shares": lambda: hf.merge(two, output, shares=[1]),
        "shares of 0": lambda: hf.merge(two, output, shares=[0, 0]),
        "a negative share": lambda: hf.merge(two, output, shares=[2, -1]),
        "no experts": lambda: hf.merge(two, output, only="experts"),
        "a threshold below 0": lambda: hf.merge(two, output, threshold=-1),
        "an output that is there": lambda: hf.merge(two, folder),
    }
    golden.check("merge.txt", refusals(mistakes, tmp_path))
    text = run("merge", folder, folder, "--output", output, "--shares", "a", code=2)
    assert "must be numbers with commas" in " ".join(text.output.split())
    assert not output.exists()
