"""With experts and the weights around them divided, training is that of one device.

DeepSpeed-MoE's E+D+M and, with state on the host, E+Z-Off+M; with each expert's own
weights divided too, as in DeepSpeed-TED; and with sequences divided in place of the
weights around experts.
"""

import tempfile
from collections.abc import Iterator
from functools import cache
from typing import Any

import jax
import numpy as np
import optax
import pytest

import zinf
from tests.equivalence.meshes import BOUND, check_each_restores_the_one_before
from zinf.initialize import make_planner
from zinf.models import GPTConfig, init_and_loss
from zinf.program import ArrayId, Role

EXAMPLES, LENGTH, VOCAB, STEPS = 16, 8, 32, 2
EXPERTS, GROUP = 4, 8
# Experts take as many tokens of a routing group as they get on average, or all.
CAPACITIES = {"capacity": 1.0, "dropless": None}


def model(capacity: str) -> Any:
    config = GPTConfig(
        num_layers=1,
        num_heads=4,
        embed_dim=16,
        vocab_size=VOCAB,
        max_length=LENGTH,
        num_experts=EXPERTS,
        experts_per_token=1,
        capacity_factor=CAPACITIES[capacity],
        routing_group_size=GROUP,
    )
    return init_and_loss(config, seed=0)


def mesh(beside: str = "tensor") -> Any:
    """Two devices along `expert`, two along `fsdp` and two along another axis.

    With `4` there is no axis `fsdp`, and with `tensor alone` no axis `expert`.
    """
    if beside in ("4", "tensor alone"):
        num_expert = 2 if beside == "4" else 1
        return zinf.make_mesh(jax.devices()[:4], num_expert=num_expert, num_tensor=2)
    num_seq, num_tensor = (2, 1) if beside == "seq" else (1, 2)
    return zinf.make_mesh(
        jax.devices()[:8], num_expert=2, num_seq=num_seq, num_tensor=num_tensor
    )


def config(
    stage: int, tier: str, *, inside: int = 1, folder: str = ""
) -> dict[str, Any]:
    """Clipping at a norm below those that occur, and accumulation.

    Args:
        inside: devices that divide the weights of each expert.
    """
    execution = "fused" if tier == "fused" else "streamed"
    device = {"host": "cpu", "nvme": "nvme"}.get(tier, "none")
    offload = {"offload_optimizer": {"device": device}}
    if tier == "nvme":
        offload |= {"offload_param": {"device": device}}
    return {
        "execution": execution,
        "zero_optimization": {"stage": stage} | offload,
        "expert_parallel": {"expert_tensor_parallel_size": inside},
        "persistence_threshold": 1,
        "gradient_clipping": 0.05,
        "gradient_accumulation_steps": 2,
        "segment": {"remat": "always"} if tier != "fused" else {},
        "memory": {"device": "64MiB", "host": "64MiB"}
        | ({"nvme": [folder]} if folder else {}),
    }


@cache
def train(
    num_devices: int,
    capacity: str,
    stage: int = 0,
    tier: str = "fused",
    beside: str = "tensor",
    inside: int = 1,
) -> list[float]:
    """The losses and gradient norms of some steps."""
    with tempfile.TemporaryDirectory() as folder:
        settings = config(stage, tier, inside=inside, folder=folder)
        return run(num_devices, capacity, settings, beside)


def run(num_devices: int, capacity: str, settings: Any, beside: str) -> list[float]:
    init, loss = model(capacity)
    on = mesh(beside) if num_devices > 1 else zinf.make_mesh(jax.devices()[:1])
    engine = zinf.initialize(loss, init, optax.adamw(1e-2), settings, mesh=on)
    random = np.random.default_rng(1)
    found = []
    for _ in range(STEPS):
        tokens = random.integers(0, VOCAB, (EXAMPLES, LENGTH + 1)).astype(np.int32)
        metrics = engine.step({"tokens": tokens})
        found += [float(metrics[k]) for k in ("loss", "grad_norm")]
    engine.close()
    return found


# Only sums over devices are in another order, as in `test_experts`.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("capacity", "stage", "tier"),
    [("capacity", 0, "fused"), ("capacity", 2, "host"), ("dropless", 3, "fused")],
)
def test_losses_and_norms_are_those_of_one_device(capacity, stage, tier):
    found = train(8, capacity, stage, tier)
    np.testing.assert_allclose(found, train(1, capacity), rtol=BOUND)


# A routing group of `GROUP` tokens is one example, of which each device has a half.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("capacity", "stage", "tier"), [("capacity", 3, "fused"), ("dropless", 2, "host")]
)
def test_sequences_and_experts_are_divided_at_once(capacity, stage, tier):
    found = train(8, capacity, stage, tier, "seq")
    np.testing.assert_allclose(found, train(1, capacity), rtol=BOUND)


