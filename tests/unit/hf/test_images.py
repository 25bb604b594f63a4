"""Models that read images: what torch computes, trains and writes."""

import base64
import json

import numpy as np
import optax
import pytest
import yaml

from tests.command import run
from tests.marks import drawn
from tests.unit.hf.models import metrics_of, off, on_tier, params_of, refusals, write
from zinf.core.config import Config
from zinf.core.config.adapter import Adapter

pytest.importorskip("torchax", reason="needs torch and more: pip install '.[hf]'")

from tests.unit.hf.images import (  # isort: skip
    CHAT,
    IMAGE,
    MARKS,
    PROCESSORS,
    QWEN,
    TABLE,
    batch_of,
    config_of,
    in_torch,
    make,
    model_folder,
    picture,
    processor_folder,
    reloaded,
    tokenizer,
    torch_loss,
)

import jax  # isort: skip
from PIL import ExifTags, Image  # isort: skip
import torch  # isort: skip
import transformers  # isort: skip
from safetensors.torch import load_file, save_file  # isort: skip

import zinf  # isort: skip
from zinf import hf  # isort: skip
from tokenizers.processors import TemplateProcessing  # isort: skip
from zinf.hf.dataset import tokenized  # isort: skip
from zinf.hf.engine import adapted_model  # isort: skip
from zinf.hf.export import save_small_files  # isort: skip
from zinf.hf.images.kind import bucket_of, sizes  # isort: skip
from zinf.hf.images.samples import ImageSamples, ImageTokenizing  # isort: skip
from zinf.hf.images.sources import in_parts, opened  # isort: skip
from zinf.hf.records import as_parts  # isort: skip
from zinf.hf.samples import Tokenizing  # isort: skip
from zinf.inference import Scores  # isort: skip

# As for models of text: see `test_architectures`.
LOGITS, GRADIENTS, LOSSES = 2e-6, 1e-5, 1e-6
# No image, one and three; a row of three, beside which the others are filled.
COUNTS = (0, 1, 3)
FIXED = ("gemma3", "idefics3", "llava", "qwen2_5_vl", "smolvlm")
TOKENIZING = {
    "sequence_length": 64,
    "too_long": "error",
    "completion_only": True,
    "assistant_only": False,
}
SPLIT = ("idefics3", "smolvlm")
OTHERS = [name for name in TABLE if name not in FIXED]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FIXED, *drawn(OTHERS, 1)])
def test_logits_and_gradients_are_those_of_torch(name, tmp_path):
    torch_model = make(name)
    torch_model.save_pretrained(tmp_path)
    model = hf.load_with_images(tmp_path)
    batch, images = batch_of(model, COUNTS)
    model.check(batch)
    wanted = torch_model(**in_torch(name, batch, images), use_cache=False).logits
    torch_loss(wanted, batch["labels"]).backward()

    def loss(params, batch):
        return model.loss(params, batch).mean, model.logits(params, batch)

    params = {n: np.array(x) for n, x in params_of(torch_model).items()}
    compiled = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (_, logits), gradients = compiled(params, batch)
    assert off(logits, wanted.detach().numpy()) < LOGITS
    theirs = {n: p.grad for n, p in torch_model.named_parameters()}
    largest = max(float(g.abs().max()) for g in theirs.values() if g is not None)
    for path, gradient in gradients.items():
        given = theirs[path]
        given = np.zeros_like(gradient) if given is None else given.numpy()
        scale = max(np.abs(given).max(), 1e-3 * largest)
        assert np.abs(gradient - given).max() < GRADIENTS * scale, path


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl"])
def test_a_batch_without_images_has_the_logits_of_torch(name, tmp_path):
    torch_model = make(name)
    torch_model.save_pretrained(tmp_path)
    model = hf.load_with_images(tmp_path)
    batch, images = batch_of(model, (0, 0))
    model.check(batch)
    wanted = torch_model(**in_torch(name, batch, images), use_cache=False).logits
    params = {n: np.array(x) for n, x in params_of(torch_model).items()}
    logits = jax.jit(model.logits)(params, batch)
    assert off(logits, wanted.detach().numpy()) < LOGITS


