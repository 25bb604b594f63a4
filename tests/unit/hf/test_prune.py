"""`zinf prune`: fewer experts, chosen by their use, or fewer layers."""

import json

import numpy as np
import pytest

from tests.command import run
from tests.unit.hf.architectures import config_of
from tests.unit.hf.models import (
    SMALL,
    VOCAB,
    data_file,
    llama,
    make,
    metrics_of,
    model_folder,
    off,
    on_tier,
    params_of,
    reloaded,
    save,
    tokens,
    torch_logits,
    write,
)

from tests.unit.hf import images  # isort: skip
import jax  # isort: skip
import jax.numpy as jnp  # isort: skip
import torch  # isort: skip
import transformers  # isort: skip
from safetensors.numpy import load_file  # isort: skip
from torchax.interop import jax_view, torch_view  # isort: skip

from zinf import hf  # isort: skip
from zinf.core.config import Config  # isort: skip

pytestmark = pytest.mark.slow
COUNT, KEPT, LENGTH = 8, 4, 12
NAMES = [f"model.layers.{i}.mlp.experts" for i in range(2)]


def mixture(kind="mixtral", **changes):
    sizes = SMALL | {"num_experts_per_tok": 2} | changes
    if kind == "gpt_oss":
        return transformers.GptOssConfig(**sizes, num_local_experts=COUNT, head_dim=8)
    if kind == "qwen3_moe":
        inner = {"moe_intermediate_size": 16, "head_dim": 8}
        return transformers.Qwen3MoeConfig(**sizes, **inner, num_experts=COUNT)
    return transformers.MixtralConfig(**sizes, num_local_experts=COUNT)


def rows(count=5):
    return np.random.default_rng(1).integers(3, VOCAB, (count, LENGTH), np.int32)


def torch_use(model, ids):
    """How often torch's routers choose each expert."""
    use = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda module, given, name=name: use.update(
                {name: np.bincount(given[1].numpy().reshape(-1), minlength=COUNT)}
            )
        )
        for name, module in model.named_modules()
        if name in NAMES
    ]
    torch_logits(model, ids)
    for hook in hooks:
        hook.remove()
    return use


@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_use_is_what_the_routers_of_torch_choose(tier, tmp_path):
    torch_model = save(mixture(), tmp_path / "model")
    wanted = torch_use(torch_model, rows())
    model, config = hf.load(tmp_path / "model"), on_tier(tier, tmp_path)
    found = hf.use_of_experts(model, rows(), config)
    assert found.keys() == wanted.keys() == {*NAMES}
    for name in NAMES:
        np.testing.assert_array_equal(found[name], wanted[name])
        assert found[name].sum() == 5 * LENGTH * 2


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_pruned_is_masked_before_the_softmax_to_the_bit(kind, tmp_path, monkeypatch):
    """The routers of the whole model get -inf for the experts that are left out."""
    torch_model = save(mixture(kind), tmp_path / "model")
    whole = hf.load(tmp_path / "model")
    use = hf.use_of_experts(whole, rows())
    kept = hf.most_used(use, KEPT)
    hf.prune_experts(whole, tmp_path / "pruned", kept)
    small = hf.load(tmp_path / "pruned")
    params, pruned_model = params_of(torch_model), reloaded(tmp_path / "pruned")
    pruned = params_of(pruned_model)
    wanted = jax.jit(small.logits)(pruned, {"input_ids": tokens()})

    # The scores of a router come from the only linear function with `COUNT` rows.
    linear, calls = torch.nn.functional.linear, iter(NAMES)

    def masked(x, weight, bias=None):
        scores = linear(x, weight, bias)
        if weight.shape[0] != COUNT:
            return scores
        gone = np.ones((1, COUNT), bool)
        gone[0, kept[next(calls)]] = False
        return torch_view(jnp.where(gone, -jnp.inf, jax_view(scores)))

    monkeypatch.setattr(torch.nn.functional, "linear", masked)
    found = jax.jit(whole.logits)(params, {"input_ids": tokens()})
    assert next(calls, None) is None
    np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))
    assert off(wanted, torch_logits(pruned_model, tokens())) < 2e-6


def data_of(folder):
    texts = [" ".join(f"w{(i + j) % 40}" for j in range(16)) for i in range(4)]
    lines = [{"text": text} for text in texts]
    return write(folder / "texts.jsonl", lines)


