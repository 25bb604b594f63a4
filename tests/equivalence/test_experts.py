"""With experts divided over devices: what each device holds, and what is refused.

DeepSpeed-MoE's E, D, Z, M and their combinations, and TED, which divides each expert's
own weights too. `test_meshes` has the numbers of meshes, stages and tiers.
"""

import jax
import numpy as np
import pytest

import zinf
from tests.equivalence.models import Model
from tests.equivalence.networks import (
    EXPERTS,
    FEW_ROUTED,
    GPT_CAPACITY,
    GPT_EXPERTS,
)
from tests.equivalence.training import (
    BOTH,
    FUSED,
    OPTIMIZERS,
    Setting,
    mesh_of,
    train,
)
from zinf.core.engine.initialize import make_planner
from zinf.core.program import ArrayId, Role
from zinf.core.sharding import Layouts


@pytest.mark.slow
def test_quantized_weights_of_experts_are_those_of_their_devices():
    more = (("zero_optimization.zero_quantized_weights", True),)
    expected = train(FEW_ROUTED, Setting(FUSED, BOTH, stage=0))
    found = train(FEW_ROUTED, Setting(name=BOTH, mesh="E+D", more=more))
    # Each weight is rounded by 1/254 of the largest in its block; masters are not. Adam
    # makes more of the difference in later steps.
    assert found.losses[0] == pytest.approx(expected.losses[0], rel=1 / 254)
    assert found.numbers != expected.numbers


def layouts(model: Model, stage: int, mesh: str, inside: int = 1) -> Layouts:
    more = (("expert_parallel.expert_tensor_parallel_size", inside),)
    config = Setting(FUSED, stage=stage, more=more).config(model, "")
    start = model.loss, model.init, OPTIMIZERS["adam"], config
    planner = make_planner(*start, mesh=mesh_of(mesh), **model.options)
    batch = model.batches(1)[0]
    return planner.layouts(planner.trace(planner.batch_spec(batch)))


def test_state_of_experts_is_divided_by_experts_and_among_their_own_devices():
    found = layouts(FEW_ROUTED, 3, "E+D")
    for name in ("router", "up", "bias"):
        for role in (Role.PARAM, Role.GRADIENT):
            layout = found.of(ArrayId(role, f"layer 0/{name}"))
            assert np.prod(layout.device_shape) * 8 == np.prod(layout.shape), name
            if name != "router":
                # Each has the experts of its place along `expert`, of 4.
                assert layout.device_shape[0] == EXPERTS // 4


def test_attention_is_cut_along_tensor_and_state_of_experts_divided_along_it():
    found = layouts(GPT_CAPACITY, 1, "E+T+D")

    def spec(role: Role, path: str) -> jax.P:
        return found.of(ArrayId(role, f"blocks/0/{path}")).device.spec

    for role in (Role.PARAM, Role.GRADIENT):
        assert spec(role, "attention/query/kernel")[1] == "tensor"
        assert spec(role, "attention/out/kernel")[0] == "tensor"
    up = next(a.path for a in found.arrays if a.path.endswith("up/kernel"))
    own = found.of(ArrayId(Role.PARAM, up))
    assert own.device.spec == jax.P("expert")
    assert own.share.spec[0] == "expert"
    assert own.share.shard_shape(own.padded)[0] == GPT_EXPERTS // 2
    assert np.prod(own.share.shard_shape(own.padded)) * 8 == np.prod(own.shape)


def test_every_array_of_an_expert_is_cut_by_experts_then_columns_or_rows():
    # Experts, then the dim that `tensor` cuts; the last bias is whole.
    dims = {"up/kernel": 2, "up/bias": 1, "down/kernel": 1, "down/bias": None}
    count = 0
    found = layouts(GPT_CAPACITY, 3, "E+T+D", 2)
    gradients = [ArrayId(Role.GRADIENT, path) for path in found.gradients]
    for array in (*found.arrays, *gradients):
        layout = found.of(array)
        name = array.path.partition("/experts/")[2]
        if not name:
            continue
        count += 1
        shape = [GPT_EXPERTS // 2, *layout.shape[1:]]
        if dims[name] is not None:
            shape[dims[name]] //= 2
        assert layout.computed.shard_shape(layout.shape) == tuple(shape), array
        # ZeRO cuts another dim along `fsdp`; both of a bias of hidden values are cut.
        parts = 4 if name == "up/bias" else 8
        assert np.prod(layout.device_shape) * parts == np.prod(layout.padded), array
    # Parameters, gradients and two moments of four leaves.
    assert count == 16


def test_numbers_of_devices_that_do_not_divide_experts_are_refused():
    mesh = zinf.make_mesh(jax.devices()[:6], num_expert=3)
    with FEW_ROUTED.start(OPTIMIZERS["adam"], {}, mesh=mesh) as engine:
        batch = jax.tree.map(lambda x: x[:12], FEW_ROUTED.batches(1)[0])
        with pytest.raises(ValueError, match="8 experts, which mesh.expert = 3 dev"):
            engine.step(batch)
    with pytest.raises(ValueError, match="size is 4, and 2 devices"):
        layouts(GPT_CAPACITY, 0, "E+T+D", 4)
