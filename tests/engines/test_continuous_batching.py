"""A sample depends on its prompt, its seed and the weights: not on slots, order, neighbours, or who gave up waiting."""

import asyncio
import math
import random

import pytest
import tiny_models
import torch
from made_requests import DEADLINE_S, engine_of, request, run

from strop.engines import decoders, shared_prompts
from strop.engines.lean import SHORT_PROMPT
from strop.types import GuardError, UserError

STOP = [2, 5, 11]  # of 37 tokens: responses end at many lengths
MIXED = [
    request([3], seeds=(1, 2, 3), length=12),
    request([4, 5, 6, 7, 8, 9], seeds=(4,), length=3),
    request([1, 2], seeds=(5, 6, 7, 8), length=9, temperature=0.7),
    request([10], seeds=(9, 10), length=1),
    request([7, 7, 7], seeds=(11, 12), length=12, top_p=0.8),
    request([8, 1], seeds=(13,), length=6, temperature=0.0),
    request([9], seeds=(14, 15), length=7, top_k=3, stop_token_ids=(20,)),
]


def comparable(groups):
    """Tokens, reasons and versions exactly, log-probabilities apart: float32 sums depend on the number of rows."""
    exact = [[(c.tokens, c.finish_reason, c.policy_versions) for c in group] for group in groups]
    return exact, [x for group in groups for c in group for x in c.logprobs]


def assert_same(found, wanted):
    assert comparable(found)[0] == comparable(wanted)[0]
    assert comparable(found)[1] == pytest.approx(comparable(wanted)[1], abs=1e-5)


@pytest.fixture(scope="module")
def alone():
    """Each sample of MIXED by itself: one request of one seed, in an engine of its own."""
    found = {}
    for name in ("llama", "gpt2", "sliding_mistral"):
        groups = []
        for r in MIXED:
            singles = [
                run(engine_of(tiny_models.BUILDERS[name](), stop=STOP, max_sequences=1), one_seed(r, seed))[0][0]
                for seed in r.seeds
            ]
            groups.append(singles)
        found[name] = groups
    return found


def one_seed(r, seed):
    return type(r)(r.prompt_tokens, (seed,), r.sampling)


@pytest.mark.parametrize("max_sequences", [1, 3, 64])
@pytest.mark.parametrize("name", ["llama", "gpt2", "sliding_mistral"])
def test_the_number_of_slots_does_not_matter(name, max_sequences, alone):
    # 15 samples in 1, 3 or 64 slots: with fewer slots than samples every one is filled again
    engine = engine_of(tiny_models.BUILDERS[name](), stop=STOP, max_sequences=max_sequences)
    assert_same(run(engine, *MIXED), alone[name])


@pytest.mark.parametrize("shuffle", range(4))
def test_the_order_of_arrival_does_not_matter(shuffle, alone):
    order = random.Random(shuffle).sample(range(len(MIXED)), len(MIXED))
    engine = engine_of(tiny_models.llama(), stop=STOP, max_sequences=4)
    found = run(engine, *(MIXED[i] for i in order))
    assert_same(found, [alone["llama"][i] for i in order])


@pytest.mark.parametrize("pause", [1, 2, 5])
def test_requests_that_arrive_while_others_are_in_flight_change_nothing(pause, alone):
    # the second one is the widest, so that a cache as wide as the first would not hold it
    async def one_by_one(engine):
        tasks = []
        for r in (MIXED[3], MIXED[1], *MIXED):
            tasks.append(asyncio.create_task(engine.generate(r)))
            for _ in range(pause):
                await asyncio.sleep(0)
        async with asyncio.timeout(DEADLINE_S):
            return await asyncio.gather(*tasks)

    engine = engine_of(tiny_models.llama(), stop=STOP, max_sequences=3)
    expected = alone["llama"]
    assert_same(asyncio.run(one_by_one(engine)), [expected[3], expected[1], *expected])


def test_a_wider_request_waits_for_those_in_flight_and_is_answered():
    async def narrow_then_wide(engine):
        narrow = asyncio.create_task(engine.generate(request([3], seeds=(1, 2), length=10)))
        for _ in range(4):
            await asyncio.sleep(0)
        wide = asyncio.create_task(engine.generate(request(range(20), seeds=(3,), length=40)))
        behind = asyncio.create_task(engine.generate(request([4], seeds=(4,), length=5)))
        async with asyncio.timeout(DEADLINE_S):
            return await asyncio.gather(narrow, wide, behind)

    found = asyncio.run(narrow_then_wide(engine_of(tiny_models.llama())))
    separately = [
        run(engine_of(tiny_models.llama()), r)[0]
        for r in (
            request([3], seeds=(1, 2), length=10),
            request(range(20), seeds=(3,), length=40),
            request([4], seeds=(4,), length=5),
        )
    ]
    assert_same(found, separately)


