"""`zinf quantize`: weights rounded by the inputs that they see, as files have them."""

import json
import re
from functools import partial

import ml_dtypes
import numpy as np
import pytest

from tests.command import run
from tests.unit.hf.models import (
    SMALL,
    VOCAB,
    llama,
    make,
    mixtral,
    model_folder,
    off,
    on_tier,
    refusals,
    reloaded,
    save,
    torch_logits,
    write,
)

import jax  # isort: skip
import torch  # isort: skip
from safetensors.torch import load_file  # isort: skip

from zinf import hf  # isort: skip
from zinf.hf.calibration import calibration_rows, choose, sums_over_inputs  # isort: skip
from zinf.hf.distilling import trained_shifts  # isort: skip
from zinf.hf.exported import ExportedWeights  # isort: skip
from zinf.hf.quantized.activations import best_scales, clipped  # isort: skip
from zinf.hf.quantized.packed import packed_words, unpacked  # isort: skip
from zinf.hf.quantized.rounding import Grid, gptq, nearest  # isort: skip
from zinf.hf.quantized.straight_through import rounded  # isort: skip

GROUP, ROWS, LENGTH = 16, 6, 16
LAYERS = [
    f"model.layers.{layer}.{name}.weight"
    for layer in range(SMALL["num_hidden_layers"])
    for name in (
        *(f"self_attn.{x}_proj" for x in "qkvo"),
        *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
    )
]


def plain_gptq(weight, gram, bits, group):
    """The paper's method in float64, an input at a time, with the inverse itself."""
    weight, gram = weight.astype(np.float64), gram.astype(np.float64)
    dead = np.diag(gram) == 0
    gram[dead, dead], weight[:, dead] = np.diag(gram).mean(), 0
    gram += 0.01 * np.diag(gram)[~dead].sum() / len(gram) * np.eye(len(gram))
    inverse = np.linalg.inv(gram)
    codes, scales = np.zeros(weight.shape, np.int8), []
    for i in range(len(gram)):
        if i % group == 0:
            largest = np.abs(weight[:, i : i + group]).max(1)
            scales.append(largest / (2 ** (bits - 1) - 0.5))
        low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        codes[:, i] = np.clip(np.rint(weight[:, i] / scales[-1]), low, high)
        error = (weight[:, i] - codes[:, i] * scales[-1]) / inverse[i, i]
        weight -= np.outer(error, inverse[i]) * (np.arange(len(gram)) > i)
        # The inverse for the inputs that are left.
        inverse -= np.outer(inverse[:, i], inverse[i]) / inverse[i, i]
        inverse[i], inverse[:, i], inverse[i, i] = 0, 0, 1
    return codes, np.stack(scales, 1)


