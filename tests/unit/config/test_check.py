import pytest

from zinf.config import Config, Status, report


def rows(source):
    return {row.key: row for row in report(source).rows}


def test_there_is_one_row_per_key_in_file_order():
    raw = {
        "train_batch_size": 8,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu"},
            "overlap_comm": True,
        },
        "comms_logger": {"enabled": True, "prof_ops": ["all_gather"]},
        "memory": {"nvme": ["a", "b"]},
    }
    assert [row.key for row in report(raw).rows] == [
        "train_batch_size",
        "zero_optimization.stage",
        "zero_optimization.offload_param.device",
        "zero_optimization.overlap_comm",
        "comms_logger.enabled",
        "comms_logger.prof_ops",
        "memory.nvme",
    ]


@pytest.mark.parametrize(
    ("key", "value", "status"),
    [
        ("train_batch_size", 8, Status.USED),
        ("train_batch_size", "auto", Status.AUTOMATIC),
        ("wall_clock_breakdown", True, Status.AUTOMATIC),
        ("dump_state", True, Status.NO_EFFECT),
        ("dump_state", False, Status.AUTOMATIC),
        ("graph_harvesting", True, Status.MOOT),
        ("sparse_attention", {"mode": "fixed"}, Status.UNSUPPORTED),
        ("amp", {"enabled": False}, Status.AUTOMATIC),
        ("amp", {"enabled": True}, Status.UNSUPPORTED),
        ("zero_optimisation", 3, Status.UNKNOWN),
    ],
)
def test_keys_are_classified(key, value, status):
    (row,) = report({key: value}).rows
    assert row.status is status
    assert row.reason


def test_nested_keys_are_classified_by_their_own_section():
    found = rows(
        {
            "zero_optimization": {
                "stage": 3,
                "reduce_bucket_size": 5e8,
                "sub_group_size": "auto",
                "zero_quantized_gradients": True,
            },
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        }
    )
    section = "zero_optimization"
    assert found[f"{section}.stage"].status is Status.USED
    assert found[f"{section}.reduce_bucket_size"].status is Status.MOOT
    assert found[f"{section}.sub_group_size"].status is Status.AUTOMATIC
    assert found[f"{section}.zero_quantized_gradients"].status is Status.UNSUPPORTED
    assert found["optimizer.params.lr"].status is Status.USED
    assert found["optimizer.params.torch_adam"].status is Status.MOOT


def test_a_wrong_config_is_still_reported_with_its_problems():
    found = report({"train_batch_sise": 8, "run": {"steps": "x"}})
    assert not found.is_valid
    assert len(found.problems) == 2
    assert "Did you mean 'train_batch_size'?" in found.rows[0].reason
    assert "error: run.steps = 'x'" in str(found)


@pytest.mark.parametrize("raw", [{}, {"no_such_key": 1}])
def test_it_says_that_deepspeed_clips_by_default(raw):
    assert any("DeepSpeed clips" in note for note in report(raw).notes)


@pytest.mark.parametrize("value", [1.0, 0, 0.5])
def test_it_is_silent_on_clipping_when_told(value):
    notes = report({"gradient_clipping": value}).notes
    assert not any("clips" in note for note in notes)


def test_auto_clipping_is_said():
    notes = report({"gradient_clipping": "auto"}).notes
    assert any("gradient_clipping 1" in note for note in notes)
    assert not any("zinf clips only when told to" in note for note in notes)


def test_overrides_are_reported_too():
    found = report({"train_batch_size": 8}, ["gradient_clipping=1.0"])
    assert [row.key for row in found.rows] == ["train_batch_size", "gradient_clipping"]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (
            {
                "zero_optimization": {
                    "stage": 2,
                    "offload_optimizer": {"device": "cpu", "pin_memory": True},
                }
            },
            "Optimizer state: on the host tier",
        ),
        ({"optimizer": {"type": "Adam"}}, "is AdamW"),
        (
            {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
            "L2 penalty",
        ),
        (
            {"scheduler": {"type": "WarmupCosineLR"}, "run": {"steps": 100}},
            "takes 1000 steps, but the run ends after 100",
        ),
        (
            {"train_batch_size": 8, "gradient_accumulation_steps": 4},
            "8 samples: 4 microbatches of 2",
        ),
        ({}, "size is that of the first batch"),
        ({"fp16": {"enabled": True}}, "Compute is in float16"),
        ({"zero_optimization": {"offload_param": {"device": "none"}}}, "device tier"),
    ],
)
def test_notes_tell_what_the_keys_come_to(raw, words):
    assert any(words in note for note in report(raw).notes)


def test_the_printed_form_has_a_line_per_row_and_aligned_columns():
    text = str(report({"train_batch_size": 8, "zero_optimization": {"stage": 3}}))
    first, second = text.splitlines()[:2]
    assert first.index("used") == second.index("used")
    assert "zero_optimization.stage" in second


def test_long_values_are_shortened():
    (row,) = report({"frozen": ["a" * 100]}).rows
    assert len(row.value) <= 24


def test_a_config_object_can_be_checked():
    config = Config.load({"train_batch_size": 8})
    assert [row.key for row in report(config).rows] == ["train_batch_size"]


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        report(tmp_path / "a.yaml")


def test_a_notebook_shows_a_table_with_errors_and_notes_below():
    found = report({"train_batch_size": 8, "<b>": 1})
    html = found._repr_html_()
    assert html.count("<tr>") == 1 + len(found.rows)
    assert "<b>" not in html.replace("<b>error</b>", "").replace("<b>note</b>", "")
    assert html.count("<b>error</b>") == len(found.problems) == 1
    assert html.count("<b>note</b>") == len(found.notes) > 0
