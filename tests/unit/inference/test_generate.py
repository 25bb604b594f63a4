"""`engine.generate`: text from streamed weights and a cache, between training steps."""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zinf
from tests.unit.inference.generating import (
    BATCH,
    DRAWN,
    KEYS,
    LLAMA,
    MIXTURE,
    PROMPTS,
    RNG,
    SHAPE,
    counting_compilations,
    make_engine,
    on_nvme,
    programs,
    spied,
    used_bytes,
)
from tests.unit.refusals import refusals
from zinf.core.optim.decision import NonFiniteError
from zinf.core.plan import InfeasibleError, Run
from zinf.core.program import Role, Tier
from zinf.inference import Decoder, Scores, choose, fused_run, plan
from zinf.inference.prompts import shape_of


@pytest.fixture(scope="module")
def engine():
    with make_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def streaming():
    """An engine with the weights of `engine` that streams what rests on the device."""
    with make_engine({"execution": "streamed"}) as engine:
        yield engine


@pytest.fixture(scope="module")
def small():
    with zinf.initialize(
        lambda params, batch: (params["w"] * batch["x"]).mean(),
        {"w": jnp.ones(2)},
        optax.sgd(0.1),
        batch={"x": np.ones(2)},
    ) as engine:
        yield engine


def check_greedy(model, prompts, found):
    """Each token is the likeliest after those before it, for the model without cache.

    All texts are read at once: what follows a token does not change its logits.
    """
    whole = whole_texts(prompts, found)
    logits = nnx.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(whole))
    likeliest = np.asarray(logits.argmax(-1))
    for row, (prompt, tokens) in enumerate(zip(prompts, found, strict=True)):
        first = len(prompt) - 1
        assert list(likeliest[row, first : first + len(tokens)]) == tokens


def whole_texts(prompts, found):
    """Prompts with what follows them, int32 (B, 32), with zeros at the end."""
    whole = np.zeros((len(found), 32), np.int32)
    for row, (prompt, tokens) in enumerate(zip(prompts, found, strict=True)):
        whole[row, : len(prompt) + len(tokens)] = [*prompt, *tokens]
    return whole


def test_greedy_tokens_are_those_of_the_model_on_the_whole_text(engine):
    before = used_bytes(engine)
    found = engine.generate(PROMPTS, max_new_tokens=6)
    check_greedy(engine.update_module(), PROMPTS, found)
    assert [len(tokens) for tokens in found] == [6] * len(PROMPTS)
    assert used_bytes(engine) == before


def test_a_cache_is_overwritten_where_it_rests(streaming):
    streaming.generate(PROMPTS[:1], max_new_tokens=6)
    made = programs(streaming)
    for forward in (made.prefill, made.decode):
        program = forward.segmented.program
        # Keys and values of both layers, and the number of slots in use.
        assert len(program.caches) == 2 * SHAPE.num_layers + 1
        assert sum(len(s.caches) for s in program.segments) == len(program.caches)
        for segment in forward.segments:
            caches = segment.executables.cache_bytes
            analysis = segment.executables.forward.memory_analysis()
            assert analysis.alias_size_in_bytes == caches
        runs = [i for i in forward.plan.instructions if isinstance(i.operation, Run)]
        made_here = {a.role for run in runs for a, _ in run.creates}
        assert Role.CACHE not in made_here


ONE_END = {"eos_token_ids": (5,), "temperature": 1.3}


@pytest.mark.parametrize(
    ("count", "how"),
    [
        (1, DRAWN),
        (32, {}),
        (32, ONE_END),
        (32, DRAWN),
        (32, {"temperature": 0.7, "rows": 3, "batch_size": 5}),
    ],
)
def test_fused_tokens_are_those_of_streamed_programs(count, how, engine, streaming):
    """Drawn with the same keys, ended by a token or by the caller, on and on."""
    prompts, keys = (8 * PROMPTS)[:count], jax.random.split(jax.random.key(2), 32)
    ended = []

    def enough(number, token):
        ended.append(number)
        return token % 7 == number % 7

    rest = {"key": keys[:count], "max_new_tokens": 9, **how}
    for on_token in (None, enough):
        found, wanted = (
            each.generate(prompts, on_token=on_token, **rest)
            for each in (engine, streaming)
        )
        assert found == wanted
    assert len(ended) == 2 * sum(map(len, wanted))
    assert engine._programs.made and "everything fits" in programs(engine).why


