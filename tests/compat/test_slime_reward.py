"""slime's reward functions, unchanged, as rewards of strop."""

import asyncio
import textwrap
from dataclasses import replace

import pytest
from rewards.written_rollouts import make_rollout

from strop.config.sampling import SlimeRewardOptions
from strop.rewards import make_scorer
from strop.types import Prompt, RewardError, Rollout


@pytest.fixture
def scored(tmp_path):
    """Scores rollouts with the function `f` of a source text."""

    def score(source, rollouts, **options):
        path = tmp_path / "users_reward.py"
        path.write_text(textwrap.dedent(source))
        return make_scorer(SlimeRewardOptions(function=f"{path}:f", **options))(rollouts)

    return score


def rewards(scored):
    return [rollout.reward for rollout in scored.rollouts]


SAMPLED = Rollout(
    Prompt(row=3, tokens=(7, 8), text="1+1=", label="2", metadata={"level": 4}),
    group_id=5,
    sample=1,
    tokens=(7, 8, 9, 10, 2),
    response_mask=(False, False, True, False, True),
    rollout_logprobs=(0.0, 0.0, -0.5, 0.0, -0.25),
    policy_versions=(-1, -1, 6, -1, 7),
    finish_reason="length",
    text="two",
)


def test_an_async_function_scores_a_sample(scored):
    source = """
    import asyncio
    from slime.utils.types import Sample

    async def f(args, sample: Sample, **kwargs) -> float:
        await asyncio.sleep(0)
        return float(sample.response == sample.label)
    """
    assert rewards(scored(source, [make_rollout("5", "5"), make_rollout("6", "5")])) == [1.0, 0.0]


def test_a_plain_function_is_taken_too(scored):
    assert rewards(scored("def f(args, sample):\n    return len(sample.response)", [make_rollout("abc")])) == [3.0]


def test_a_sample_has_the_fields_of_the_rollout(scored):
    source = """
    from slime.utils.types import Sample

    async def f(args, sample):
        assert sample.prompt == "1+1=" and sample.response == "two" and sample.label == "2"
        assert sample.tokens == [7, 8, 9, 10, 2] and sample.response_length == 3
        assert sample.loss_mask == [1, 0, 1] and sample.rollout_log_probs == [-0.5, 0.0, -0.25]
        assert sample.effective_response_length == 2
        assert sample.status == Sample.Status.TRUNCATED and sample.status.value == "truncated"
        assert sample.metadata == {"level": 4} and sample.group_index == 5 and sample.index == 0
        assert sample.reward is None and sample.weight_versions == ["6", "7"] and not sample.remove_sample
        return 1
    """
    assert rewards(scored(source, [SAMPLED])) == [1.0]


def test_slime_s_types_are_there_in_the_body_of_a_function_too(scored):
    source = """
    async def f(args, sample):
        from slime.utils.types import Sample

        return isinstance(sample, Sample) and sample.status is Sample.Status.COMPLETED
    """
    assert rewards(scored(source, [make_rollout("a")])) == [1.0]


def test_what_else_of_slime_a_function_imports_is_named(scored):
    with pytest.raises(RewardError, match=r"No module named 'slime.rollout.rm_hub'"):
        scored("from slime.rollout.rm_hub import f", [make_rollout("a")])


def test_functions_run_side_by_side(scored):
    """Each waits for the other: one after the other they would wait for ever."""
    source = """
    import asyncio
    waiting = []

    async def f(args, sample):
        waiting.append(asyncio.get_running_loop().create_future())
        if len(waiting) == 2:
            [future.set_result(None) for future in waiting]
        await asyncio.wait_for(waiting[sample.index], timeout=20)
        return sample.index
    """
    assert rewards(scored(source, [make_rollout("a"), make_rollout("b")])) == [0.0, 1.0]


def test_a_function_is_called_where_strop_s_own_loop_is_running_and_keeps_one_loop(scored):
    source = """
    import asyncio
    loops = set()

    async def f(args, sample):
        loops.add(asyncio.get_running_loop())
        return len(loops)
    """

    async def twice():
        return [rewards(scored(source, [make_rollout("a")])), rewards(scored(source, [make_rollout("a")]))]

    assert asyncio.run(twice()) == [[1.0], [1.0]]


