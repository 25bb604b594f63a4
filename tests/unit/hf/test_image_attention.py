"""Multi-modal causal attention of models: by torch's formula, cached, and exported."""

import json

import numpy as np
import pytest

from tests.command import run
from tests.unit.hf.models import metrics_of, off, params_of, write
from zinf.core.config import Config

pytest.importorskip("torchax", reason="needs torch and more: pip install '.[hf]'")

from tests.unit.hf.images import (  # isort: skip
    IMAGE,
    batch_of,
    config_of,
    in_torch,
    make,
    model_folder,
    picture,
    reloaded,
)

import jax  # isort: skip
import torch  # isort: skip
from transformers import AttentionInterface  # isort: skip

from zinf import hf  # isort: skip
from zinf.hf.images.completion import with_text  # isort: skip


def by_the_paper(is_image):
    """Attention of text layers: two softmaxes, which are added up."""

    def attend(module, query, key, value, mask, scaling=None, **_):
        del mask
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        scores = query @ key.transpose(2, 3) * scaling
        seen = torch.ones(scores.shape[-2:]).tril().bool()
        out = torch.zeros_like(query @ key.transpose(2, 3) @ value)
        for kind in (is_image, ~is_image):
            keys = seen & kind[:, None, None]
            weights = torch.softmax(scores.masked_fill(~keys, -torch.inf), dim=-1)
            out = out + torch.where(keys, weights, 0.0) @ value
        out = torch.where(is_image[:, None, :, None], value, out)
        return out.transpose(1, 2), None

    return attend


@pytest.mark.parametrize("name", ["llava", "idefics3", "qwen3_vl"])
def test_logits_are_those_of_two_softmaxes_and_gradients_too(name, tmp_path):
    torch_model = make(name)
    torch_model.save_pretrained(tmp_path)
    model = hf.load_with_images(tmp_path, multimodal_attention=True)
    batch, images = batch_of(model, (0, 1, 2))
    is_image = torch.tensor(batch["input_ids"] == IMAGE)
    AttentionInterface.register("paper", by_the_paper(is_image))
    inner = torch_model.model
    inner = getattr(inner, "text_model", None) or inner.language_model
    inner.config._attn_implementation = "paper"
    wanted = torch_model(**in_torch(name, batch, images), use_cache=False).logits
    wanted.square().sum().backward()

    def total(params, batch):
        logits = model.logits(params, batch)
        return jax.numpy.square(logits).sum(), logits

    params = {n: np.array(x) for n, x in params_of(torch_model).items()}
    compiled = jax.jit(jax.value_and_grad(total, has_aux=True))
    (_, logits), gradients = compiled(params, batch)
    assert off(logits, wanted.detach().numpy()) < 2e-6
    theirs = {n: p.grad for n, p in torch_model.named_parameters()}
    largest = max(float(g.abs().max()) for g in theirs.values() if g is not None)
    for path, gradient in gradients.items():
        given = theirs[path]
        given = np.zeros_like(gradient) if given is None else given.numpy()
        scale = max(np.abs(given).max(), 1e-3 * largest)
        assert np.abs(gradient - given).max() < 1e-5 * scale, path
    plain = jax.jit(hf.load_with_images(tmp_path).logits)(params, batch)
    rows = np.abs(plain - logits).max(axis=(1, 2)) > 1e-3
    assert rows.tolist() == [False, True, True]


