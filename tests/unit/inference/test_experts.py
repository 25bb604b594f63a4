"""Experts on demand: a pass reads those that its tokens chose, and no others."""

import contextlib

import jax
import numpy as np
import pytest

from tests.tiers import streamed
from tests.unit.inference.generating import BATCH, make_engine, programs, used_bytes
from zinf.core.memory import DeviceStore, Slots
from zinf.core.plan import FetchChosen, Link
from zinf.core.program import is_worthwhile
from zinf.core.step.run import passes
from zinf.inference import Scores

NUM_EXPERTS, K = 128, 8
MIXTURE = {
    "embed_dim": 16,
    "mlp_dim": 32,
    "num_experts": NUM_EXPERTS,
    "experts_per_token": K,
    "use_bias": False,
}
EXPERT_BYTES = 2 * 16 * 32 * 4
PROMPTS = [np.arange(3), np.arange(40, 44)]
ONE = {"rows": 1, "batch_size": 1}


@contextlib.contextmanager
def counting_bytes():
    """The bytes that each pass moves over each link, as they were counted."""
    found, run = [], passes.run_plan

    def counted(plan, work, stores, seeds, record):
        run(plan, work, stores, seeds, record)
        found.append(record.moved_bytes)

    passes.run_plan = counted
    try:
        yield found
    finally:
        passes.run_plan = run


def settings(tier, folder, experts):
    memory = {"experts": experts, "nvme": [str(folder)]}
    rest = {"segment": {}, "memory": memory, "persistence_threshold": 0}
    return streamed(tier, **rest)