@pytest.mark.slow
@pytest.mark.parametrize("shape", [LLAMA, {"scan_layers": True}, MIXTURE])
def test_fused_tokens_of_other_models_are_those_of_the_model(shape):
    with make_engine({}, **shape) as engine:
        found = engine.generate(PROMPTS, max_new_tokens=6)
        check_greedy(engine.update_module(), PROMPTS, found)
        assert programs(engine).programs.plan.is_fused


def test_the_loop_overwrites_its_cache_and_ends_with_the_last_text(engine):
    whole = engine.generate(PROMPTS, max_new_tokens=40)
    cache = 2 * SHAPE.num_layers * 8 * 64 * SHAPE.embed_dim * 4
    analysis = programs(engine).programs.decode.memory_analysis()
    assert cache < analysis.alias_size_in_bytes < 1.1 * cache
    assert analysis.temp_size_in_bytes < cache
    calls = spied(engine, "decode")
    ends = tuple({tokens[6] for tokens in whole})
    found = engine.generate(PROMPTS, max_new_tokens=40, eos_token_ids=ends)
    [(_, (_, passes))] = calls
    assert int(passes) == max(map(len, found)) - 1 <= 6


def test_equal_prompts_are_read_once(engine, monkeypatch):
    """In blocks of 8 prompts of up to 32 tokens, or 4 of up to 64."""
    short, long = RNG.integers(0, 97, (2, 9)), RNG.integers(0, 97, (7, 40))
    rest, blocks = {"max_new_tokens": 4, "temperature": 1.0}, []
    read = fused_run._Run.read_block

    def counted(run, requests):
        blocks.append(len(requests))
        return read(run, requests)

    monkeypatch.setattr(fused_run._Run, "read_block", counted)
    # The last ones lie in three microbatches: 8 of 21, the next 8, the rest.
    for prompts, wanted in (
        (24 * [short[0]], [8]),
        ([*(7 * [long[0]]), *short, *(6 * [long[1]])], [4, 8]),
        ([*long, *long, *long], [4, 4]),
    ):
        keys = jax.random.split(jax.random.key(3), len(prompts))
        alone = [
            engine.generate([prompt], key=keys[i : i + 1], **rest)[0]
            for i, prompt in enumerate(prompts)
        ]
        # Each is drawn by its own key, whatever is beside it.
        assert len({*map(tuple, alone)}) > len({*map(bytes, prompts)})
        blocks.clear()
        assert engine.generate(prompts, key=keys, **rest) == alone
        assert blocks == wanted


def test_fused_programs_keep_the_budget_or_are_not_taken(engine):
    """With a byte less than they need, generation streams, and says why."""
    wanted = engine.generate(PROMPTS, max_new_tokens=6)
    needed = programs(engine).programs.plan.peak_bytes[Tier.DEVICE]
    for budget, why in (
        (needed, "everything fits"),
        (needed - 1, f"needs {needed:,} "),
    ):
        with make_engine({"memory": {"device": budget}}) as tight:
            tight.stores.reset_peaks()
            assert tight.generate(PROMPTS, max_new_tokens=6) == wanted
            assert tight.stores.peak_bytes(Tier.DEVICE) <= budget
            [made] = [
                x for x in tight._programs.made._made.values() if hasattr(x, "why")
            ]
            assert why in made.why


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
def test_weights_elsewhere_are_copied_for_the_time_of_a_call(
    tier, engine, tmp_path, monkeypatch
):
    """Where steps need the room of the device, and no tier was asked for."""
    wanted = engine.generate(PROMPTS, max_new_tokens=6)
    settings = {"execution": "offloaded"}
    if tier == Tier.NVME:
        settings = on_nvme(tmp_path)
        monkeypatch.setattr(choose, "why_not_fused", lambda planner: None)
    with make_engine(settings) as other:
        before = used_bytes(other)
        other.stores.reset_peaks()
        assert other.generate(PROMPTS, max_new_tokens=6) == wanted
        made = programs(other).programs
        assert f"of weights that rest on {tier} are copied" in made.plan.why
        for each, peak in made.plan.peak_bytes.items():
            assert other.stores.peak_bytes(each) <= peak
        assert used_bytes(other) == before