@pytest.mark.slow
def test_losses_are_equal_to_the_bit_on_three_tiers_and_those_of_torch(tmp_path):
    name = "idefics3"
    torch_model = make(name)
    torch_model.save_pretrained(tmp_path / "model")
    batch, images = batch_of(hf.load_with_images(tmp_path / "model"), COUNTS)
    found = {}
    for tier in ("device", "host", "nvme"):
        config = on_tier(tier, tmp_path)
        config["segment"] = {"max_bytes": 50_000, "remat": "always"}
        model = hf.load_with_images(tmp_path / "model")
        with hf.initialize(model, optax.sgd(0.1), config, batch=batch) as engine:
            found[tier] = [engine.step(batch)["loss"] for _ in range(3)]
    assert found["device"] == found["host"] == found["nvme"]
    tx, wanted = torch.optim.SGD(torch_model.parameters(), lr=0.1), []
    for _ in range(3):
        tx.zero_grad()
        logits = torch_model(**in_torch(name, batch, images), use_cache=False).logits
        loss = torch_loss(logits, batch["labels"])
        loss.backward()
        tx.step()
        wanted.append(loss.item())
    assert found["host"] == pytest.approx(wanted, rel=LOSSES)
    assert wanted[2] < wanted[0]


# As for models of text: see `test_divided`.
BOUND = 16 * 2.0**-23


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stage", "axes"),
    [
        ("llava", 3, {"num_replicas": 2}),
        ("qwen2_5_vl", 3, {"num_tensor": 2}),
    ],
)
def test_devices_divide_images_and_losses_stay(name, stage, axes, tmp_path):
    make(name).save_pretrained(tmp_path)
    batch, _ = batch_of(hf.load_with_images(tmp_path), (0, 1, 3, 1, 2, 0, 1, 2))
    found = {}
    for count, more, zero in ((1, {}, 0), (4, axes, stage)):
        mesh = zinf.make_mesh(jax.devices()[:count], **more)
        config = {"zero_optimization": {"stage": zero}, "persistence_threshold": 1}
        config["gradient_clipping"] = 0.05
        model, named = hf.load_with_images(tmp_path), {"batch": batch, "mesh": mesh}
        with hf.initialize(model, optax.adamw(1e-3), config, **named) as engine:
            metrics = [engine.step(batch) for _ in range(2)]
            if axes.get("num_tensor") and count > 1:
                layouts = engine.residents.layouts.arrays.values()
                assert any("tensor" in x.layout.computed.spec for x in layouts)
        found[count] = [m[key] for m in metrics for key in ("loss", "grad_norm")]
    np.testing.assert_allclose(found[4], found[1], rtol=BOUND)
    assert found[1][2] < found[1][0]


@pytest.mark.parametrize("name", TABLE)
def test_every_class_is_traced_in_bfloat16_by_the_shapes_of_its_leaves(name, tmp_path):
    config_of(name).save_pretrained(tmp_path)
    model = hf.load_with_images(tmp_path)
    kind, tokens = model.kind, jax.ShapeDtypeStruct((2, 16), np.int32)
    batch = {"input_ids": tokens} | kind.specs(2, 4 * kind.unit, 16)
    assert batch.keys() == {"input_ids", *kind.leaves}
    specs = model.specs.items()
    params = {n: jax.ShapeDtypeStruct(s.shape, "bfloat16") for n, s in specs}
    found = jax.eval_shape(model.logits, params, batch)
    assert (found.shape, found.dtype) == ((2, 16, 96), "bfloat16")


def test_buckets_are_few_and_never_half_empty():
    assert sizes(20) == [1, 2, 3, 4, 6, 8, 12, 16, 20]
    assert sizes(64, 4) == [4, 8, 12, 16, 24, 32, 48, 64]
    assert sizes(1) == [1]
    assert bucket_of(0, 5) == 1 and bucket_of(5, 5) == 5
    for room, unit in ((1000, 1), (16384, 4)):
        found = sizes(room, unit)
        assert all(
            b <= 2 * a and b % unit == 0 for a, b in zip(found, found[1:], strict=False)
        )
        assert len(found) < 2 * np.log2(room / unit) + 2