def test_more_requests_than_slots_all_finish_and_are_counted():
    engine = engine_of(tiny_models.llama(), stop=STOP, max_sequences=2)
    found = run(engine, *(request([i % 30 + 3], seeds=(i, i + 100), length=1 + i % 5) for i in range(25)))
    assert all(len(group) == 2 for group in found)
    assert engine.num_sampled_tokens == sum(len(c.tokens) for group in found for c in group)


@pytest.mark.parametrize("most", [40, 20, 10, None])
def test_a_bound_on_the_cache_holds_and_changes_no_token(most, monkeypatch):
    """Requests of 9 or 10 positions, then of 7, then one of 10 beside two of 5, of which one is left
    over."""
    requests = [request([3] * n, seeds=range(5), length=6) for n in (3, 4)], [request([5], seeds=range(5), length=6)]
    requests = (*requests, [request([3] * 4, seeds=(1,), length=6), request([4], seeds=(2, 3), length=4)])
    plain = engine_of(tiny_models.llama(), stop=STOP)
    engine = engine_of(tiny_models.llama(), stop=STOP, max_cache_tokens=most)
    made, kind = [], engine._decoder_kind

    def decoder(model, *, num_slots, prompt_width, response_width):
        made.append((num_slots, prompt_width + response_width))
        return kind(model, num_slots=num_slots, prompt_width=prompt_width, response_width=response_width)

    monkeypatch.setattr(engine, "_decoder_kind", decoder)
    for some in requests:
        assert_same(run(engine, *some), run(plain, *some))
    assert all(most is None or slots * width <= most for slots, width in made)
    expected = {40: [(4, 10), (5, 7), (4, 10)], 20: [(2, 10), (4, 5)], 10: [(1, 10), (2, 5)], None: [(64, 10)]}
    assert made == expected[most]


def test_a_request_that_does_not_fit_the_bound_is_refused_and_others_are_answered():
    engine = engine_of(tiny_models.llama(), stop=STOP, max_cache_tokens=10)
    with pytest.raises(
        UserError, match=r"engine.max_cache_tokens must hold .* got 10 for 5 prompt tokens \+ 6 response"
    ):
        run(engine, request([3] * 5, length=6))
    assert len(run(engine, request([3] * 4, length=6))) == 1


def test_completions_come_in_the_order_of_the_seeds():
    forward = run(engine_of(tiny_models.llama(), stop=STOP), request([3], seeds=(1, 2, 3, 4), length=12))[0]
    backward = run(engine_of(tiny_models.llama(), stop=STOP), request([3], seeds=(4, 3, 2, 1), length=12))[0]
    assert [c.tokens for c in forward] == [c.tokens for c in reversed(backward)]
    assert len({c.tokens for c in forward}) == 4


def test_an_engine_answers_again_in_another_event_loop():
    engine = engine_of(tiny_models.llama(), stop=STOP)
    assert_same(run(engine, *MIXED), run(engine, *MIXED))


def test_a_request_for_no_samples_is_answered_at_once():
    assert run(engine_of(tiny_models.llama()), request([3], seeds=()), request([4], seeds=(1,)))[0] == []


# ---- cancelling ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_cancelled_request_frees_its_slots_and_the_others_finish(after):
    others = [request([4], seeds=(5, 6), length=10), request([6, 7], seeds=(7,), length=10)]

    async def cancel_one(engine):
        doomed = asyncio.create_task(engine.generate(request([3], seeds=(1, 2, 3), length=60)))
        tasks = [asyncio.create_task(engine.generate(r)) for r in others]
        for _ in range(after):
            await asyncio.sleep(0)
        doomed.cancel()
        async with asyncio.timeout(DEADLINE_S):
            found = await asyncio.gather(*tasks)
            with pytest.raises(asyncio.CancelledError):
                await doomed
        return found, engine.num_sampled_tokens

    # two slots: as long as the doomed request held them, nobody else could start
    found, num_sampled = asyncio.run(cancel_one(engine_of(tiny_models.llama(), max_sequences=2)))
    assert_same(found, run(engine_of(tiny_models.llama()), *others))
    assert num_sampled <= 30 + 2 * (after + 1)