def test_training_goes_on_as_without_a_fused_call():
    losses = []
    for generates in (False, True):
        with make_engine() as engine:
            losses.append([engine.step(BATCH)["loss"]])
            if generates:
                engine.generate(PROMPTS, max_new_tokens=6)
                assert "Fused" in programs(engine).why
            losses[-1] += [engine.step(BATCH)["loss"] for _ in range(2)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", ["engine", "streaming"])
def test_later_calls_compile_nothing_and_nothing_grows(name, request):
    """Calls with prompts of one bucket, as those of reinforcement learning."""
    engine = request.getfixturevalue(name)

    def call(i):
        prompts, key = RNG.integers(0, 97, (1 + i % 20, 1 + i % 16)), jax.random.key(i)
        engine.generate(prompts, max_new_tokens=2, key=key, temperature=0.9)
        return used_bytes(engine), len(engine._programs.made._made)

    # Every number of microbatches, and a prompt of every length.
    before = [call(i) for i in range(20)][-1]
    with counting_compilations() as compiled:
        assert {str(call(i)) for i in range(20, 50)} == {str(before)}
    assert not compiled


def test_tokens_are_told_as_they_are_made_and_a_text_ends_where_asked(engine):
    told = []
    prompts, rest = PROMPTS[:2], {"max_new_tokens": 4}
    whole = engine.generate(prompts, on_token=lambda *token: told.append(token), **rest)
    assert told == [(i, whole[i][n]) for n in range(4) for i in range(2)]
    # By a token that ends texts, which is the last one.
    end = whole[0][-1]
    found = engine.generate(prompts[:1], eos_token_ids=(end,), **rest)
    assert found == [whole[0][: whole[0].index(end) + 1]]

    # By the caller.
    seen = [0, 0]

    def enough(number, token):
        seen[number] += 1
        return number == 1 and seen[1] == 2

    found = engine.generate(prompts, on_token=enough, **rest)
    assert found == [whole[0], whole[1][:2]]


def test_reading_a_sequence_anew_changes_no_token(engine):
    """Of a model whose cache stays right; drawn tokens, and what a caller is told."""
    usual, told = engine._decoder(None), []
    rest = {"max_new_tokens": 6, "key": KEYS, **DRAWN}
    wanted = engine.generate(PROMPTS, decoder=usual, **rest)
    found = engine.generate(
        PROMPTS,
        decoder=replace(usual, switches_at=10),
        on_token=lambda number, token: told.append((number, token)),
        **rest,
    )
    assert found == wanted
    for number, tokens in enumerate(wanted):
        assert [token for i, token in told if i == number] == tokens


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("streams", [False, True])
def test_scores_are_those_of_the_text_before_tokens_are_left_out(
    streams, temperature, engine, streaming
):
    """Also of a sequence that is read anew, and next to one that ends early."""
    which, key = streaming if streams else engine, jax.random.key(4)
    rest = {"max_new_tokens": 6, "eos_token_ids": (5, 9, 40), "top_k": 20, "key": key}
    rest |= {"temperature": temperature, "repetition_penalty": 1.1}
    decoder = replace(which._decoder(None), switches_at=12)
    found = which.generate(PROMPTS, scores=Scores(3), decoder=decoder, **rest)
    texts = [text.tokens for text in found]
    assert texts == engine.generate(PROMPTS, **rest)
    batch, tempered = {"tokens": whole_texts(PROMPTS, texts)}, temperature or 1.0
    scores = engine.log_probabilities(batch, temperature=tempered)
    logits = engine.apply(last_logits, batch) / tempered
    for row, text in enumerate(found):
        first, count = len(PROMPTS[row]) - 1, len(text.tokens)
        own = scores[row, first : first + count]
        np.testing.assert_allclose(text.log_probabilities, own, atol=4e-6)
        log_shares = jax.nn.log_softmax(logits[row, first : first + count])
        entropies = -(jnp.exp(log_shares) * log_shares).sum(-1)
        np.testing.assert_allclose(text.entropies, entropies, rtol=1e-5)
        top = np.sort(log_shares)[:, :-4:-1]
        np.testing.assert_allclose(text.top_log_probabilities, top, atol=4e-6)
        again = np.take_along_axis(np.asarray(log_shares), text.top_tokens, axis=-1)
        np.testing.assert_allclose(again, top, atol=4e-6)


def last_logits(model, batch):
    return model(batch["tokens"])


def test_bad_input_is_refused_by_name(engine, small, golden):
    def generate(*prompts, max_new_tokens=5, **options):
        options["max_new_tokens"] = max_new_tokens
        return lambda: engine.generate(prompts, **options)

    def decode(apply):
        decoder = Decoder(apply, lambda starts, length: {"a": jnp.zeros(2, jnp.int32)})
        return lambda: small.generate([[1]], decoder=decoder, max_new_tokens=1)

    def shorter_cache(params, tokens, cache):
        return jnp.zeros((len(tokens), 3)) + params["w"].sum(), {"a": cache["a"][1:]}

    cases = {
        "an empty prompt": generate([]),
        "a text": generate("text"),
        "fractions": generate([1], [0.5]),
        "a batch as a prompt": generate([[1], [2]]),
        "a negative token": generate([-1]),
        "a token that int32 wraps": generate([2**40 + 7]),
        "too many tokens": generate([1] * 60),
        "a prompt that fills the model": generate([1] * 64),
        "no new token": generate([1], max_new_tokens=0),
        "draws without a key": generate([1], temperature=0.5),
        "too many keys": generate([1], key=KEYS),
        "no rows": generate([1], rows=0),
        "fewer top tokens than none": lambda: Scores(num_top=-1),
        "scores at no temperature": lambda: engine.log_probabilities(
            BATCH, temperature=0.0
        ),
        "no decoder": lambda: small.generate([[1]], max_new_tokens=1),
        "no scores": lambda: small.log_probabilities({"x": np.ones(2)}),
        "a decoder that cuts its cache": decode(shorter_cache),
        "a decoder without a cache": decode(lambda p, t, c: p["w"]),
        "a decoder without logits": decode(lambda p, t, c: (p["w"], c)),
        "a decoder with another cache": decode(lambda p, t, c: (p["w"], {})),
    }
    golden.check("generate_refusals.txt", refusals(cases))
    assert len(generate([1] * 60, max_new_tokens=4)()[0]) == 4


def test_logits_that_are_not_finite_are_an_error_that_names_the_prompt(engine):
    before = used_bytes(engine)
    with pytest.raises(NonFiniteError, match="prompt 1 are not finite at new token 1"):
        engine.generate([[1], [97]], max_new_tokens=5)  # 97 is no token.
    assert used_bytes(engine) == before


def test_ctrl_c_frees_the_caches(engine):
    before = used_bytes(engine)

    def press(number, token):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, max_new_tokens=5, on_token=press)
    assert used_bytes(engine) == before
    assert len(engine.generate(PROMPTS[:1], max_new_tokens=5)[0]) == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "tier"),
    [
        ({}, Tier.NVME),
        (LLAMA, Tier.HOST),
        ({"scan_layers": True}, Tier.DEVICE),
        ({"scan_layers": True}, Tier.NVME),
        ({}, None),
    ],
)
def test_tokens_are_the_same_wherever_the_cache_rests(
    shape, tier, tmp_path, monkeypatch
):
    """None: the cache is on all tiers at once."""
    monkeypatch.setattr(plan.GenerationPlanner, "tiers", (tier,))
    if tier is None:
        rooms = rooms_for_layers(rows=8, max_new_tokens=6)
        monkeypatch.setattr(plan.GenerationPlanner, "rooms", rooms)
    with make_engine(on_nvme(tmp_path), **shape) as engine:
        losses = [engine.step(BATCH)["loss"]]
        found = engine.generate(PROMPTS, max_new_tokens=6)
        losses += [engine.step(BATCH)["loss"] for _ in range(2)]
        tiers = set(programs(engine).prefill.cache_tiers.values())
        assert tiers == ({tier} if tier else set(Tier))
    with make_engine(on_nvme(tmp_path), **shape) as engine:
        engine.step(BATCH)
        check_greedy(engine.update_module(), PROMPTS, found)
        # Generating between two steps changes no bit of the training.
        assert losses[1:] == [engine.step(BATCH)["loss"] for _ in range(2)]