def chats(folder, count=4):
    """Records with one to three images, in one or two turns, named in all ways."""
    lines = []
    for i in range(count):
        picture(i).save(folder / f"{i}.png")
        content = (folder / f"{i}.png").read_bytes()
        places = [{"type": "image"}] * (i % 2 + 1)
        images = [f"{i}.png", base64.b64encode(content).decode()][: len(places)]
        messages = [
            {"role": "user", "content": [*places, {"type": "text", "text": f"w{i}"}]},
            {"role": "assistant", "content": f"w{i} w{i + 1}"},
        ]
        if i > 1:
            picture(9, 12, 12).save(folder / "more.png")
            own = {"type": "image", "path": "more.png"}
            messages += [
                {"role": "user", "content": [own, {"type": "text", "text": "w7"}]},
                {"role": "assistant", "content": [{"type": "text", "text": "w8"}]},
            ]
        lines.append({"messages": messages, "images": images})
    return write(folder / "chats.jsonl", lines)


def wanted_loss(torch_model, folder, data):
    """The mean over all trained tokens, of what `transformers` reads from the files."""
    model = hf.load_with_images(folder)
    how = ImageTokenizing.of(model, **TOKENIZING)
    processor, total, count = how.reader.processor, 0.0, 0
    for record in how.records(data):
        reading = how.read(*record)
        ids, labels = reading.samples[0]
        line, _ = in_parts(*record[:2])
        text = processor.apply_chat_template(line["messages"])
        pictures = [opened(x, "") for x in reading.beside[0].contents]
        given = processor(text=[text], images=[pictures], return_tensors="pt")
        assert given["input_ids"][0].tolist() == ids
        with torch.no_grad():
            logits = torch_model(**given, use_cache=False).logits[0, :-1]
        wanted = torch.tensor(labels[1:])
        total += torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")
        count += int((wanted != hf.IGNORED).sum())
    return float(total) / count


@pytest.mark.slow
def test_the_command_trains_on_chats_with_images(tmp_path):
    name = "qwen2_vl"
    data = chats(tmp_path)
    folder = model_folder(name, tmp_path / "model")
    torch_model = reloaded(folder)
    wanted = wanted_loss(torch_model, folder, data)
    losses = {}
    for parts in (1, 2):
        output = tmp_path / f"tuned{parts}"
        run(
            *("finetune", folder, "--data", data, "--output", output),
            *("--samples", 4, "--steps", 4, "--learning-rate", 1e-2),
            *("--sequence-length", 64, "--eval-data", data, "--freeze-vision-tower"),
            *("--set", "bf16.enabled=false", "--set", "execution=streamed"),
            *("--set", f"gradient_accumulation_steps={parts}"),
        )
        lines = metrics_of(tmp_path / f"tuned{parts}.run")
        losses[parts] = [x["loss"] for x in lines if "loss" in x]
        # All rows are evaluated, with the weights after the last step.
        last = [x["evaluation_loss"] for x in lines if "evaluation_loss" in x][-1]
        tuned = reloaded(output)
        assert last == pytest.approx(wanted_loss(tuned, output, data), rel=LOSSES)
        assert last < losses[parts][-1] < losses[parts][0]
    assert losses[1][0] == pytest.approx(wanted, rel=LOSSES)
    # No mean depends on microbatches.
    assert losses[1] == pytest.approx(losses[2], rel=LOSSES)
    config = yaml.safe_load((tmp_path / "tuned1.run/finetune.yaml").read_text())
    assert config["data"]["images"] == 80
    before, after = torch_model.state_dict(), tuned.state_dict()
    changed = {n for n, x in before.items() if not torch.equal(x, after[n])}
    assert changed == {n for n in before if not n.startswith("model.visual.")}


def test_batches_have_the_smallest_bucket_of_all_their_rows(tmp_path):
    folder = tmp_path / "model"
    config_of("qwen2_vl").save_pretrained(folder)
    processor_folder("qwen2_vl", folder)
    data = chats(tmp_path)
    config = Config.load(
        {
            "model": {"huggingface": str(folder)},
            "data": {"paths": [str(data)], "sequence_length": 64, "images": 200},
            "run": {"output": str(tmp_path / "run")},
            "train_batch_size": 2,
        }
    )
    task = hf.Task(config)
    spec, batches = task.batch_spec(2), iter(task.dataset("train"))
    assert spec["pixel_values"].shape == (2, 200, 96)
    rows = task.rows()
    needed = [
        int(
            task.model.kind.num_given(
                {n: x[None] for n, x in rows[i].items() if n in task.model.kind.leaves}
            )[0]
        )
        for i in range(len(rows))
    ]
    assert needed == [32, 64, 48, 80]
    seen = set()
    for _ in range(6):
        batch = next(batches)
        task.model.check(batch)
        most = max(task.model.kind.num_given(batch))
        room = batch["pixel_values"].shape[1]
        assert room == bucket_of(most, 200, 4) and room < 200
        assert batch["patch_segments"].shape == (2, room)
        seen.add(room)
    assert len(seen) > 1