def test_closing_ends_what_is_in_flight():
    async def close_early(engine):
        task = asyncio.create_task(engine.generate(request([3], seeds=(1,), length=60)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await engine.close()
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(close_early(engine_of(tiny_models.llama())))


# ---- a broken model --------------------------------------------------------------------------------------------------


def broken_and_mended(name, first, second):
    """Answers before the weights were NaN, what the waiters got while they were, and answers after."""
    model = tiny_models.BUILDERS[name]()
    engine = engine_of(model, max_sequences=4)
    before = run(engine, *second)
    good = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(math.nan)

    async def ask():
        async with asyncio.timeout(DEADLINE_S):
            return await asyncio.gather(*(engine.generate(r) for r in first), return_exceptions=True)

    errors = asyncio.run(ask())
    with torch.no_grad():
        for p, value in zip(model.parameters(), good, strict=True):
            p.copy_(value)
    return before, errors, run(engine, *second)


@pytest.mark.parametrize("name", ["llama", "gpt2", "sliding_mistral"])
def test_a_broken_model_fails_every_waiter_and_a_mended_one_answers_again(name):
    # more samples than slots: some wait in the queue when it breaks
    requests = [request([i + 3], seeds=(i, i + 1)) for i in range(5)]
    before, errors, after = broken_and_mended(name, requests, requests)
    assert len(errors) == 5
    assert all(isinstance(e, GuardError) and "not finite" in str(e) for e in errors)
    assert_same(after, before)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_what_a_broken_model_left_in_the_cache_does_not_reach_later_samples(name):
    # a long prompt fills a slot with NaN; later a short sample in that slot runs beside a longer one, so that
    # attention reads the slot's stale places under the mask
    before, errors, after = broken_and_mended(
        name,
        [request(range(20), seeds=(1, 2, 3, 4), length=8)],
        [request([3], seeds=(5, 6), length=8), request(range(10), seeds=(7, 8), length=8)],
    )
    assert all(isinstance(e, GuardError) for e in errors)
    assert_same(after, before)


def test_one_broken_token_row_is_caught_when_it_is_read():
    # only embedding 9 is broken: a prompt without it is answered, one with it is refused
    model = tiny_models.llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[9] = math.inf
    with pytest.raises(GuardError):
        run(engine_of(model), request([9], length=2))


# ---- prompts that samples share --------------------------------------------------------------------------------------


def counted(last_logits, read):
    """The same, which writes down what is read."""

    def computed(model, rows, *given):
        read.extend(rows)
        return last_logits(model, rows, *given)

    return computed


@pytest.mark.parametrize("more", [0, SHORT_PROMPT])
@pytest.mark.parametrize("max_sequences", [2, 3, 64])
def test_a_prompt_is_read_once_for_all_samples_of_its_group_however_few_start_together(
    max_sequences, more, monkeypatch
):
    """Three groups of five samples of unequal length; the same again after other weights came."""
    model = tiny_models.llama()
    engine = engine_of(model, stop=STOP, max_sequences=max_sequences)
    prompts, seeds = [(3, 4, 5) + (7,) * more, (6, 7) + (3,) * more, (8, 9, 10) + (4,) * more], range(5)
    requests = [request(prompt, seeds=seeds, length=9) for prompt in prompts]
    for _ in range(2):
        wanted, read = [run(engine_of(model, stop=STOP), r)[0] for r in requests], []
        with monkeypatch.context() as patch:
            for where in (decoders, shared_prompts):
                patch.setattr(where, "last_logits", counted(where.last_logits, read))
            assert_same(run(engine, *requests), wanted)
        assert sorted(read) == sorted(prompts)
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5)


def test_weights_that_come_while_samples_are_in_flight_read_a_prompt_again_for_those_that_begin_later():
    """The other samples of the prompt have begun with the old ones."""
    old, new = tiny_models.llama(), tiny_models.llama(seed=1)
    prompt, long = request([3, 4, 5], seeds=(1, 2), length=4), request([6, 7], seeds=(3,), length=40)

    async def work():
        engine = engine_of(old, max_sequences=2)
        first, other = asyncio.create_task(engine.generate(prompt)), asyncio.create_task(engine.generate(long))
        for _ in range(3):
            await asyncio.sleep(0)
        later = asyncio.create_task(engine.generate(request([3, 4, 5], seeds=(9,), length=4)))
        await engine.update_weights(new.named_parameters(), 1)
        await first
        await other
        return await later

    (found,), ((wanted,),) = asyncio.run(work()), run(engine_of(new), request([3, 4, 5], seeds=(9,), length=4))
    assert found.tokens == wanted.tokens
    assert found.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)


def test_a_group_holds_its_prompt_once_in_the_cache():
    engine = engine_of(tiny_models.llama(), max_sequences=8)
    run(engine, request([3] * (SHORT_PROMPT + 1), seeds=range(8), length=4))
    layer = engine._decoder._cache.layers[0]
    assert (layer.prompt_keys.shape[0], layer.prompt_keys.shape[2]) == (1, SHORT_PROMPT + 1)
    assert (layer.keys.shape[0], layer.keys.shape[2]) == (8, 4)