def layer(inputs, outputs):
    """A random layer, and inputs that depend on each other; one is always 0."""
    generator = np.random.default_rng(0)
    mixing = generator.normal(size=(inputs // 4, inputs))
    seen = generator.normal(size=(512, inputs // 4)) @ mixing
    seen += 0.3 * generator.normal(size=seen.shape)
    seen[:, 5] = 0
    weight = generator.normal(size=(outputs, inputs)).astype(np.float32)
    return weight, seen.astype(np.float32)


@pytest.mark.parametrize(
    ("bits", "inputs", "group"),
    # Groups within a block of 128 inputs, across its end, and of several blocks.
    [(4, 64, 16), (4, 288, 96), (4, 320, 160), (8, 64, 64)],
)
def test_codes_are_those_of_a_plain_gptq(bits, inputs, group):
    weight, seen = layer(inputs, 12)
    gram = seen.T @ seen
    found = gptq(weight, gram, Grid(bits, group, "float32"))
    codes, scales = plain_gptq(weight, gram, bits, group)
    np.testing.assert_array_equal(found.codes, codes)
    np.testing.assert_allclose(found.scales, scales, rtol=1e-5)
    # The factor of the sums has no effect: its damping is a share of the diagonal.
    again = gptq(weight, gram * np.float32(0.25), Grid(bits, group, "float32"))
    np.testing.assert_array_equal(again.codes, codes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_in_training_are_those_that_are_written_and_gradients_go_through(dtype):
    """To the bit; a code at its limit has no gradient."""
    weight, grid = layer(64, 12)[0].astype(ml_dtypes.finfo(dtype).dtype), None
    grid = Grid(4, GROUP, dtype)
    # Half of the rows have none, as at first, where largest weights are between codes.
    shift = np.random.default_rng(0).normal(size=weight.shape).astype(np.float32)
    shift[0, :2], shift[len(shift) // 2 :] = (20, -20), 0
    wanted = nearest(weight.astype(np.float32), grid, shift)
    found, pull = jax.vjp(
        partial(jax.jit(rounded, static_argnums=0), grid), weight, shift
    )
    np.testing.assert_array_equal(found, wanted.plain.astype(weight.dtype))
    of_weight, of_shift = pull(np.ones_like(weight))
    steps = np.repeat(wanted.scales, GROUP, axis=1)
    numbers = weight.astype(np.float32) * (1 / steps) + shift
    steps[(numbers < -8.5) | (numbers > 7.5)] = 0
    np.testing.assert_array_equal(of_shift, steps)
    assert not of_weight.any() and not of_shift[0, :2].any()


def output_error(weight, seen, rounded, group):
    plain = rounded.codes * np.repeat(rounded.scales, group, axis=1)
    return np.linalg.norm(seen @ (weight - plain).T) / np.linalg.norm(seen @ weight.T)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_outputs_are_nearer_than_of_weights_rounded_to_the_nearest(dtype):
    """At equal bytes; by half or more where inputs depend on each other."""
    weight, seen = layer(64, 32)
    grid = Grid(4, GROUP, dtype)
    best, plain = gptq(weight, seen.T @ seen, grid), nearest(weight, grid)
    for found in (best, plain):
        assert found.codes.shape == weight.shape
        assert found.scales.shape == (32, 64 // GROUP)
        assert found.codes.min() >= -8 and found.codes.max() <= 7
    # Half a step, and what the rounding of a scale does to the largest code.
    most = 0.5 + 7.5 * ml_dtypes.finfo(dtype).eps / 2
    step = np.repeat(plain.scales, GROUP, axis=1)
    gap = np.abs(plain.codes * step - weight) / step
    assert gap.max() <= most * (1 + 1e-6)
    errors = [output_error(weight, seen, x, GROUP) for x in (best, plain)]
    assert errors[0] < 0.5 * errors[1]


def plain_awq(weights, seen, bits, group):
    """The candidates of the paper's search in float64, each with its squared error."""
    seen, found = seen.astype(np.float64), []
    sizes = np.sqrt((seen**2).mean(0))
    for power in range(21):
        scales = np.maximum((sizes / sizes.mean()) ** (power / 20), 1e-4)
        scales /= np.sqrt(scales.max() * scales.min())
        error = 0
        for weight in weights:
            scaled = (weight * scales).reshape(len(weight), -1, group)
            step = np.abs(scaled).max(2, keepdims=True) / (2 ** (bits - 1) - 0.5)
            low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
            rounded = np.clip(np.rint(scaled / step), low, high) * step
            gap = rounded.reshape(weight.shape) / scales - weight
            error += np.square(seen @ gap.T).sum()
        found.append((error, scales))
    return found


def with_large_inputs(weight, seen):
    """The same products, of inputs of which some are large."""
    sizes = np.exp(np.random.default_rng(1).normal(size=seen.shape[1], scale=1.5))
    return weight / sizes.astype(np.float32), seen * sizes.astype(np.float32)


@pytest.mark.parametrize(("bits", "group"), [(4, 16), (8, 32)])
def test_scales_are_those_of_a_plain_search(bits, group):
    """Also of two layers with one input, in which outputs then change less."""
    weight, seen = layer(64, 32)
    weight, seen = with_large_inputs(weight, seen)
    parts, gram = [weight[:20], weight[20:]], seen.T @ seen
    grid = Grid(bits, group, "float32")
    for weights in ([weight], parts):
        scales = best_scales(weights, gram, grid)
        _, wanted = min(plain_awq(weights, seen, bits, group), key=lambda x: x[0])
        np.testing.assert_allclose(scales, wanted, rtol=1e-5)
    assert scales.max() > 2 > 0.5 > scales.min()
    errors = [
        output_error(weight * by, seen / by, rounded(weight * by, by), group)
        for by in (np.ones_like(scales), scales)
        for rounded in (
            lambda x, by: nearest(x, grid),
            lambda x, by: clipped(x, gram / by / by[:, None], grid),
        )
    ]
    plain, cut, scaled, both = errors
    assert cut <= plain and scaled < 0.7 * plain and both <= scaled
    for wrong in (0 * gram, gram + np.float32(np.nan)):
        with pytest.raises(ValueError, match="some not 0"):
            best_scales([weight], wrong, grid)
    with pytest.raises(ValueError, match="must be finite"):
        clipped(weight, gram + np.float32(np.nan), grid)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_packing_undoes_unpacking(bits):
    """Rows that do not fill their last word are filled with 0."""
    codes = np.random.default_rng(0).integers(0, 2**bits, (3, 19)).astype(np.uint8)
    words = packed_words(codes, bits)
    assert words.shape == (3, -(-19 * bits // 32))
    np.testing.assert_array_equal(unpacked(words, bits)[:, :19], codes)


def test_a_sum_that_cannot_be_inverted_is_damped_more_or_refused():
    weight, seen = layer(64, 8)
    grid, sums = Grid(4, GROUP, "float32"), seen.T @ seen
    mean = np.diag(sums).mean() * np.eye(64, dtype=np.float32)
    # The noise of the inputs alone has less than 0.01 of the mean.
    assert gptq(weight, sums, grid).damping == 0.01
    assert gptq(weight, sums - 0.03 * mean, grid).damping == 0.1
    wrong = {"cannot be inverted": sums - 0.9 * mean, "some not 0": 0 * sums}
    wrong["must be finite"] = sums + np.float32(np.nan)
    for text, given in wrong.items():
        with pytest.raises(ValueError, match=text):
            gptq(weight, given, grid)


def token_rows():
    return np.random.default_rng(0).integers(3, VOCAB, (ROWS, LENGTH), np.int32)


def inputs_by_torch(module, rows):
    """What torch gives to each linear layer, [tokens, inputs]."""
    found = {}

    def see(name, _, given):
        found[name] = given[0].reshape(-1, given[0].shape[-1]).numpy()

    for name, part in module.named_modules():
        if f"{name}.weight" in LAYERS:
            part.register_forward_pre_hook(partial(see, f"{name}.weight"))
    torch_logits(module, rows)
    return found


def saved_and_chosen(tmp_path):
    """A Llama of torch, the same as zinf opens it, and which weights are rounded."""
    module = save(llama(), tmp_path / "model")
    model = hf.load(tmp_path / "model")
    files, weights = model.open_weights()
    with files:
        choice = choose(
            model,
            ExportedWeights(weights, model.module, model.persistent_buffers()),
            GROUP,
        )
    return module, model, choice


def test_sums_over_inputs_are_those_of_torch_and_equal_on_all_tiers(tmp_path):
    module, model, choice = saved_and_chosen(tmp_path)
    assert sorted(choice.paths) == sorted(LAYERS)
    assert choice.ignored == choice.left_out == ("lm_head",)
    found = {}
    tiers = ("device", "host", "nvme")
    for tier in tiers:
        config = on_tier(tier, tmp_path)
        with sums_over_inputs(model, choice, token_rows(), config) as sums:
            found[tier] = {
                path: np.array(
                    sums.read(name, [(0, n) for n in sums.specs[name].shape])
                )
                for path in LAYERS
                for name in [f"adapter/{path}/gram"]
            }
    seen = inputs_by_torch(module, token_rows())
    wanted = {path: x.astype(float).T @ x for path, x in seen.items()}
    for path in LAYERS:
        for tier in tiers:
            np.testing.assert_array_equal(found[tier][path], found[tiers[0]][path])
        assert off(found[tiers[0]][path], wanted[path]) < 2e-6


def test_distilled_shifts_are_equal_on_all_tiers_and_every_layers_error_falls(tmp_path):
    """At first it is that of the weights rounded to the nearest, layer by layer."""
    module, model, choice = saved_and_chosen(tmp_path)
    grids = dict.fromkeys(LAYERS, Grid(4, GROUP, "float32"))
    settings, found = hf.Distilling(steps=24, learning_rate=0.03), {}
    tiers = ("device", "host", "nvme")
    for tier in tiers:
        said, given = [], (choice, grids, token_rows(), on_tier(tier, tmp_path))
        with trained_shifts(model, *given, settings, said.append) as shifts:
            found[tier] = [shifts.of(path) for path in LAYERS]
        found[tier].append(said)
    for tier in tiers[1:]:
        jax.tree.map(
            np.testing.assert_array_equal, found[tier][:-1], found["device"][:-1]
        )
        assert found[tier][-1] == said
    for number, line in enumerate(said[-2:]):
        assert line.startswith(f"model.layers.{number}: error")
        first, last = map(float, re.findall(r"[\d.e-]+(?= at| in)", line))
        assert last < 0.8 * first
        wanted = error_by_torch(module, number, token_rows())
        np.testing.assert_allclose(first, wanted, rtol=1e-3)


def error_by_torch(module, number, rows):
    """The squared error of a layer's outputs if its weights alone are rounded."""
    block, outputs = module.model.layers[number], []

    def see(_, __, output):
        outputs.append(output if torch.is_tensor(output) else output[0])

    with torch.no_grad(), block.register_forward_hook(see):
        torch_logits(module, rows)
        plain = {name: x.clone() for name, x in block.named_parameters()}
        for name, x in block.named_parameters():
            if "proj" in name:
                rounded = nearest(
                    x.numpy(), Grid(4, GROUP, "float32"), np.zeros(x.shape)
                )
                x.copy_(torch.tensor(rounded.plain))
        torch_logits(module, rows)
        for name, x in block.named_parameters():
            x.copy_(plain[name])
    return float((outputs[1] - outputs[0]).square().mean())


def rounded_by_hand(tensors, path, bits, group=GROUP):
    """`codes * scales` of the tensors of a file."""
    words = tensors[f"{path}_packed"].numpy()
    outputs, inputs = tensors[f"{path}_shape"].tolist()
    codes = unpacked(words, bits)[:, :inputs].astype(np.float32) - 2 ** (bits - 1)
    scales = tensors[f"{path}_scale"].float().numpy()
    assert scales.shape == (outputs, inputs // group)
    return codes * np.repeat(scales, group, axis=1)


NORMS = [
    f"model.layers.{layer}.{name}_layernorm.weight"
    for layer in range(SMALL["num_hidden_layers"])
    for name in ("input", "post_attention")
]
# The layers that read the output of each norm, by its name.
READERS = {"input": [f"self_attn.{x}_proj" for x in "qkv"]}
READERS["post_attention"] = [f"mlp.{x}_proj" for x in ("gate", "up")]


def readers(norm):
    stem, _, name = norm.removesuffix("_layernorm.weight").rpartition(".")
    return [f"{stem}.{reader}.weight" for reader in READERS[name]]


def enlarge_inputs(folder):
    """Change weights so that norms have large entries, and the logits are the same."""
    module = reloaded(folder)
    named, draw = dict(module.named_parameters()), torch.Generator().manual_seed(0)
    for norm in NORMS:
        sizes = torch.exp(1.5 * torch.randn(named[norm].shape, generator=draw))
        named[norm].data *= sizes
        for path in readers(norm):
            named[path].data /= sizes
    module.save_pretrained(folder, max_shard_size="20KB")


def scales_by_torch(folder, rows):
    """By norm: the candidates of a plain search over the inputs that torch sees."""
    module = reloaded(folder)
    inputs = inputs_by_torch(module, rows)
    named = {name: x.numpy(force=True) for name, x in module.named_parameters()}
    return {
        norm: plain_awq(
            [named[path] for path in readers(norm)], inputs[readers(norm)[0]], 4, GROUP
        )
        for norm in NORMS
    }


def check_chosen(scales, candidates):
    """The scales are a candidate, and no other has an error that is clearly less.

    The largest weight of a group is as near to two codes: the last bit of a sum decides
    which one it gets, and moves errors by some percent.
    """
    (error,) = [e for e, x in candidates if np.allclose(scales, x, rtol=1e-4)]
    assert error < 1.1 * min(e for e, _ in candidates)


def errors_of(folder, params, rows):
    """How far the logits of a quantized model are from those of plain weights."""
    model = hf.load_as_stored(folder)
    files, weights = model.open_weights()
    with files:
        given = {name: np.array(weights.whole(name)) for name in model.specs}
    batch = {"input_ids": rows}
    run_ = jax.jit(model.logits)
    wanted = np.asarray(run_(params, batch), np.float32)
    return np.linalg.norm(np.asarray(run_(given, batch), np.float32) - wanted)


def test_a_folder_has_the_codes_and_reads_back_as_codes_times_scales(tmp_path):
    """By all methods with equal bytes; what is not rounded stays to the bit.

    But for the norms of awq, which take the scales of the layers that read them: some
    inputs are large here, as those of large models are.
    """
    folder = model_folder(tmp_path)
    enlarge_inputs(folder)
    lines = [
        {"text": " ".join(f"w{(i * j) % 40}" for j in range(12))} for i in range(9)
    ]
    data = write(tmp_path / "data.jsonl", lines)
    common = ("--group-size", GROUP, "--set", "execution=streamed")
    seen = ("--data", data, "--samples", 6, "--sequence-length", LENGTH)
    done = run("quantize", folder, "--output", tmp_path / "gptq", *seen, *common)
    assert "left as they are: lm_head" in done.output
    assert "6 of 6 rows seen" in done.output
    run("quantize", folder, "--output", tmp_path / "rtn", "--method", "rtn", *common)
    awq = run(
        "quantize", folder, "--output", tmp_path / "awq", "--method", "awq",
        *seen, *common,
    )  # fmt: skip
    assert f"{NORMS[0]} takes the scales of 3 layers" in awq.output
    lkd = run(
        "quantize", folder, "--output", tmp_path / "lkd", "--method", "lkd",
        "--lkd-steps", 120, "--lkd-learning-rate", 0.01, *seen, *common,
    )  # fmt: skip
    assert "120 of 120 steps" in lkd.output and "model.layers.1: error" in lkd.output
    plain = hf.load(folder)
    files, weights = plain.open_weights()
    with files:
        params = {name: np.array(weights.whole(name)) for name in plain.specs}
    rows = calibration_rows(plain, hf.records(data), samples=6, length=LENGTH)
    sizes, errors = [], []
    scales = scales_by_torch(folder, rows)
    for method in ("gptq", "awq", "lkd", "rtn"):
        made = tmp_path / method
        tensors = load_file(made / "model.safetensors")
        sizes.append((made / "model.safetensors").stat().st_size)
        model = hf.load(made)
        files, weights = model.open_weights()
        with files:
            for name in model.specs:
                found = np.array(weights.whole(name))
                rounded = name in LAYERS
                wanted = rounded_by_hand(tensors, name, 4) if rounded else params[name]
                if method == "awq" and name in scales:
                    check_chosen(params[name] / found, scales[name])
                    continue
                np.testing.assert_array_equal(found, wanted)
                if rounded and method == "rtn":
                    by_hand = nearest(params[name], Grid(4, GROUP, "float32"))
                    scales = np.repeat(by_hand.scales, GROUP, axis=1)
                    np.testing.assert_array_equal(found, by_hand.codes * scales)
        errors.append(errors_of(made, params, rows))
        names = {path.name for path in made.iterdir()}
        assert {"tokenizer.json", "chat_template.jinja", "config.json"} <= names
    assert len(set(sizes)) == 1
    by_gptq, by_awq, by_lkd, by_rtn = errors
    assert by_gptq < 0.9 * by_rtn and by_awq < 0.3 * by_rtn
    assert by_lkd < 0.9 * by_rtn
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"model", "data.jsonl", "gptq", "awq", "lkd", "rtn"}


@pytest.mark.parametrize("name", ["tied", "experts"])
def test_tied_weights_and_experts_stay_and_scales_have_the_dtype_of_files(
    name, tmp_path
):
    bits, group = 8, 8
    config = llama(tie_word_embeddings=True) if name == "tied" else mixtral()
    kept = {"tied": ["lm_head"], "experts": ["lm_head", "mlp.experts", "mlp.gate"]}
    module = make(config, dtype=torch.bfloat16)
    module.save_pretrained(tmp_path / name)
    said, output = [], tmp_path / f"{name}.out"
    model = hf.load_as_stored(tmp_path / name)
    hf.quantize(
        model, output, bits=bits, method="rtn", group_size=group, say=said.append
    )
    section = json.loads((output / "config.json").read_text())
    weights = section["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["group_size"]) == (bits, group)
    assert section["dtype"] == "bfloat16"
    assert "lm_head" in section["quantization_config"]["ignore"]
    assert all(word in said[0] for word in kept[name]), said
    assert ("transformers" in said[-1]) == (name == "experts")
    before = load_file(tmp_path / name / "model.safetensors")
    after = load_file(output / "model.safetensors")
    rounded = {key.removesuffix("_packed") for key in after if "_packed" in key}
    assert rounded == {x for x in before if "self_attn" in x or x in LAYERS}
    for key in before.keys() - rounded:
        assert torch.equal(before[key], after[key])
    for key in rounded:
        assert after[f"{key}_scale"].dtype == torch.bfloat16
        step = np.repeat(after[f"{key}_scale"].float().numpy(), group, axis=1)
        gap = rounded_by_hand(after, key, bits, group) - before[key].float().numpy()
        # Half a step, and what the rounding of a scale does to the largest code.
        assert (np.abs(gap) <= step * (0.5 + 127.5 * 2**-8)).all()
    again = hf.load_as_stored(output)
    files, read = again.open_weights()
    with files:
        assert set(again.specs) <= set(read.specs)


def test_bad_input_is_refused_by_name(tmp_path, golden):
    """Before any weight is read; nothing is written."""
    folder, output = model_folder(tmp_path), tmp_path / "out"
    data = write(tmp_path / "data.jsonl", [{"text": "w1 w2 w3"}])
    done = tmp_path / "done"
    model = hf.load(folder)
    hf.quantize(model, done, method="rtn", group_size=GROUP)

    def command(source, *options, to=output):
        arguments = ("quantize", source, "--output", to, "--traceback", *options)
        return lambda: run_or_raise(*arguments)

    mistakes = {
        "gptq without texts": command(folder),
        "rtn with texts": command(folder, "--method", "rtn", "--data", data),
        "an output that is there": command(folder, "--data", data, to=done),
        "a group that does not divide": command(folder, "--method", "rtn"),
        "3 bits": command(folder, "--data", data, "--bits", 3),
        "a quantized model": command(done, "--data", data),
        "too few tokens": command(folder, "--data", data),
        "rows longer than the model": command(
            folder, "--data", data, "--sequence-length", 64
        ),
        "awq without texts": command(folder, "--method", "awq"),
        "lkd without texts": command(folder, "--method", "lkd"),
        "steps of another method": command(folder, "--data", data, "--lkd-steps", 9),
        "no steps": command(
            folder, "--data", data, "--method", "lkd", "--lkd-steps", 0
        ),
        "a method of another library": lambda: hf.quantize(
            model, output, method="hqq", group_size=GROUP
        ),
    }
    golden.check("quantize.txt", refusals(mistakes, tmp_path))
    assert {p.name for p in tmp_path.iterdir()} == {"model", "data.jsonl", "done"}


def run_or_raise(*arguments):
    result = run(*arguments, code=None)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