def test_a_frozen_tower_gets_no_adapters_and_named_modules_do(tmp_path):
    config_of("llava").save_pretrained(tmp_path)
    model = hf.load_with_images(tmp_path, trains_tower=False)
    batch, _ = batch_of(model, (1, 2))
    assert {model.is_of_tower(n) for n in model.untrained} == {True}
    for section in ({}, {"exclude_modules": ".*lm_head"}, {"exclude_modules": ["fc1"]}):
        found = adapted_model(model, Adapter(r=2, **section), batch=batch)
        assert found.targets and not any(map(model.is_of_tower, found.targets))
    whole = hf.load_with_images(tmp_path)
    found = adapted_model(whole, Adapter(r=2), batch=batch).targets
    assert any(map(model.is_of_tower, found))
    names = ["multi_modal_projector.linear_1"]
    named = adapted_model(whole, Adapter(r=2, target_modules=names), batch=batch)
    assert [*named.targets] == ["model.multi_modal_projector.linear_1.weight"]


def test_config_json_says_the_dtype_of_text_and_images_too(tmp_path):
    config_of("gemma3", dtype="float32").save_pretrained(tmp_path)
    output = tmp_path / "tuned"
    output.mkdir()
    save_small_files(hf.load_with_images(tmp_path), output, "bfloat16")
    found = json.loads((output / "config.json").read_text())
    parts = (found, found["text_config"], found["vision_config"])
    assert [part["dtype"] for part in parts] == ["bfloat16"] * 3


def test_images_of_all_forms_are_read(tmp_path):
    config_of("llava").save_pretrained(tmp_path)
    processor_folder("llava", tmp_path)
    how = ImageTokenizing.of(hf.load_with_images(tmp_path), **TOKENIZING)
    image = picture(0)
    image.save(tmp_path / "0.png")
    content = (tmp_path / "0.png").read_bytes()
    text = base64.b64encode(content).decode()
    # As cameras store what they saw: to be turned by 90 degrees before it is shown.
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    image.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "90.png", exif=exif)
    forms = [
        *("0.png", tmp_path / "0.png", text, f"data:image/png;base64,{text}", image),
        *({"path": "0.png"}, {"bytes": content}, {"bytes": content, "path": "x"}),
        *("90.png", Image.open(tmp_path / "90.png")),
    ]
    ask = {"role": "user", "content": "w1"}
    answer = {"role": "assistant", "content": "w2"}
    marked = {"type": "text", "text": "<image>w1"}
    url = {"type": "image_url", "image_url": {"url": forms[3]}}
    lines = [{"messages": [ask, answer], "images": [form]} for form in forms]
    lines += [
        {"messages": [ask, answer], "image": "0.png"},
        {"prompt": [ask], "completion": [answer], "images": ["0.png"]},
        {
            "messages": [
                {**ask, "content": [url, {"type": "text", "text": "w1"}]},
                answer,
            ]
        },
        {"messages": [{**ask, "content": "<image>w1"}, answer], "images": ["0.png"]},
        {"messages": [{**ask, "content": [marked]}, answer], "images": ["0.png"]},
        {
            "conversations": [
                {"from": "human", "value": "<image>w1"},
                {"from": "gpt", "value": "w2"},
            ],
            "image": "0.png",
        },
    ]
    found = [how.read(line, "line", tmp_path) for line in lines]
    ids = [4, *[IMAGE] * 4, 6, 3, 7, 1]
    for reading in found:
        assert reading.samples == ((ids, [*[hf.IGNORED] * 7, 7, 1]),)
        (one,) = reading.beside[0].contents
        assert np.array_equal(np.asarray(opened(one, "")), np.asarray(image))