def test_attention_is_cut_along_tensor_and_state_of_experts_divided_along_it():
    init, loss = model("capacity")
    tx = optax.adamw(1e-2)
    planner = make_planner(loss, init, tx, config(1, "fused"), mesh=mesh())
    tokens = {"tokens": np.zeros((EXAMPLES, LENGTH + 1), np.int32)}
    layouts = planner.layouts(planner.trace(planner.batch_spec(tokens)))

    def spec(role: Role, path: str) -> Any:
        return layouts.of(ArrayId(role, f"blocks/0/{path}")).device.spec

    for role in (Role.PARAM, Role.GRADIENT):
        assert spec(role, "attention/query/kernel")[1] == "tensor"
        assert spec(role, "attention/out/kernel")[0] == "tensor"
    up = next(a.path for a in layouts.arrays if a.path.endswith("up/kernel"))
    own = layouts.of(ArrayId(Role.PARAM, up))
    assert own.device.spec == jax.P("expert")
    assert own.share.spec[0] == "expert"
    assert own.share.shard_shape(own.padded)[0] == EXPERTS // 2
    assert np.prod(own.share.shard_shape(own.padded)) * 8 == np.prod(own.shape)


@pytest.mark.sampled(slow=3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("capacity", "stage", "tier", "beside"),
    [
        ("capacity", 0, "fused", "tensor"),
        ("capacity", 2, "host", "tensor"),
        ("dropless", 3, "fused", "tensor"),
        ("dropless", 1, "fused", "4"),
        ("capacity", 3, "host", "tensor alone"),
    ],
)
def test_experts_that_are_cut_inside_train_as_on_one_device(
    capacity, stage, tier, beside
):
    num_devices = 8 if beside == "tensor" else 4
    found = train(num_devices, capacity, stage, tier, beside, inside=2)
    np.testing.assert_allclose(found, train(1, capacity), rtol=BOUND)


@pytest.mark.slow
def test_tiers_are_bit_equal_with_experts_cut_inside():
    host, nvme = (train(8, "capacity", 2, tier, inside=2) for tier in ("host", "nvme"))
    assert host == nvme


def test_every_array_of_an_expert_is_cut_by_experts_then_columns_or_rows():
    init, loss = model("capacity")
    settings = config(3, "fused", inside=2)
    planner = make_planner(loss, init, optax.adamw(1e-2), settings, mesh=mesh())
    tokens = {"tokens": np.zeros((EXAMPLES, LENGTH + 1), np.int32)}
    layouts = planner.layouts(planner.trace(planner.batch_spec(tokens)))
    # Experts, then the dim that `tensor` cuts; the last bias is whole.
    dims = {"up/kernel": 2, "up/bias": 1, "down/kernel": 1, "down/bias": None}
    found = 0
    for array, layout in layouts.arrays.items():
        name = array.path.partition("/experts/")[2]
        if not name:
            continue
        found += 1
        shape = [EXPERTS // 2, *layout.shape[1:]]
        if dims[name] is not None:
            shape[dims[name]] //= 2
        assert layout.computed.shard_shape(layout.shape) == tuple(shape), array
        # ZeRO cuts another dim along `fsdp`; both of a bias of hidden values are cut.
        parts = 4 if name == "up/bias" else 8
        assert np.prod(layout.device_shape) * parts == np.prod(layout.padded), array
    # Parameters, gradients and two moments of four leaves.
    assert found == 16


@pytest.mark.exhaustive
def test_a_run_is_saved_and_restored_with_experts_cut_otherwise(tmp_path):
    cases = [("tensor", 3, "nvme", 2), ("tensor", 1, "host", 1), ("4", 0, "fused", 2)]
    init, loss = model("capacity")

    def started() -> Iterator[zinf.Engine]:
        for number, (beside, stage, tier, inside) in enumerate(cases):
            folder = str(tmp_path / f"nvme {number}")
            settings = config(stage, tier, inside=inside, folder=folder)
            tx = optax.adamw(1e-2)
            yield zinf.initialize(loss, init, tx, settings, mesh=mesh(beside))

    random = np.random.default_rng(1)
    tokens = random.integers(0, VOCAB, (EXAMPLES, LENGTH + 1)).astype(np.int32)
    check_each_restores_the_one_before(started(), {"tokens": tokens}, tmp_path)


def test_another_number_of_devices_than_divides_weights_is_refused():
    init, loss = model("capacity")
    settings = config(0, "fused", inside=4)
    with pytest.raises(ValueError, match="size is 4, and 2 devices"):
        make_planner(loss, init, optax.sgd(1.0), settings, mesh=mesh())