@pytest.fixture(scope="module")
def streaming():
    """An engine that streams what rests on the device."""
    with make_engine(streamed("none", segment={}), **MIXTURE) as engine:
        yield engine


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An engine that reads all experts of a layer for each pass."""
    folder = tmp_path_factory.mktemp("whole")
    with make_engine(settings("cpu", folder, "off"), **MIXTURE) as engine:
        yield engine


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """An engine with slots for what a token chooses in a layer; the next needs all."""
    folder = tmp_path_factory.mktemp("few")
    asked = settings("cpu", folder, K * EXPERT_BYTES)
    with make_engine(asked, **MIXTURE) as engine:
        yield engine


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """An engine with a slot for each expert."""
    folder = tmp_path_factory.mktemp("warm")
    with make_engine(settings("nvme", folder, None), **MIXTURE) as engine:
        yield engine


def texts(engine, **how):
    """Drawn texts with their log-probabilities, and the bytes of each pass."""
    rest = {"max_new_tokens": 9, "temperature": 0.8, "key": jax.random.key(3)}
    with counting_bytes() as moved:
        found = engine.generate(PROMPTS, scores=Scores(), **rest, **ONE, **how)
    tokens = [each.tokens for each in found]
    return tokens, [each.log_probabilities.tolist() for each in found], moved


def bytes_of(moved, link, numbers=None):
    """The bytes of some passes over a link, or of all."""
    return sum(moved[i][link] for i in numbers or range(len(moved)))


def test_a_token_reads_few_experts_and_the_text_is_that_of_all(streaming, whole, few):
    tokens, scores, moved = texts(few)
    chosen = programs(few).decode.segmented.program.chosen
    assert [each.num_slots for each in chosen] == [K, K]
    all_tokens, all_scores, all_moved = texts(whole)
    assert (tokens, scores) == (all_tokens, all_scores) == texts(streaming)[:2]
    # Texts join and leave in passes of some microbatches.
    prompts, rest = [*PROMPTS, np.arange(7, 9)], {"max_new_tokens": 9, "rows": 1}
    ends = {"on_token": lambda number, token: number == 0, "batch_size": 2}
    joined, alone = (x.generate(prompts, **rest, **ends) for x in (few, whole))
    assert joined == alone
    # 8 of 128 are 0.0625; the rest is attention, embeddings and caches.
    decodes = [*range(1, 9), *range(10, 18)]
    assert bytes_of(moved, Link.H2D, decodes) <= 0.1 * bytes_of(
        all_moved, Link.H2D, decodes
    )


def test_experts_stay_in_slots_until_others_need_them(whole, warm):
    """With a slot for each expert none is read twice, and the plan expects none."""
    tokens, scores, moved = texts(warm)
    assert (tokens, scores) == texts(whole)[:2]
    made = programs(warm).decode
    chosen = made.segmented.program.chosen
    assert {each.num_slots for each in chosen} == {2 * NUM_EXPERTS}
    fetches = [
        each.operation
        for each in made.plan.instructions
        if isinstance(each.operation, FetchChosen)
    ]
    assert [each.expected_bytes for each in fetches] == [0, 0]
    # What is read besides is the same for each token.
    least = made.plan.link_bytes(Link.NVME_READ)
    rest = [each[Link.NVME_READ] - least for each in moved[1:9]]
    assert rest[0] > rest[-1] >= 0
    assert sum(rest) <= 2 * NUM_EXPERTS * EXPERT_BYTES


def test_tokens_of_many_sequences_read_all_experts(whole, few):
    """They choose about all of them, which are then better read ahead."""
    assert is_worthwhile(NUM_EXPERTS, K, 2, num_slots=64)
    assert not is_worthwhile(NUM_EXPERTS, K, 2, num_slots=64, num_microbatches=16)
    assert not is_worthwhile(NUM_EXPERTS, K, 64)
    how = {"max_new_tokens": 3, "rows": 1}
    found = few.generate(12 * PROMPTS, **how)
    assert not programs(few).decode.segmented.program.chosen
    assert found == whole.generate(12 * PROMPTS, **how)


def test_log_probabilities_read_the_chosen_experts_to_the_same_bits(
    streaming, whole, warm
):
    batch = {"tokens": BATCH["tokens"][:1, :5]}
    with counting_bytes() as moved:
        found = warm.log_probabilities(batch)
    with counting_bytes() as all_moved:
        wanted = whole.log_probabilities(batch)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(found, streaming.log_probabilities(batch))
    read = bytes_of(moved, Link.NVME_READ) / bytes_of(all_moved, Link.H2D)
    assert read < 4 * K / NUM_EXPERTS + 0.05


def test_slots_that_were_made_in_part_are_freed(few, monkeypatch):
    def refused(store, arrays, zeros):
        store.write(arrays[0], zeros[0]())
        raise MemoryError("no room for the second")

    few.stores.device.free_spare()
    before = used_bytes(few)
    monkeypatch.setattr(DeviceStore, "hold_slots", refused)
    with pytest.raises(MemoryError):
        few.generate(PROMPTS, max_new_tokens=2, **ONE)
    assert used_bytes(few) == before


def test_too_few_slots_are_refused_by_name(tmp_path):
    lacking = settings("cpu", tmp_path, (K - 1) * EXPERT_BYTES)
    message = (
        f"memory.experts is {7 * EXPERT_BYTES:,} bytes, which holds 7 experts of "
        f"{EXPERT_BYTES:,}, and a token chooses 8 of the 128 experts of a layer. Give "
        f"at least {8 * EXPERT_BYTES:,} bytes"
    )
    with (
        make_engine(lacking, **MIXTURE) as engine,
        pytest.raises(ValueError, match=message),
    ):
        engine.generate(PROMPTS[:1], max_new_tokens=2, **ONE)


def test_the_slot_used_longest_ago_is_taken():
    slots = Slots(3)
    for number in range(3):
        assert slots.use([(0, number)]) == [(0, number)]
        slots.slot_of[0, number] = slots.free_slot()
    assert slots.use([(0, 0), (1, 0)]) == [(1, 0)]
    assert slots.free_slot() == 1


def test_slots_stay_between_calls_until_a_step_changes_weights(whole, warm):
    """The last test here: it trains the engines of the others."""
    before = texts(warm)[:2]
    for engine in (whole, warm):
        engine.step(BATCH)
    *first, moved = texts(warm)
    *again, fewer = texts(warm)
    assert again == first == list(texts(whole)[:2])
    assert first != list(before)
    assert bytes_of(fewer, Link.NVME_READ) < 0.9 * bytes_of(moved, Link.NVME_READ)