def test_a_text_begins_once_beside_images_and_a_prompt_does_not_end(tmp_path):
    """Texts as without images, and conversations as the processor lays them out."""
    config_of("llava").save_pretrained(tmp_path)
    processor_folder("llava", tmp_path)
    how = ImageTokenizing.of(hf.load_with_images(tmp_path), **TOKENIZING)
    processor, first = how.reader.processor, 14
    words = processor.tokenizer
    words.bos_token = "w9"
    tokens = {"special_tokens": [("w9", first), ("</s>", 1)]}
    whole = TemplateProcessing(single="w9 $A </s>", **tokens)
    words._tokenizer.post_processor = whole
    plain = Tokenizing(words, vocab_size=96, **TOKENIZING)
    for text in ("w1 w2", "w9 w1 w2"):
        for line in ({"text": text}, {"prompt": text, "completion": "w3"}):
            assert how.read(line, "line").samples == plain.read(line, "line").samples
    words._tokenizer.post_processor = TemplateProcessing(single="w9 $A", **tokens)
    image = picture(0)
    image.save(tmp_path / "0.png")
    own = {"type": "image", "image": image}, {"type": "text", "text": "w1"}
    for chat in (CHAT, "w9 " + CHAT):
        how.reader.chat_template = chat.replace("PLACE", MARKS["llava"])
        record = {"messages": said(1), "images": ["0.png"]}
        (sample,) = how.read(record, "line", tmp_path).samples
        ids, labels = sample
        talk = [{"role": "user", "content": [*own]}, as_parts(said(1)[1])]
        wanted = processor.apply_chat_template(
            talk, chat_template=how.reader.chat_template, tokenize=True
        )
        assert ids == list(*wanted) and ids.count(first) == 1
        assert [x for x in labels if x != hf.IGNORED] == [7, 1]


# Settings of an image processor that make other sizes, and others that make other
# numbers of tokens, for models of each family.
OTHER_SIZES = {
    "llava": {"crop_size": {"height": 16, "width": 16}},
    "gemma3": {"size": {"height": 16, "width": 16}},
    **dict.fromkeys(SPLIT, {"max_image_size": {"longest_edge": 16}}),
    **dict.fromkeys(QWEN, {"patch_size": 8}),
}
OTHER_COUNTS = {
    "llava": ("processor", {"num_additional_image_tokens": 3}),
    "gemma3": ("processor", {"image_seq_length": 5}),
    **dict.fromkeys(SPLIT, ("processor", {"image_seq_len": 2})),
    **dict.fromkeys(QWEN, ("preprocessor", {"merge_size": 1})),
}


def said(places=0, text="w1"):
    """A question after places for images, and its answer."""
    parts = [*[{"type": "image"}] * places, {"type": "text", "text": text}]
    answer = {"role": "assistant", "content": "w2"}
    return [{"role": "user", "content": parts}, answer]