def test_the_command_writes_a_model_that_transformers_loads(tmp_path):
    folder, output = model_folder(tmp_path), tmp_path / "pruned"
    save(mixture(), folder)
    command = ["prune", folder, "--output", output, "--experts", KEPT]
    command += ["--data", data_of(tmp_path), "--sequence-length", LENGTH]
    done = run(*command)
    assert f"{NAMES[0]}: {KEPT} of {COUNT} experts, which had " in done.output
    config = json.loads((output / "config.json").read_text())
    assert config["num_local_experts"] == KEPT
    small = reloaded(output)
    assert torch_logits(small, tokens()).shape == (*tokens().shape, VOCAB)
    card = (output / "README.md").read_text()
    assert f"{KEPT} experts of each layer are kept" in card
    # In the form of the files: an expert has a tensor of its own.
    stems = {n.rpartition(".w1.")[0] for n in load_file(next(output.glob("*.safe*")))}
    assert f"model.layers.0.block_sparse_moe.experts.{KEPT - 1}" in stems
    assert f"model.layers.0.block_sparse_moe.experts.{KEPT}" not in stems


def test_a_student_begins_with_layers_of_its_teacher(tmp_path):
    """As torch without the others, and in the files' form."""
    teacher = save(llama(num_hidden_layers=4), tmp_path / "model")
    output = tmp_path / "student"
    run("prune", tmp_path / "model", "--output", output, "--layers", "0,3")
    kept = [teacher.model.layers[i] for i in (0, 3)]
    teacher.model.layers = torch.nn.ModuleList(kept)
    wanted = torch_logits(teacher, tokens())
    student = reloaded(output)
    assert student.config.num_hidden_layers == 2
    np.testing.assert_array_equal(torch_logits(student, tokens()), wanted)


def of_experts_later():
    """Of four layers the first has no experts."""
    return transformers.AutoModelForCausalLM.from_config(
        grouped(num_hidden_layers=4, n_group=1),
        attn_implementation="eager",
    )


def of_two_towers():
    """As many layers for images as for text."""
    return images.make("gemma3")


@pytest.mark.parametrize(
    ("make_teacher", "place", "kept"),
    [
        (of_experts_later, "model", [0, 3]),
        (of_experts_later, "model", [1, 3]),
        (of_two_towers, "model.language_model", [1]),
    ],
)
def test_layers_that_are_kept_are_whole(make_teacher, place, kept, tmp_path):
    teacher = make_teacher().eval()
    teacher.save_pretrained(tmp_path / "model")
    hf.prune_layers(hf.load(tmp_path / "model"), tmp_path / "student", kept)
    stack = teacher.get_submodule(place)
    stack.layers = torch.nn.ModuleList([stack.layers[i] for i in kept])
    config = teacher.config.get_text_config()
    config.num_hidden_layers = len(kept)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in kept]
    wanted = torch_logits(teacher, tokens())
    student = type(teacher).from_pretrained(
        tmp_path / "student", attn_implementation="eager"
    )
    np.testing.assert_array_equal(torch_logits(student.eval(), tokens()), wanted)


@pytest.mark.parametrize("packing", [False, True])
def test_a_student_learns_from_its_teacher(packing, tmp_path):
    """In one command; the first loss is that of torch and the divergence by hand."""
    folder = model_folder(tmp_path, num_hidden_layers=4)
    student, output = tmp_path / "student", tmp_path / "tuned"
    run("prune", folder, "--output", student, "--layers", "0,3")
    data = data_file(tmp_path)
    common = ["finetune", student, "--data", data, "--samples", 6]
    common += ["--steps", 3, "--learning-rate", 1e-3, *["--packing"] * packing]
    common += ["--set", "bf16.enabled=false", "--set", "execution=streamed"]
    common += ["--sequence-length", 8]
    taught = ["--set", "distillation.coefficient=0.5", "--teacher", folder]
    taught += ["--set", "distillation.until_step=2", "--eval-data", data]
    run(*common, *taught, "--output", output)
    metrics = metrics_of(tmp_path / "tuned.run")
    losses = [line["loss"] for line in metrics]
    config = Config.load(tmp_path / "tuned.run/finetune.yaml")
    # Module and tokenizer are loaded once for all tasks of a run.
    assert hf.Task(config)._teacher is hf.Task(config)._teacher
    rows = hf.Task(config).rows()
    batch = {n: np.stack([rows[i][n] for i in range(len(rows))]) for n in rows[0]}
    labels = torch.tensor(batch["labels"]).long()[:, 1:]
    if packing:
        segments = torch.tensor(batch["segment_ids"])
        labels = torch.where(segments[:, 1:] == segments[:, :-1], labels, -100)
    is_trained = labels != -100
    ours, theirs, last = (
        torch.log_softmax(torch.tensor(logits_of(name, batch))[:, :-1], -1)[is_trained]
        for name in (student, folder, output)
    )
    entropy, tuned = (
        torch.nn.functional.nll_loss(x, labels[is_trained]) for x in (ours, last)
    )
    gap = (theirs.exp() * (theirs - ours)).sum(-1).mean()
    assert len(losses) == 3
    np.testing.assert_allclose(losses[0], entropy + 0.5 * gap, rtol=1e-5)
    assert losses[1] < losses[0]
    # Evaluations have no divergence, also of batches before `until_step`.
    np.testing.assert_allclose(metrics[-1]["evaluation_loss"], tuned, rtol=1e-5)
    # The student that is its own teacher has no divergence from it.
    own = ["--teacher", student, "--output", tmp_path / "own"]
    run(*common, *own)
    first = metrics_of(tmp_path / "own.run")[0]["loss"]
    np.testing.assert_allclose(first, entropy, rtol=1e-5)