def test_a_batched_function_is_given_the_samples_of_one_prompt(scored):
    source = """
    async def f(args, samples, **kwargs):
        assert len({sample.group_index for sample in samples}) == 1
        return [len(samples) + sample.index / 10 for sample in samples]
    """
    groups = [replace(make_rollout("a"), group_id=group) for group in (0, 1, 0, 1, 0)]
    assert rewards(scored(source, groups, batched=True)) == pytest.approx([3.0, 2.1, 3.2, 2.3, 3.4])


@pytest.mark.parametrize(
    "returned, got", [("[1.0]", "1 scores for 2"), ("2.0", "float for 2"), ("{}", "0 scores for 2")]
)
def test_a_batched_function_that_returns_another_number_of_scores_is_refused(scored, returned, got):
    with pytest.raises(RewardError, match=rf"one score for each sample of a prompt .* got {got} samples"):
        scored(f"async def f(args, samples):\n    return {returned}", [make_rollout("a")] * 2, batched=True)


def test_reward_key_takes_one_value_of_a_dict(scored):
    source = 'async def f(args, sample):\n    assert args.reward_key == "acc"\n    return {"acc": 0.5, "why": "near"}'
    found = scored(source, [make_rollout("a")], reward_key="acc")
    assert rewards(found) == [0.5]
    assert found.rollouts[0].reward_parts is None


@pytest.mark.parametrize("returned, got", [("{'score': 1}", "one with score"), ("1.0", "1.0")])
def test_a_reward_without_the_key_is_refused_with_what_is_there(scored, returned, got):
    with pytest.raises(RewardError, match=rf"must return a dict with 'acc' \(reward.reward_key\), got {got}"):
        scored(f"async def f(args, sample):\n    return {returned}", [make_rollout("a")], reward_key="acc")


def test_a_dict_without_reward_key_is_named_rewards(scored):
    found = scored("async def f(args, sample):\n    return {'a': 1, 'b': 0.5}", [make_rollout("a")])
    assert (rewards(found), found.rollouts[0].reward_parts) == ([1.5], {"a": 1.0, "b": 0.5})


def test_args_has_the_values_of_the_config_and_defaults_work(scored):
    source = """
    async def f(args, sample):
        return args.scale * getattr(args, "more", 3) + hasattr(args, "no")
    """
    assert rewards(scored(source, [make_rollout("a")], args={"scale": 2})) == [6.0]


def test_an_attribute_of_args_that_is_not_there_is_named_with_where_to_set_it(scored):
    source = "async def f(args, sample):\n    return args.rm_url"
    with pytest.raises(
        RewardError, match=r"args.rm_url is not there. Set it in the table \[reward.args\], which has reward_key, x"
    ):
        scored(source, [make_rollout("a")], args={"x": 1})


def test_a_field_of_the_sample_that_is_not_there_is_named(scored):
    with pytest.raises(
        RewardError, match=r"sample.multimodal_inputs is not there: strop's samples have group_index, index"
    ):
        scored("async def f(args, sample):\n    return sample.multimodal_inputs", [make_rollout("a")])


FAILS_ON_A = """
async def f(args, sample):
    if sample.response == "a":
        raise OSError("no answer")
    return 2
"""


@pytest.mark.parametrize("on_error, first", [("zero", 0.0), ("exclude", None)])
def test_one_that_fails_leaves_the_others_their_scores(scored, on_error, first):
    found = scored(FAILS_ON_A, [make_rollout("a"), make_rollout("b")], on_error=on_error)
    assert rewards(found) == [first, 2.0]
    assert found.metrics["reward/num_errors"].value == 1


def test_one_that_fails_stops_the_run_by_default(scored):
    with pytest.raises(RewardError, match="raised OSError: no answer"):
        scored(FAILS_ON_A, [make_rollout("b"), make_rollout("a")])


def test_a_batched_function_that_fails_fails_for_its_own_prompt_alone(scored):
    source = """
    async def f(args, samples):
        if samples[0].group_index == 0:
            raise OSError("no answer")
        return [1] * len(samples)
    """
    groups = [replace(make_rollout("a"), group_id=group) for group in (0, 1, 0)]
    assert rewards(scored(source, groups, batched=True, on_error="zero")) == [0.0, 1.0, 0.0]