def test_a_tuned_model_says_how_it_attends_and_writes_so(tmp_path):
    folder, output = model_folder("qwen2_vl", tmp_path / "model"), tmp_path / "tuned"
    picture(0).save(tmp_path / "0.png")
    ask, answer = ({"role": r, "content": "w1 w2"} for r in ("user", "assistant"))
    lines = [{"messages": [ask, answer], "images": ["0.png"]}] * 2
    data = write(tmp_path / "chats.jsonl", lines)
    given = "finetune", folder, "--data", data, "--steps", 2, "--samples", 2
    given += "--sequence-length", 64
    given += "--set", "bf16.enabled=false", "--learning-rate", 1e-2
    run(*given, "--output", output, "--multimodal-attention")
    run(*given, "--output", tmp_path / "plain")
    losses = [metrics_of(tmp_path / f"{n}.run")[0]["loss"] for n in ("tuned", "plain")]
    assert abs(losses[0] - losses[1]) > 1e-3
    config = json.loads((output / "config.json").read_text())
    assert config["multimodal_causal_attention"] is True
    assert "text sees images by a softmax" in (output / "README.md").read_text()
    model = hf.load_with_images(output)
    assert model.is_multimodal and not hf.load_with_images(folder).is_multimodal
    # Tokens that are written with a cache are those of whole passes without one.
    seen = hf.image_prompt(model, "w1 w2", [tmp_path / "0.png"])
    with hf.open_model(model, {}, rows=1, length=64) as engine:
        rest = {"decoder": hf.decoder_after(engine, seen), "rows": 1}
        (found,) = engine.generate([seen.tokens], max_new_tokens=6, **rest)
    params = {n: np.array(x) for n, x in params_of(reloaded(output)).items()}
    ids = seen.tokens
    for token in found:
        places = {"position_ids": with_text(seen.leaves["position_ids"], len(ids))}
        where = {"room": len(seen.leaves["pixel_values"]), "length": 64}
        leaves = model.kind.filled({**seen.leaves, **places}, **where)
        padded = np.pad(ids, (0, 64 - len(ids)))[None]
        batch = {"input_ids": padded} | {n: x[None] for n, x in leaves.items()}
        logits = jax.jit(model.logits)(params, batch)[0, len(ids) - 1]
        assert int(logits.argmax()) == token
        ids = np.append(ids, np.int32(token))


def test_adapters_say_how_their_model_attends_and_go_on_so(tmp_path):
    folder, output = model_folder("qwen2_vl", tmp_path / "model"), tmp_path / "tuned"
    picture(0).save(tmp_path / "0.png")
    ask, answer = ({"role": r, "content": "w1 w2"} for r in ("user", "assistant"))
    lines = [{"messages": [ask, answer], "images": ["0.png"]}] * 2
    data = write(tmp_path / "chats.jsonl", lines)
    given = "finetune", folder, "--data", data, "--steps", 2, "--samples", 2
    given += "--sequence-length", 64, "--set", "bf16.enabled=false", "--lora", 2
    given += "--learning-rate", 0.1
    run(*given, "--output", output, "--multimodal-attention")
    losses = [x["loss"] for x in metrics_of(tmp_path / "tuned.run")]
    assert losses[1] < losses[0]
    adapter = tmp_path / "tuned.adapter"
    assert "text sees images by a softmax" in (adapter / "README.md").read_text()
    peft = pytest.importorskip("peft")
    assert peft.PeftConfig.from_pretrained(adapter).r == 2
    # A run goes on from it as it attends, and from its merged model too.
    go_on = {
        "more": ("--set", f"adapter.begin_from={adapter}"),
        "apart": ("--multimodal-attention",),
        "plain": (),
    }
    for name, options in go_on.items():
        run(*given, "--output", tmp_path / name, *options)
        (first, *_) = metrics_of(tmp_path / f"{name}.run")
        losses.append(first["loss"])
    assert losses[3] == losses[0] and abs(losses[4] - losses[0]) > 1e-3
    assert losses[2] < losses[1]
    seen, texts = {}, {}
    for place in (output, adapter):
        model = hf.load_with_images(place)
        assert model.is_multimodal
        seen[place] = hf.image_prompt(model, "w1 w2", [tmp_path / "0.png"])
        with hf.open_model(model, {}, rows=1, length=64) as engine:
            rest = {"decoder": hf.decoder_after(engine, seen[place]), "rows": 1}
            prompts = [seen[place].tokens]
            texts[place] = engine.generate(prompts, max_new_tokens=6, **rest)
    assert texts[output] == texts[adapter]


def test_models_without_such_an_attention_are_refused(tmp_path):
    config_of("gemma3").save_pretrained(tmp_path)
    with pytest.raises(NotImplementedError, match="tokens of an image see each other"):
        hf.load_with_images(tmp_path, multimodal_attention=True)
    model = {"huggingface": "x", "multimodal_attention": True}
    raw = {"model": model, "data": {"images": 1, "objective": "reward"}}
    with pytest.raises(ValueError, match="multimodal_attention: is not supported"):
        Config.load(raw)
