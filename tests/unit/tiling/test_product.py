"""Products of tiles: the kernel for one Hopper GPU, XLA's everywhere else."""

from contextlib import contextmanager

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from zinf.core.jaxpr import flatten
from zinf.core.segment import named_leaves, segment_loss, trace_loss
from zinf.tiling import LinearTiles, MlpTiles, linear, mlp
from zinf_kernels.absent_gpu import GPUS, compile_for

# All tiles of both layers are [256, 128].
ROWS, DIM, HIDDEN = 256, 512, 256
SHORT = jnp.bfloat16


@contextmanager
def traced_for(name, *, num_devices=1):
    """What is traced inside is for such GPUs, over which XLA cuts arrays."""
    kind = GPUS[name].kind
    described = AbstractDevice(device_kind=kind, num_cores=132, platform="cuda")
    sizes, names = ((), ()) if num_devices == 1 else ((num_devices,), ("fsdp",))
    types = (AxisType.Auto,) * len(names)
    mesh = AbstractMesh(sizes, names, types, abstract_device=described)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def layers(dtype=SHORT, dim=DIM):
    """A linear layer of 2 x 2 tiles, and an MLP of 2."""

    def init(key):
        one, other = jax.random.split(key)
        splits = {"in_splits": 2, "out_splits": 2}
        return {
            "linear": LinearTiles.init(one, (dim, HIDDEN), **splits, dtype=dtype),
            "mlp": MlpTiles.init(other, HIDDEN, HIDDEN, splits=2, dtype=dtype),
        }

    return jax.eval_shape(init, jax.random.key(0))


def loss(params, x):
    out = mlp(params["mlp"], linear(params["linear"], x))
    return jnp.mean(jnp.square(out.astype(jnp.float32)))


def num_kernels(params, dtype=SHORT, dim=DIM):
    """Rules around kernels in the forward pass, those in `jax.checkpoint` included."""
    x = jax.ShapeDtypeStruct((ROWS, dim), dtype)
    closed = jax.make_jaxpr(loss)(params, x)
    equations = flatten(closed, inline_remat=lambda _: True).equations
    return sum(e.primitive.name == "custom_vjp_call" for e in equations)


def test_each_tile_is_a_kernel_on_one_hopper_gpu_and_xlas_product_elsewhere():
    params = layers()
    for name in GPUS:
        with traced_for(name):
            # Of the linear layer 2 x 2, of each tile of the MLP into it and out of it.
            is_hopper = GPUS[name].capability == (9, 0)
            assert num_kernels(params) == (4 + 2 * 2 if is_hopper else 0)
    with traced_for("H200", num_devices=2):
        assert num_kernels(params) == 0
    with traced_for("H200"):
        assert num_kernels(layers(jnp.float32), jnp.float32) == 0
        # Two parts of 48 channels, no multiple of 64: the MLP's tiles alone.
        assert num_kernels(layers(dim=96), dim=96) == 4
    assert num_kernels(params) == 0


def test_an_implementation_that_was_asked_for_runs_or_says_why_not():
    tiles = LinearTiles.split(jnp.ones((128, 128), SHORT))
    x = jnp.ones((ROWS, 128), SHORT)
    with pytest.raises(ValueError, match="it is for GPUs and this is a CPU"):
        linear(tiles, x, implementation="mosaic_gpu")
    with traced_for("H200"):
        made = jax.make_jaxpr(lambda: linear(tiles, x, implementation="xla"))()
        assert "_matmul" not in str(made)
        with pytest.raises(ValueError, match="m is 255"):
            linear(tiles, x[:255], implementation="mosaic_gpu")


def test_a_kernel_is_cut_apart_from_others_and_differentiated():
    """A rule for derivatives is never cut, so there is one for each tile."""
    params, x = layers(), jax.ShapeDtypeStruct((ROWS, DIM), SHORT)
    kernels = {n: a for n, a in named_leaves(params).items() if len(a.shape) == 2}
    assert {a.shape for a in kernels.values()} >= {(256, 128)}
    limit = 2 * 256 * 128 + 4 * HIDDEN
    with traced_for("H200"):
        source = trace_loss(loss, params, x, max_remat_bytes=0)
        names = [e.primitive.name for e in source.graph.equations]
        assert names.count("custom_vjp_call") == len(kernels)
        program = segment_loss(source, frozen=(), splittable=(), max_bytes=limit)
        for segment in program.program.segments:
            assert len({a.path for a in segment.params} & kernels.keys()) <= 1
        grads = jax.make_jaxpr(jax.grad(loss))(params, x).out_avals
    found = [(a.shape, a.dtype) for a in grads]
    assert found == [(a.shape, a.dtype) for a in jax.tree.leaves(params)]


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("gpu", ["H200", "A100"])
def test_layers_and_their_gradients_compile_for_gpus(gpu):
    x = jax.ShapeDtypeStruct((ROWS, DIM), SHORT)
    text = compile_for(GPUS[gpu], jax.value_and_grad(loss), layers(), x).as_text()
    assert ("mosaic_gpu" in text) == (gpu == "H200")
