"""Scores of `lm-eval` with the model `zinf` are those with its model `hf`."""

import json

import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="needs lm-eval: pip install '.[lm-eval]'")

import lm_eval

from tests.unit.hf.models import llama, save, tokenizer
from zinf.lm_eval import StreamedLM


def records():
    random = np.random.default_rng(0)

    def words(count):
        return " ".join(f"w{i}" for i in random.integers(0, 40, count))

    for count in (3, 9, 40):  # The last is longer than the context.
        choices = [words(1), words(2), words(3)]
        yield {"text": words(count), "choices": choices, "answer": 1}


def tasks(folder):
    """A task of each kind of request, on a local file."""
    path = folder / "data.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in records()))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        "doc_to_text": "{{text}}",
    }
    options = {"until": ["w7 w"], "max_gen_toks": 8, "do_sample": False}
    return [
        common
        | {
            "task": "choices",
            "output_type": "multiple_choice",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}",
            "metric_list": [{"metric": "acc"}],
        },
        common
        | {
            "task": "rolling",
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}],
        },
        common
        | {
            "task": "texts",
            "output_type": "generate_until",
            "doc_to_target": "w1",
            "generation_kwargs": options,
            "metric_list": [{"metric": "exact_match"}],
        },
    ]


def answers(model, folder):
    """What a model answered each request with, by task."""
    found = lm_eval.simple_evaluate(
        model=model, tasks=tasks(folder), log_samples=True, bootstrap_iters=0
    )
    samples = found["samples"].items()
    return {task: [line["resps"] for line in lines] for task, lines in samples}


def numbers(resps):
    return np.array([float(total) for one in resps for ((total, _),) in one])


# lm-eval and datasets use what their own dependencies deprecate.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_scores_and_texts_are_those_of_the_model_hf(tmp_path, monkeypatch):
    pytest.importorskip("accelerate", reason="the model hf of lm-eval needs it")
    from lm_eval.models.huggingface import HFLM

    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    save(llama(eos_token_id=1), tmp_path / "model")
    tokenizer(pad_token="<pad>").save_pretrained(tmp_path / "model")
    theirs = HFLM(pretrained=str(tmp_path / "model"), device="cpu", batch_size=2)
    wanted = answers(theirs, tmp_path)
    model = lm_eval.api.registry.get_model("zinf")
    assert model is StreamedLM
    ours = model.create_from_arg_string(
        f"pretrained={tmp_path / 'model'},nvme={tmp_path / 'nvme'},"
        "memory.host=1GiB,persistence_threshold=0",
        {"batch_size": 2, "device": "cpu"},
    )
    assert ours._prefill._config.memory.host == 2**30
    found = answers(ours, tmp_path)
    ours.close()
    assert found["texts"] == wanted["texts"]
    for name in ("choices", "rolling"):
        assert str(found[name]).count("True") == str(wanted[name]).count("True")
    np.testing.assert_allclose(
        numbers(found["choices"]), numbers(wanted["choices"]), rtol=1e-5
    )
    np.testing.assert_allclose(
        np.array(found["rolling"], float), np.array(wanted["rolling"], float), rtol=1e-5
    )


@pytest.mark.parametrize(
    ("context", "rest"), [([3], [4] * 17), ([3], []), ([], [4])], ids=str
)
def test_what_has_no_score_is_refused(context, rest, tmp_path):
    """As `hf` asserts: a continuation that was cut had the score of one token."""
    save(llama(eos_token_id=1), tmp_path)
    tokenizer(pad_token="<pad>").save_pretrained(tmp_path)
    model = StreamedLM(str(tmp_path), max_length=16, batch_size="auto:4")
    assert model.batch_size == 64
    with pytest.raises(ValueError, match="at most max_length = 16 are scored"):
        model._loglikelihood_tokens([(("a", "b"), context, rest)])
    with pytest.raises(ValueError, match="batch_size is 'many'"):
        StreamedLM(str(tmp_path), batch_size="many")
