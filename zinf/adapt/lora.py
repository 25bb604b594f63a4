"""`zinf.adapt.lora`: a loss over a frozen base and small trained adapters."""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod, sqrt
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from zinf.adapt.adapted import ADAPTER, BASE, Adapted, AdaptedFunction, Layout
from zinf.adapt.blocks import Encoding
from zinf.adapt.choose import (
    choose_targets,
    in_groups,
    published,
    saved_leaves,
    stored_targets,
)
from zinf.adapt.contraction import find_contractions
from zinf.adapt.weight import (
    LORA_A,
    LORA_B,
    MAGNITUDE,
    WEIGHT,
    Target,
    lengths,
    stored,
    whole,
)
from zinf.core.config import Config
from zinf.core.config.adapter import Adapter
from zinf.core.config.quantization import WeightQuantization
from zinf.core.problem.leafwise import abstract_leaves, is_function, leaves_of
from zinf.core.problem.modes import accepts, for_evaluation, for_training
from zinf.core.problem.source import named_leaves


def lora(
    loss_fn: Callable,
    params: Any,
    *,
    batch: Any,
    rng: jax.Array | None = None,
    model_state: Any = None,
    eval_loss_fn: Callable | None = None,
    **options: Any,
) -> Adapted:
    """A loss that trains low-rank adapters beside frozen weights.

    Works for any loss that `zinf.initialize` takes:

        adapted = zinf.adapt.lora(loss_fn, params, batch=batch, r=16)
        engine = zinf.initialize(
            adapted.loss_fn, adapted.params, tx, adapted.config(config)
        )

    Each product of an activation and a chosen weight gets a second product, with two
    thin matrices. Other uses of the weight get the sum of the weight and the product of
    the matrices. The first values do not change the loss.

    Args:
        loss_fn, params, rng, model_state, eval_loss_fn: as in `zinf.initialize`.
            `loss_fn` need not take a key for `lora_dropout`.
        batch: an example, or its shapes.
        options: the keys of the config's `adapter` section
            (`zinf.core.config.adapter`), which are PEFT's: `r`, `lora_alpha`,
            `lora_dropout`, `target_modules`, ...

    Raises:
        ValueError: an option is unknown or wrong, a name matches no weight, `r` is too
            large for a weight, or dropout has no key.
    """
    adapter = Config.load({"adapter": options}).adapter
    assert adapter is not None
    return adapt(
        loss_fn,
        params,
        adapter,
        batch=batch,
        rng=rng,
        model_state=model_state,
        eval_loss_fn=eval_loss_fn,
    )


def quantize(
    loss_fn: Callable,
    params: Any,
    *,
    batch: Any,
    rng: jax.Array | None = None,
    model_state: Any = None,
    eval_loss_fn: Callable | None = None,
    **options: Any,
) -> Adapted:
    """A loss whose weights of linear layers are kept in groups of 8 or 4 bits.

    Nothing is trained. Each segment decodes the weights that it reads, so fewer bytes
    rest on each tier and cross each link:

        kept = zinf.adapt.quantize(loss_fn, params, batch=batch, num_bits=4)
        engine = zinf.initialize(
            kept.loss_fn, kept.params, optax.identity(), kept.config(config)
        )
        engine.apply(kept.applied(function), batch)

    Args:
        loss_fn, params, batch, rng, model_state, eval_loss_fn: as in `lora`.
        options: `num_bits`, `group_size` and `symmetric`, as in
            `zinf.core.config.quantization.Groups`.

    Raises:
        ValueError: an option is unknown or wrong, or there is no linear layer.
    """
    section = {"weight_quantization": {"quantized_initialization": options}}
    return adapt(
        loss_fn,
        params,
        quantization=Config.load(section).weight_quantization,
        batch=batch,
        rng=rng,
        model_state=model_state,
        eval_loss_fn=eval_loss_fn,
    )