def logits_of(folder, batch):
    """By zinf, whose logits are torch's, for packed rows too."""
    model = hf.load(folder)
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    return np.array(jax.jit(model.logits)(params_of(reloaded(folder)), inputs))


def test_teachers_that_cannot_teach_are_refused_by_name(tmp_path):
    student = model_folder(tmp_path / "student")
    wider = model_folder(tmp_path / "wider", vocab_size=VOCAB + 8)
    shorter = model_folder(tmp_path / "shorter", max_position_embeddings=8)
    other = model_folder(tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    swapped = text.replace('"w1"', '"w"').replace('"w2"', '"w1"').replace('"w"', '"w2"')
    (other / "tokenizer.json").write_text(swapped)
    common = ["finetune", student, "--data", data_file(tmp_path), "--steps", 1]
    common += ["--output", tmp_path / "out", "--teacher"]
    wanted = {
        (other,): "'w1' is token",
        (wider,): f"has {VOCAB + 8} words, and",
        (shorter, "--sequence-length", 16): "reads 8 tokens, and rows have 16",
        (student, "--objective", "dpo"): "data.objective dpo",
        (student, "--set", "distillation.step=3"): "distillation.step",
    }
    for options, words in wanted.items():
        text = run(*common, *options, code=2).output
        assert words in " ".join(text.split()), text
    assert not (tmp_path / "out").exists()


def grouped(**changes):
    parts = {"q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8}
    parts |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "n_shared_experts": 1}
    routes = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2}
    routes |= {"topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 16}
    return transformers.DeepseekV3Config(
        **SMALL | {"num_key_value_heads": 4} | parts | routes | changes
    )


def test_what_cannot_be_pruned_is_refused_by_name(tmp_path):
    data, plain = data_of(tmp_path), model_folder(tmp_path / "plain")
    mixed, groups = model_folder(tmp_path / "mixed"), model_folder(tmp_path / "groups")
    both = tmp_path / "both"
    make(config_of("marian")).save_pretrained(both)
    save(mixture(), mixed)
    make(grouped()).save_pretrained(groups)

    def command(folder, *options):
        common = ["--output", tmp_path / "out", "--sequence-length", LENGTH]
        return lambda: run("prune", folder, *common, *options, code=2).output

    wanted = {
        command(mixed): "Give one of --experts and --layers",
        command(mixed, "--experts", 4): "no texts are given: --data FILE",
        command(mixed, "--experts", 9, "--data", data): "chooses 2. Keep 2 to 8",
        command(mixed, "--experts", 1, "--data", data): "1 experts are to be kept",
        command(plain, "--experts", 4, "--data", data): "has no routed experts",
        command(groups, "--experts", 4, "--data", data): "are in 2 groups",
        command(plain, "--layers", "0,7"): "has layers 0 to 1",
        command(plain, "--layers", "a"): "must be numbers with commas",
        # The decoder has a number of layers of its own.
        command(both, "--layers", "1"): "would have other tensors than the parts",
    }
    for call, words in wanted.items():
        assert words in " ".join(call().split())
    assert not (tmp_path / "out").exists()