def mistakes_with(name, tmp_path):
    """Calls that read bad input for a model of a family, by what is wrong."""
    folder, other = tmp_path / "model", tmp_path / "other"
    config_of(name).save_pretrained(folder)
    processor_folder(name, folder)
    model = hf.load_with_images(folder)
    how = ImageTokenizing.of(model, **TOKENIZING)
    picture(0).save(tmp_path / "0.png")
    batch, _ = batch_of(model, (0, 1))
    data, reward = tmp_path / "data.jsonl", tmp_path / "reward.py"
    reward.write_text("def none(completions, **_): return [0.0] * len(completions)")

    def line(places, count, text="w1", how=how):
        record = {"messages": said(places, text), "images": ["0.png"] * count}
        how.read(record, "line 1", tmp_path)

    def processor_with(file, values, chat=CHAT):
        config_of(name).save_pretrained(other)
        path = processor_folder(name, other, chat) / f"{file}_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
        line(1, 1, how=ImageTokenizing.of(hf.load_with_images(other), **TOKENIZING))

    def rows(room):
        write(data, [{"images": ["0.png"] * 2, "messages": said()}])
        named = {"tokenizer_files": [], "cache": tmp_path / "cache"}
        found = tokenized([data], how, **named)
        where = {"length": 64, "padding": 0, "first": 0, "last": 1}
        ImageSamples(found, model, room=room, **where)

    def prompts(room):
        write(data, [{"images": ["0.png"] * 2, "prompt": said()[:1]}])
        section = {"paths": [data], "objective": "grpo", "images": room}
        raw = {"model": {"huggingface": str(folder)}, "train_batch_size": 2}
        raw["data"] = section | {"sequence_length": 64}
        raw["grpo"] = {"rewards": [f"{reward}:none"], "num_generations": 2}
        raw["grpo"]["max_completion_length"] = 1
        hf.Task(Config.load(raw)).dataset("train")

    def mixed():
        """A weight in the form of compressed-tensors, in files of GPTQ."""
        make(name).save_pretrained(tmp_path / "mixed")
        path = tmp_path / "mixed" / "model.safetensors"
        tensors = load_file(path)
        first = min(n for n in tensors if n.endswith("gate_proj.weight"))
        tensors[f"{first}_packed"] = tensors.pop(first).to(torch.int32)
        save_file(tensors, path, metadata={"format": "pt"})
        path = path.with_name("config.json")
        method = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
        path.write_text(json.dumps(json.loads(path.read_text()) | method))
        hf.load_with_images(path.parent).check_files()

    mark, is_patches = MARKS[name], name in QWEN
    other_class, *_ = PROCESSORS["gemma3" if name == "llava" else "llava"]
    _, image_class, settings, _ = PROCESSORS["llava" if is_patches else "qwen2_vl"]
    other_images = settings | {"image_processor_type": image_class}
    rows(200)
    prompts(200)
    return {
        "more images than places": lambda: line(1, 2),
        "an image is missing": lambda: line(2, 1),
        "a place by a word of the text": lambda: line(1, 1, f"w1 {mark}"),
        "a place by a word, and no images": lambda: line(0, 0, f"w1 {mark}"),
        "a template without places": lambda: processor_with(
            "processor", {}, CHAT.replace("PLACE ", "")
        ),
        "a grid beyond the buckets": lambda: rows(1),
        "a grid of a prompt beyond the buckets": lambda: prompts(1),
        "a processor of another model": lambda: processor_with(
            "processor", {"processor_class": other_class}
        ),
        "an image processor of another model": lambda: processor_with(
            "preprocessor", other_images
        ),
        "images of another size": lambda: processor_with(
            "preprocessor", OTHER_SIZES[name]
        ),
        "other numbers of tokens": lambda: processor_with(*OTHER_COUNTS[name]),
        "mixed quantization": mixed,
        "a batch with too few images": lambda: model.check(
            {n: batch[n] for n in ("input_ids", "labels")}
        ),
        "a batch with too many images": lambda: model.check(
            {n: np.ones_like(x) for n, x in batch.items()}
        ),
    }


def test_bad_input_is_refused_by_name(tmp_path, golden):
    folder = tmp_path / "model"
    config_of("gemma3").save_pretrained(folder)
    processor_folder("gemma3", folder)
    model = hf.load_with_images(folder)
    how = ImageTokenizing.of(model, **TOKENIZING)
    picture(0).save(tmp_path / "0.png")
    (tmp_path / "bad.png").write_bytes(b"no image")
    transformers.Blip2Config().save_pretrained(tmp_path / "blip")
    batch, _ = batch_of(model, (1,))

    def line(image, text="w1", **fields):
        record = {"messages": said(1, text), "images": [image]} | fields
        how.read(record, "line 1", tmp_path)

    def without_processor():
        config_of("gemma3").save_pretrained(tmp_path / "none")
        ImageTokenizing.of(hf.load_with_images(tmp_path / "none"), **TOKENIZING)

    def task(key, paths, **data):
        given = {"huggingface": str(folder), key: True}
        settings = {"paths": paths, "sequence_length": 64} | data
        return hf.Task(Config.load({"model": given, "data": settings}))

    texts = [str(write(tmp_path / "texts.jsonl", [{"text": "w1 w2"}]))]
    mistakes = {
        "a frozen tower, and no images in a command": task(
            "freeze_vision_tower", texts
        ).settings_of_data,
        "a frozen tower, and no files": task(
            "freeze_vision_tower", "stdlib"
        ).settings_of_data,
        "a frozen tower, and a config without images": lambda: (
            task("freeze_vision_tower", texts).model
        ),
        "an attention of images, and no images": task(
            "multimodal_attention", texts, images=1
        ).check_files,
        "a class that is not supported": lambda: hf.load_with_images(tmp_path / "blip"),
        "no file": lambda: line("1.png"),
        "no image": lambda: line(3),
        "an unreadable file": lambda: line("bad.png"),
        "an image elsewhere": lambda: line("https://example.com/0.png"),
        "no base64": lambda: line("data:image/png;base64,!"),
        "images beside a text": lambda: line("0.png", messages=None, text="w1"),
        "a long sample": lambda: line("0.png", text="w1 " * 80),
        "no processor": without_processor,
        "several samples in a row": model.check_packing,
        "dropped tokens": model.check_dropping,
        "a batch with another leaf": lambda: model.logits(
            {}, batch | {"position_ids": batch["input_ids"]}
        ),
    }
    for name in TABLE:
        (tmp_path / name).mkdir()
        found = mistakes_with(name, tmp_path / name).items()
        mistakes |= {f"{name}: {mistake}": call for mistake, call in found}
    golden.check("images.txt", refusals(mistakes, tmp_path))
    for section in (
        {"packing": True},
        {"objective": "classification"},
        {"too_long": "truncate"},
    ):
        raw = {"model": {"huggingface": "x"}, "data": {"images": 1} | section}
        found = "images: (is not supported|has no effect) with data"
        with pytest.raises(ValueError, match=found):
            Config.load(raw)


