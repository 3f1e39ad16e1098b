"""One prompt becomes a group of rollouts: the ids as they were sampled, behind the prompt's, and nothing else."""

import asyncio

import tiny_models

from strop.data import build_batch
from strop.engines import TorchEngine
from strop.rollout import sample_group
from strop.types import Completion, Prompt, Sampling

PROMPT = Prompt(row=4, tokens=(7, 8), text="seven eight", label="9")
SAMPLING = Sampling(temperature=0.5, max_response_tokens=6)


class Scripted:
    """An engine that answers with what it was given and remembers what it was asked."""

    def __init__(self, *completions):
        self.completions, self.requests = list(completions), []

    async def generate(self, request):
        self.requests.append(request)
        return self.completions


def decode(tokens):
    return "<" + " ".join(map(str, tokens)) + ">"


def group_of(engine, seeds, *, sampling=SAMPLING):
    return asyncio.run(sample_group(engine, PROMPT, group_id=12, seeds=seeds, sampling=sampling, decode=decode))


STOPPED = Completion(tokens=(5, 6, 2), logprobs=(-0.5, -1.5, -0.25), policy_versions=(3, 3, 4), finish_reason="stop")
CUT = Completion(tokens=(9,), logprobs=(-2.0,), policy_versions=(3,), finish_reason="length")


def test_a_rollout_is_the_prompt_and_then_what_was_sampled():
    group = group_of(Scripted(STOPPED, CUT), [100, 200])
    first, second = group.rollouts
    #                                prompt  |  sampled
    assert first.tokens ==           (7, 8,        5,    6,    2)  # fmt: skip
    assert first.response_mask ==    (False, False, True, True, True)  # fmt: skip
    assert first.rollout_logprobs == (0.0, 0.0,   -0.5, -1.5, -0.25)  # fmt: skip
    assert first.policy_versions ==  (-1, -1,      3,    3,    4)  # fmt: skip
    assert second.tokens == (7, 8, 9)
    assert [r.finish_reason for r in group.rollouts] == ["stop", "length"]
    assert [r.sample for r in group.rollouts] == [0, 1]
    assert {r.group_id for r in group.rollouts} == {group.group_id} == {12}
    assert all(r.prompt is PROMPT for r in group.rollouts)
    assert [r.reward for r in group.rollouts] == [None, None]


def test_the_text_is_of_the_response_alone():
    # case 26: a prompt that contains the answer earns nothing
    group = group_of(Scripted(STOPPED, CUT), [100, 200])
    assert [r.text for r in group.rollouts] == ["<5 6 2>", "<9>"]


def test_the_engine_is_asked_once_for_the_whole_group():
    engine = Scripted(STOPPED, CUT)
    group_of(engine, [100, 200])
    (request,) = engine.requests
    assert request.prompt_tokens == (7, 8)
    assert request.seeds == (100, 200)
    assert request.sampling is SAMPLING


def test_the_number_of_response_tokens_is_what_was_sampled():
    # case 20: by length, never by looking for an end id
    group = group_of(Scripted(STOPPED, CUT), [100, 200])
    assert [r.num_response_tokens for r in group.rollouts] == [3, 1]
    assert build_batch(group.rollouts, [1.0, 1.0]).num_trainable_tokens == 4


def test_with_a_real_engine_the_rollouts_are_its_samples_and_repeat():
    def sampled():
        engine = TorchEngine(tiny_models.llama(), stop_token_ids=[2], max_sequences=2)
        return group_of(engine, [1, 2, 3])

    group = sampled()
    assert len({r.tokens for r in group.rollouts}) == 3
    for r in group.rollouts:
        assert r.tokens[:2] == PROMPT.tokens
        assert 1 <= r.num_response_tokens <= 6
        assert all(x < 0 for x, is_sampled in zip(r.rollout_logprobs, r.response_mask, strict=True) if is_sampled)
        assert set(r.policy_versions) == {-1, 0}
    assert [r.tokens for r in sampled().rollouts] == [r.tokens for r in group.rollouts]