def rooms_for_layers(rows, max_new_tokens):
    """Room for one of two layers on the device, and for half of the other elsewhere."""
    length = shape_of(rows, 16, max_new_tokens).length
    of_keys = rows * length * SHAPE.embed_dim * 4
    places = 4 * rows
    return {
        Tier.DEVICE: 2 * of_keys + places,
        Tier.HOST: of_keys,
        Tier.NVME: 2 * of_keys,
    }


def test_a_cache_may_rest_on_several_tiers(engine, streaming, monkeypatch):
    rest = {"max_new_tokens": 7, "rows": 3}
    wanted = engine.generate(PROMPTS, **rest)
    *rooms, _ = rooms_for_layers(**rest).items()
    monkeypatch.setattr(plan.GenerationPlanner, "rooms", dict(rooms))
    before = used_bytes(streaming)
    assert streaming.generate(PROMPTS, batch_size=3, **rest) == wanted
    assert used_bytes(streaming) == before
    tiers = Counter(programs(streaming).decode.cache_tiers.values())
    # Keys and values of each layer, and the place of each sequence.
    assert tiers == {Tier.DEVICE: 3, Tier.HOST: 2}


@pytest.mark.slow
def test_a_cache_rests_on_the_first_tier_that_has_room(tmp_path):
    """The peaks stay within budgets that have no room for the cache on the device."""
    settings = on_nvme(tmp_path)
    with make_engine(settings) as engine:
        whole = engine.generate(PROMPTS, max_new_tokens=6)
        made = programs(engine)
        most = made.prefill.plan.peak_bytes[Tier.DEVICE]
        needed = max(engine.plan.peak_bytes[Tier.DEVICE], most)
    # All caches but one layer's need not be on the device at once.
    tight = {**settings["memory"], "device": needed}
    with make_engine({**settings, "memory": tight}) as engine:
        engine.stores.reset_peaks()
        many = [PROMPTS[i % 4] for i in range(64)]
        found = engine.generate(many, max_new_tokens=6)
        assert found == [whole[i % 4] for i in range(64)]
        assert engine.stores.peak_bytes(Tier.DEVICE) <= needed


@pytest.mark.slow
def test_no_room_for_a_cache_is_refused_with_the_bytes_that_are_needed(tmp_path):
    settings = on_nvme(tmp_path)
    with make_engine(settings, max_length=1 << 16, position="rope") as engine:
        taken = engine.plan.peak_bytes
    budgets = {"device": 2 * taken[Tier.DEVICE], "host": 2 * taken[Tier.HOST]}
    memory = {**settings["memory"], **budgets, "nvme_capacity": 2 * taken[Tier.NVME]}
    with make_engine(
        {**settings, "memory": memory}, max_length=1 << 16, position="rope"
    ) as engine:
        before = used_bytes(engine)
        with pytest.raises(InfeasibleError, match="budget is .* The caches take"):
            engine.generate([[1]], max_new_tokens=1 << 15)
        assert used_bytes(engine) == before
        assert np.isfinite(engine.step(BATCH)["loss"])