def written(torch_model, folder, text, images):
    """The tokens that transformers writes, and the prompt, by its own processor."""
    model = hf.load_with_images(folder)
    processor = ImageTokenizing.of(model, **TOKENIZING).reader.processor
    parts = [*[{"type": "image"}] * len(images), {"type": "text", "text": text}]
    messages = [{"role": "user", "content": parts}]
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True)
    given = processor(text=[prompt], images=[images], return_tensors="pt")
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 2}
    found = torch_model.generate(**given, max_new_tokens=8, **options)
    length = given["input_ids"].shape[1]
    return found[0, :length].tolist(), found[0, length:].tolist()


@pytest.mark.slow
# The template of SmolVLM's class asks for a processor of videos, and zinf's does not.
@pytest.mark.parametrize("name", ["llava", *drawn(("gemma3", "idefics3", *QWEN), 2)])
def test_greedy_tokens_after_images_are_those_of_transformers(name, tmp_path):
    folder = model_folder(name, tmp_path / "model")
    images = [picture(0), picture(1, 12, 12)]
    files = [tmp_path / f"{i}.png" for i in range(2)]
    for image, file in zip(images, files, strict=True):
        image.save(file)
    torch_model = reloaded(folder)
    prompt, wanted = written(torch_model, folder, "w1 w2", images)
    model = hf.load_with_images(folder)
    seen = hf.image_prompt(model, "w1 w2", files)
    assert seen.tokens.tolist() == prompt
    host, likelihoods = on_tier("host", tmp_path), []
    for config, rows in (({}, 1), (host, 1), ({}, 2), ({"mesh": {"fsdp": 2}}, 2)):
        with hf.open_model(model, config, rows=rows, length=64) as engine:
            decoder = hf.decoder_after(engine, seen)
            rest = {"decoder": decoder, "rows": rows, "max_new_tokens": 8}
            # One more than there are rows; devices divide these.
            prompts = [seen.tokens] * (2 * rows - 1)
            for text in engine.generate(prompts, **rest, scores=Scores()):
                assert text.tokens == wanted
                likelihoods.append(text.log_probabilities)
    for found in likelihoods:
        np.testing.assert_allclose(found, likelihoods[0], rtol=1e-5)


@pytest.mark.slow
def test_the_command_writes_after_images(tmp_path):
    folder = model_folder("llava", tmp_path / "model")
    picture(0).save(tmp_path / "0.png")
    (tmp_path / "bad.png").write_bytes(b"no image")
    ask = "generate", folder, "--prompt", "w1", "--max-new-tokens", 4
    shown = run(*ask, "--image", tmp_path / "0.png", "--set", "memory.host=1GiB")
    _, wanted = written(reloaded(folder), folder, "w1", [picture(0)])
    words = tokenizer("llava").decode(wanted[:4], skip_special_tokens=True)
    assert shown.stdout.strip() == words.strip()
    for options, error in (
        (("--image", tmp_path / "bad.png"), "the image cannot be read"),
        (("--image", tmp_path / "1.png"), "there is no image"),
        (("--image", tmp_path / "0.png", "--raw"), "--raw with --image"),
    ):
        assert error in run(*ask, *options, code=None).stderr.replace("\n", " ")