def adapt(
    loss_fn: Callable,
    params: Any,
    adapter: Adapter | None = None,
    *,
    quantization: WeightQuantization | None = None,
    encodings: Mapping[str, Encoding] = MappingProxyType({}),
    batch: Any,
    rng: jax.Array | None = None,
    model_state: Any = None,
    eval_loss_fn: Callable | None = None,
) -> Adapted:
    """`lora` or `quantize` with the options as a section of a config.

    Args:
        adapter: None: nothing is trained.
        encodings: of weights that are published in few bits, by key path, without
            stacks. They stay so where neither section says otherwise.
    """
    has_adapter, adapter = adapter is not None, adapter or Adapter()
    if adapter.lora_dropout and rng is None:
        raise ValueError(
            f"adapter.lora_dropout is {adapter.lora_dropout}, which needs a random "
            "key. Pass rng=jax.random.key(0), here and to zinf.initialize."
        )
    abstract = abstract_leaves(params)
    specs = named_leaves(abstract)
    given = (abstract_leaves(model_state),) if model_state is not None else ()
    given = (*given, jax.eval_shape(lambda: batch) if batch is not None else None)
    key = () if rng is None else (jax.eval_shape(lambda: rng),)
    training = for_training(loss_fn)
    num_arguments = 1 + len(given) + 1  # Parameters first, and a key last.
    takes_key = rng is not None and accepts(training, range(num_arguments))
    closed = jax.make_jaxpr(training)(abstract, *given, *(key if takes_key else ()))
    shapes = {path: tuple(spec.shape) for path, spec in specs.items()}
    found = find_contractions(closed, shapes)
    if has_adapter:
        targets = choose_targets(adapter, found, specs, encodings)
    else:
        stored = published(encodings, found)
        if quantization is not None:
            stored |= in_groups(quantization, found)
        targets = stored_targets(stored, found, specs)
    saved = frozenset(saved_leaves(adapter, specs))
    layout = Layout(specs, jax.tree.structure(abstract), targets, saved)
    has_key = rng is not None
    dropout = adapter.lora_dropout
    loss = AdaptedFunction(training, layout, dropout, has_key and not takes_key)
    evaluating = for_evaluation(loss_fn, eval_loss_fn)
    if evaluating is None and adapter.lora_dropout:
        evaluating = training
    if evaluating is not None:
        drops_key = has_key and not accepts(evaluating, range(num_arguments))
        evaluating = AdaptedFunction(evaluating, layout, 0.0, drops_key)
    return Adapted(
        loss_fn=loss,
        eval_loss_fn=evaluating,
        params=_split_params(params, layout, adapter),
        frozen=(f"{BASE}/*",),
        targets=targets,
        saved=tuple(sorted(saved)),
        adapter=adapter,
        layout=layout,
    )


def first_adapter(target: Target, adapter: Adapter, base: Any) -> dict[str, Any]:
    """The first values of an adapter, which depend on its path and the seed.

    Args:
        base: the frozen weight as the loss will see it.
    """
    shapes = target.factor_shapes
    key = jax.random.key(adapter.seed)
    key = jax.random.fold_in(key, zlib.crc32(target.path.encode()))
    for_a, for_b = jax.random.split(key)
    num_inputs = prod(target.sizes(target.contraction.inputs))
    if adapter.init_lora_weights == "gaussian":
        a = jax.random.normal(for_a, shapes[LORA_A]) / target.r
    else:
        # As torch's Linear: kaiming_uniform with a = sqrt(5).
        a = _uniform(for_a, shapes[LORA_A], 1 / sqrt(num_inputs))
    b = jnp.zeros(shapes[LORA_B])
    if adapter.init_lora_weights is False:
        b = _uniform(for_b, shapes[LORA_B], 1 / sqrt(target.r))
    found = {LORA_A: a, LORA_B: b}
    if target.is_dora:
        found[MAGNITUDE] = lengths(base, target)
    return found


def _split_params(params: Any, layout: Layout, adapter: Adapter) -> Any:
    def split(leaves: Mapping[str, Any]) -> dict[str, Any]:
        found = layout.split(leaves)
        for path, target in layout.targets.items():
            if not target.r:
                continue
            frozen = found[ADAPTER].pop(path)
            parts = frozen if target.encoding is not None else {WEIGHT: frozen}
            plain = replace(target, r=0, is_dora=False)
            base = None
            if target.is_dora:
                base = stored(whole(plain, parts, target.dtype))
            found[ADAPTER][path] = first_adapter(target, adapter, base)
        return found

    if is_function(params):
        return lambda: split(named_leaves(params()))
    return split(dict(leaves_of(params)))


def _uniform(key: jax.Array, shape: tuple[int, ...], bound: float) -> jax.Array:
    return jax.random.uniform(key, shape, minval=-bound, maxval=bound)
