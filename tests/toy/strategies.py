"""Random programs for hypothesis: small, and as odd as a traced loss may be."""

from dataclasses import dataclass, replace
from random import Random

from hypothesis import strategies as st

from tests.toy.program import Layer, LeafCase, Toy, make_toy
from zinf.core.plan import StepOptions
from zinf.core.program import ArrayId, Role, Tier


@dataclass(frozen=True)
class Case:
    """A program with a placement and an arrangement of its step."""

    toy: Toy
    homes: dict[ArrayId, Tier]
    options: StepOptions


@st.composite
def toys(draw: st.DrawFn) -> Toy:
    """Ties, stacked and frozen leaves, skip connections, unused and repeated inputs."""
    num_layers = draw(st.integers(1, 5))
    num_leaves = draw(st.integers(1, num_layers + 2))
    leaves = [
        LeafCase(
            f"w{i}",
            num_rows=draw(st.integers(1, 4)),
            row_numel=draw(st.sampled_from([1, 16, 64])),
            is_stacked=draw(st.booleans()),
            # The last layer trains at least one leaf, or there is nothing to do.
            is_trainable=i == 0 or draw(st.booleans()),
        )
        for i in range(num_leaves)
    ]
    arrays = [a for case in leaves for a in case.leaf(4).arrays()]
    batch = draw(st.sampled_from([("batch/x",), ("batch/x", "batch/y", "key")]))
    consts = draw(st.sampled_from([(), ("const/0",)]))
    layers, made, unused = [], [*batch, *consts], []
    for i in range(num_layers):
        is_last = i == num_layers - 1
        params = draw(st.lists(st.sampled_from(arrays), unique=True, max_size=3))
        if is_last and ArrayId(Role.PARAM, "w0") not in params:
            params += [a for a in leaves[0].leaf(4).arrays() if a not in params]
        inputs = draw(st.lists(st.sampled_from(made), unique=True, max_size=3))
        if is_last:
            inputs += [v for v in unused if v not in inputs]
        outputs = [f"s{i}.{k}" for k in range(draw(st.integers(1, 2)))]
        unused = [v for v in unused if v not in inputs] + outputs
        made += outputs
        layers.append(Layer(f"s{i}", tuple(params), tuple(inputs), tuple(outputs)))
    used = {a for layer in layers for a in layer.params}
    # A trained leaf that nothing reads is the last layer's, with a gradient of zero.
    missing = [
        a
        for case in leaves
        if case.is_trainable
        for a in case.leaf(4).arrays()
        if a not in used
    ]
    layers[-1] = replace(layers[-1], params=(*layers[-1].params, *missing))
    sizes = {name: draw(st.sampled_from([1, 8, 100])) for name in made}
    return make_toy(
        leaves,
        layers,
        value_numel=sizes,
        batch=batch,
        consts=consts,
        num_aux=draw(st.integers(0, 2)),
        is_mixed=draw(st.booleans()),
        num_states=draw(st.integers(0, 2)),
        block_rows=draw(st.sampled_from([None, 1, 2])),
        is_fine=draw(st.booleans()),
        workspace_bytes=draw(st.sampled_from([0, 40, 400])),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    toy = draw(toys())
    # Arrays are placed one by one: neighbours need not rest together.
    choose = Random(draw(st.integers(0, 2**16)))
    tiers = draw(st.lists(st.sampled_from(list(Tier)), min_size=1, max_size=3))
    homes = {a: choose.choice(tiers) for a in toy.specs if a.role != Role.CONST}
    late = draw(st.sampled_from([0.0, 0.5, 1.0]))
    numbers = range(len(toy.units(homes)))
    options = StepOptions(
        num_microbatches=draw(st.integers(1, 3)),
        updates_in_backward=draw(st.booleans()),
        value_tier=draw(st.sampled_from(list(Tier))),
        gradient_tier=draw(st.sampled_from([Tier.HOST, Tier.NVME])),
        deferred=frozenset(i for i in numbers if choose.random() < late),
        gradients_by_row=draw(st.booleans()),
    )
    return Case(toy, homes, options)
