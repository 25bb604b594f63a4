"""Settings that are right and without effect are said, each in a sentence."""

import logging
from contextlib import closing

import jax
import jax.numpy as jnp
import optax
import pytest

import zinf
from zinf.config import Config, notices, report

CPU = {"device": "cpu"}


@pytest.mark.parametrize(
    ("raw", "key", "words"),
    [
        (
            {"communication_data_type": "fp16", "zero_optimization": {"stage": 3}},
            "communication_data_type",
            "exchanged in the dtype that backward makes them in",
        ),
        (
            {"sparse_gradients": True, "zero_optimization": {"stage": 3}},
            "sparse_gradients",
            "exchanged dense",
        ),
        ({"fp32_allreduce": True}, "fp32_allreduce", "DeepSpeed dropped"),
        ({"cuda_visible_devices": "0"}, "cuda_visible_devices", "environment"),
        ({"comms_logger": {"enabled": True}}, "comms_logger", "jax.profiler"),
        ({"flops_profiler": {"enabled": True}}, "flops_profiler", "--trace"),
        ({"dump_state": True}, "dump_state", "zinf config check"),
        ({"aio": {"use_gds": True}}, "aio.use_gds", "host memory"),
        (
            {"zero_optimization": {"offload_optimizer": {**CPU, "ratio": 0.3}}},
            "zero_optimization.offload_optimizer.ratio",
            "All state is offloaded",
        ),
        (
            {"memory": {"pinned": "arrays"}, "execution": "fused"},
            "memory.pinned",
            "nothing rests on the host",
        ),
        (
            {"memory": {"pinned": "off"}, "execution": "offloaded"},
            "memory.pinned",
            "all arrays are in pinned memory",
        ),
        (
            {"zero_optimization": {"load_from_fp32_weights": False}},
            "zero_optimization.load_from_fp32_weights",
            "from fp32",
        ),
        (
            {"zero_optimization": {"ignore_unused_parameters": False}},
            "zero_optimization.ignore_unused_parameters",
            "is zero in JAX",
        ),
        (
            {"zero_optimization": {"offload_param": {**CPU, "nvme_path": "drive"}}},
            "zero_optimization.offload_param.nvme_path",
            "because device is cpu",
        ),
        ({"memory": {"checksums": "full"}}, "memory.checksums", "without an NVMe tier"),
        ({"memory": {"stall_seconds": 9}}, "memory.stall_seconds", "without an NVMe"),
        (
            {"execution": "fused", "segment": {"max_bytes": "1GiB"}},
            "segment.max_bytes",
            "no segments",
        ),
        (
            {
                "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
                "scheduler": {"type": "WarmupDecayLR"},
                "run": {"steps": 9},
            },
            "optimizer.params.lr",
            "0.0003 has no effect: scheduler.params.warmup_max_lr is 0.001",
        ),
        (
            {
                "optimizer": {"type": "Muon", "params": {"muon_lr": 0.02}},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01}},
            },
            "optimizer.params.muon_lr",
            "0.02 has no effect: scheduler.params.warmup_max_lr is 0.01",
        ),
        (
            {
                "optimizer": {
                    "type": "Muon",
                    "params": {"lr": 1e-3, "muon_lr": 0.02, "adam_lr": 3e-4},
                }
            },
            "optimizer.params.lr",
            "no effect beside muon_lr and adam_lr",
        ),
        (
            {
                "optimizer": {"type": "Adam", "params": {"betas": [0.8, 0.9]}},
                "scheduler": {
                    "type": "OneCycle",
                    "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2},
                },
            },
            "optimizer.params.betas",
            "cycle_momentum",
        ),
        (
            {"run": {"evaluate_batches": 3}},
            "run.evaluate_batches",
            "nothing is evaluated",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}}},
            "optimizer.params.adam_w_mode",
            "use type Adam",
        ),
    ],
)
def test_what_has_no_effect_is_said(raw, key, words):
    (line,) = notices(Config.load(raw))
    assert line.startswith(f"{key}: ")
    assert words in line
    assert "\n" not in line
    assert line in report(raw).notes


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"sparse_gradients": False, "communication_data_type": None},
        {"comms_logger": {"enabled": False, "verbose": True}},
        {"zero_optimization": {"offload_param": {**CPU, "pin_memory": False}}},
        {"zero_optimization": {"offload_param": {**CPU, "pin_memory": True}}},
        {"memory": {"pinned": "arrays"}, "execution": "streamed"},
        {"zero_optimization": {"offload_optimizer": {**CPU, "ratio": 1.0}}},
        {"zero_optimization": {"load_from_fp32_weights": True}},
        {"zero_optimization": {"ignore_unused_parameters": True}},
        {"zero_optimization": {"offload_param": {"nvme_path": "drive"}}},
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3}},
        },
        {"memory": {"nvme": "drive", "checksums": "full"}},
    ],
)
def test_what_asks_for_nothing_or_has_its_effect_is_not_said(raw):
    assert notices(Config.load(raw)) == ()


def test_a_folder_of_a_tier_that_nothing_asks_for_is_not_opened():
    zero = {"offload_param": {"device": "cpu", "nvme_path": "drive"}}
    assert Config.load({"zero_optimization": zero}).nvme_paths == ()
    assert Config.load({"zero_optimization": zero}, ["memory.nvme=d"]).nvme_paths


# In Python.

BATCH = {"x": jax.ShapeDtypeStruct((4, 2), jnp.float32)}


def planned(config):
    loss = lambda params, batch: jnp.mean((batch["x"] @ params) ** 2)  # noqa: E731
    params = jax.ShapeDtypeStruct((2, 2), jnp.float32)
    return zinf.plan_only(
        loss, lambda: jnp.zeros(params.shape), optax.sgd(0.1), config, batch=BATCH
    )


def test_python_says_at_start_what_has_no_effect_and_what_it_does_not_read(caplog):
    config = {
        "sparse_gradients": True,
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "run": {"steps": 3},
        "data": {},
    }
    with caplog.at_level(logging.WARNING, logger="zinf"):
        planned(config)
        said = [record.getMessage() for record in caplog.records]
        chosen, unread = said[0], said[-1]
        assert "gradient_clipping 1" in chosen
        assert "optimizer.params.lr" not in chosen
        assert any(line.startswith("sparse_gradients: ") for line in said)
        assert unread.startswith("optimizer, run: read by zinf train, and not by")
        caplog.clear()
        planned(Config.load(config).told())
        assert caplog.records == []


@pytest.mark.parametrize(
    "sizes",
    [
        {"train_batch_size": 8},
        {"train_micro_batch_size_per_gpu": 2},
        {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
    ],
)
def test_a_batch_of_another_size_than_the_config_s_is_refused(sizes):
    with pytest.raises(ValueError, match=r"4 samples, but the config asks for \d"):
        planned(sizes)


def test_a_batch_of_the_config_s_size_is_taken():
    planned({"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2})


def test_steps_keep_to_the_config_s_size_and_evaluation_need_not():
    loss = lambda params, batch: jnp.mean((batch["x"] @ params) ** 2)  # noqa: E731
    batch = {"x": jnp.ones((4, 2))}
    rest = jnp.ones((2, 2)), optax.sgd(0.1), {"train_batch_size": 4}
    with closing(zinf.initialize(loss, *rest, batch=batch)) as engine:
        for train in (engine.step, engine.prepare):
            with pytest.raises(ValueError, match="6 samples, but the config asks"):
                train({"x": jnp.ones((6, 2))})
        assert engine.evaluate({"x": jnp.ones((6, 2))}) == 4.0
        assert engine.step(batch)["loss"] == 4.0
