"""Sequences leave and join a running batch, and prompts are read once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.unit.inference.generating import (
    DRAWN,
    LLAMA,
    RNG,
    counting_compilations,
    counting_passes,
    counting_sweeps,
    is_prompt,
    make_engine,
    on_nvme,
    programs,
    used_bytes,
)
from zinf.core.program import Tier
from zinf.inference import Decoder, generate, plan, prompt_lookup

COUNT = 12
PROMPTS = [RNG.integers(0, 97, 1 + 5 * i % 16) for i in range(COUNT)]
KEYS = jax.random.split(jax.random.key(5), COUNT)
# From 2 to 24 tokens, as skewed as texts are, in no order.
LENGTHS = [int(2 * 12 ** (i * 7 % COUNT / (COUNT - 1))) for i in range(COUNT)]


@pytest.fixture(scope="module")
def streaming():
    with make_engine({"execution": "streamed"}) as engine:
        yield engine


@pytest.fixture(scope="module")
def fused():
    with make_engine() as engine:
        yield engine


def ending():
    """A caller that ends each text at its length."""
    told = [0] * COUNT

    def is_over(number, token):
        told[number] += 1
        return told[number] == LENGTHS[number]

    return is_over


def written(engine, numbers=range(COUNT), **rest):
    """The texts of some prompts, with their own keys and ends."""
    is_over = ending()
    return engine.generate(
        [PROMPTS[i] for i in numbers],
        key=KEYS[np.array(numbers)],
        max_new_tokens=24,
        on_token=lambda number, token: is_over(numbers[number], token),
        **rest,
    )


@pytest.mark.parametrize(
    ("name", "rows", "batch_size", "how"),
    [
        ("streaming", 4, 4, {"temperature": 0.8}),
        pytest.param("streaming", 2, 5, DRAWN, marks=pytest.mark.slow),
        ("fused", 2, None, DRAWN),
    ],
)
def test_a_text_is_the_same_whoever_leaves_and_joins(
    name, rows, batch_size, how, request
):
    engine = request.getfixturevalue(name)
    wanted = written(engine, rows=rows, **how)
    if "eos_token_ids" not in how:
        assert [len(text) for text in wanted] == LENGTHS
    for number in (0, 7):
        assert written(engine, [number], rows=rows, **how) == [wanted[number]]
    before = used_bytes(engine)
    for drafts in (None, prompt_lookup(3)):
        rest = {"rows": rows, "batch_size": batch_size, "drafts": drafts, **how}
        with counting_sweeps() as sweeps:
            assert written(engine, **rest) == wanted
        if name == "streaming":
            assert 2 < sum(map(is_prompt, sweeps)) < COUNT
        assert used_bytes(engine) == before
    with counting_compilations() as compiled:
        written(engine, **rest)
    assert not compiled


def test_a_batch_stays_full(streaming):
    """Groups that each run until their longest text ends take half as many again."""
    with counting_sweeps() as found:
        written(streaming, rows=4, batch_size=4)
    groups = [LENGTHS[i : i + 4] for i in range(0, COUNT, 4)]
    assert 1.45 * len(found) <= sum(map(max, groups))
    # Each row has a token in each pass, but for joining and at the end.
    assert len(found) <= 1.5 * max(sum(LENGTHS) / 4, max(LENGTHS))


def test_microbatches_without_texts_leave_the_pass(streaming):
    """Of six with two rows each; the last texts move to rows of the first ones."""
    before = used_bytes(streaming)
    with counting_sweeps() as found:
        texts = written(streaming, rows=2, temperature=0.8)
    assert used_bytes(streaming) == before
    assert texts == written(streaming, rows=2, batch_size=2, temperature=0.8)
    decoded = [len(sweep) for sweep in found if not is_prompt(sweep)]
    assert len(decoded) == max(LENGTHS) - 1
    assert decoded == sorted(decoded, reverse=True)
    # Moving waits for `MOVING_PASSES` passes of a microbatch each time.
    needed = [-(-sum(n > place for n in LENGTHS) // 2) for place in range(1, 24)]
    assert sum(decoded) <= sum(needed) + 5 * generate.MOVING_PASSES
    assert decoded[-1] == 1


def test_a_fused_batch_stays_full(fused):
    """Until nothing waits, each pass has a text in each row; then the last ones end."""
    with counting_passes() as found:
        written(fused, rows=4)
    first = sum(count == 4 for count in found)
    assert set(found[:first]) == {4}
    # The first token of a text takes no pass.
    assert sum(found) == sum(LENGTHS) - COUNT
    assert len(found) - first < max(LENGTHS)


LONG = [RNG.integers(0, 97, length) for length in (40, 33, 50, 17, 48, 20, 49, 56)]
ENDS = [2, 8, 5, 8, 3, 8, 4, 6]


def long_texts(engine, numbers, **rest):
    """The texts of some of the long prompts, ended where they end."""
    told = dict.fromkeys(numbers, 0)

    def is_over(place, token):
        told[numbers[place]] += 1
        return told[numbers[place]] == ENDS[numbers[place]]

    prompts, keys = [LONG[n] for n in numbers], KEYS[np.array(numbers)]
    how = {"max_new_tokens": 8, "on_token": is_over, "rows": 2, **DRAWN, **rest}
    return engine.generate(prompts, key=keys, **how)


@pytest.mark.parametrize(
    "drafts", [None, pytest.param(prompt_lookup(3), marks=pytest.mark.slow)]
)
def test_prompts_are_read_in_parts_while_others_go_on(
    drafts, streaming, fused, monkeypatch
):
    """A pass computes one part of 16 tokens of each microbatch; fused, all at once."""
    monkeypatch.setattr(plan.GenerationPlanner, "tokens_beside", lambda *_: 16)
    numbers = range(len(LONG))
    wanted = long_texts(fused, numbers)
    for batch_size in (2, 4):
        with counting_sweeps() as sweeps:
            rest = {"batch_size": batch_size, "drafts": drafts}
            assert long_texts(streaming, numbers, **rest) == wanted
        widths = [[tokens for _, tokens in sweep] for sweep in sweeps]
        assert max(map(max, widths)) == 16
        # Buckets of 32 and 64 tokens. Parts of padding alone are not read.
        num_parts = sum(-(-len(prompt) // 16) for prompt in LONG)
        assert sum(sweep.count((1, 16)) for sweep in sweeps) >= num_parts
        if batch_size == 2:
            assert sum(sweep.count((1, 16)) for sweep in sweeps) == num_parts
        assert any(min(own) < 16 == max(own) for own in widths)
    for number in (2, 7):
        alone = long_texts(streaming, [number], drafts=drafts)
        assert alone == [wanted[number]]


def test_parts_are_smaller_where_the_device_has_less_room(streaming):
    """Rather than segments, and rather than that caches leave the device."""
    numbers, device = [3, 5], Tier.DEVICE
    wanted = long_texts(streaming, numbers, rows=8)
    whole = programs(streaming)
    peaks = [x.plan.peak_bytes[device] for x in (whole.prefill, whole.decode)]
    budget = sum(peaks) // 2
    with make_engine({"execution": "streamed", "memory": {"device": budget}}) as tight:
        tight.stores.reset_peaks()
        assert long_texts(tight, numbers, rows=8) == wanted
        made = programs(tight)
        assert made.parts.num_tokens < whole.parts.num_tokens
        assert len(made.prefill.segments) == len(whole.prefill.segments)
        assert set(made.prefill.cache_tiers.values()) == {device}
        assert tight.stores.peak_bytes(device) <= budget


@pytest.mark.parametrize(("count", "rows", "blocks"), [(3, 4, 1), (3, 2, 2)])
def test_a_prompt_of_several_texts_is_read_once(count, rows, blocks, streaming):
    """Three prompts, each with as many completions, each with its own key."""
    prompts = [p for p in PROMPTS[:3] for _ in range(count)]
    keys = jax.random.split(jax.random.key(6), len(prompts))
    rest = {"max_new_tokens": 5, "rows": rows, **DRAWN}
    alone = [
        streaming.generate([prompt], key=keys[i : i + 1], **rest)[0]
        for i, prompt in enumerate(prompts)
    ]
    before = used_bytes(streaming)
    with counting_sweeps() as found:
        assert streaming.generate(prompts, key=keys, **rest) == alone
    assert len({tuple(text) for text in alone}) > 3
    prefills = [x for x in found if x[0][1] == 16]
    assert prefills == [[(rows, 16)] * blocks]
    assert used_bytes(streaming) == before


def test_sequences_at_one_place_wait_until_all_rows_are_free(streaming):
    """A decoder whose cache counts places once for all rows; no row has its own."""
    own = streaming._decoder(None)

    def apply(model, tokens, cache):
        at = jnp.full(len(tokens), cache["at"])
        logits, new = own.apply(model, tokens, {**cache, "at": at})
        return logits, {**new, "at": new["at"][0]}

    def init_cache(starts, length):
        return {**own.init_cache(starts, length), "at": jnp.zeros((), jnp.int32)}

    decoder = Decoder(apply, init_cache)
    wanted = written(streaming, rows=2)
    assert written(streaming, rows=2, batch_size=4, decoder=decoder) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize("shape", [{}, LLAMA])
def test_sequences_join_wherever_the_cache_rests(tier, shape, tmp_path, monkeypatch):
    monkeypatch.setattr(plan.GenerationPlanner, "tiers", (tier,))
    with make_engine(on_nvme(tmp_path), **shape) as engine:
        wanted = written(engine, rows=2, **DRAWN)
        engine.stores.reset_peaks()
        rest = {"rows": 2, "batch_size": 4, "drafts": prompt_lookup(3)}
        assert written(engine, **rest, **DRAWN) == wanted
        made = programs(engine)
        assert set(made.decode.cache_tiers.values()) == {tier}
        plans = [made.decode.plan, *(x.plan for x in made.passes.values() if x)]
        most = max(plan.peak_bytes[Tier.DEVICE] for plan in plans)
        assert engine.stores.peak_bytes(Tier.DEVICE) <= most
        monkeypatch.setattr(plan.GenerationPlanner, "tokens_beside", lambda *_: 16)
        long = long_texts(engine, range(len(LONG)), batch_size=4)
        assert long == [long_texts(engine, [n])[0] for n in range(len(LONG))]
        assert programs(engine).parts.length == 16
        equal = {"max_new_tokens": 4, "rows": 2, "key": KEYS[:6], **DRAWN}
        together = engine.generate([PROMPTS[3]] * 6, **equal)
        for i in range(6):
            own = equal | {"key": KEYS[i : i + 1]}
            assert engine.generate([PROMPTS[3]], **own) == [together[i]]
