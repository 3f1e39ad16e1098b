"""The simulated loops against closed forms, bounds and conservation."""

import pytest
from simulate.plans import plan

from strop.config.simulation import SimulationConfig
from strop.simulate import simulate
from strop.types import UserError

STEP_S = 15 + 2 + 3.6 + 1  # plans.plan says why
RANDOM = {"response_tokens": [], "mean_response_tokens": 30, "response_tokens_sigma": 1.0, "num_steps": 12}
FAILING = {"engine_mtbf_h": 0.05, "engine_restart_s": 20, "trainer_mtbf_h": 0.1, "checkpoint_every_steps": 3}


def test_the_synchronous_step_is_the_sum_of_its_parts():
    found = simulate(plan())
    assert found.seconds == pytest.approx(5 * STEP_S)
    assert [step.ended_s for step in found.steps] == pytest.approx([STEP_S * k for k in range(1, 6)])
    assert found.steps_per_hour == pytest.approx(3600 / STEP_S)
    assert found.tokens_per_second == pytest.approx(80 / STEP_S)
    assert found.engines_busy == pytest.approx(15 / STEP_S)
    assert found.occupancy == pytest.approx(15 / STEP_S)
    assert found.trainers_busy == pytest.approx(3.6 / STEP_S)
    assert (found.staleness, found.staleness_max) == (0, 0)
    assert found.cost_per_step == pytest.approx(4 * 2 * STEP_S / 3600)


def test_shared_gpus_count_once():
    assert simulate(plan(shared_gpus=True)).cost_per_step == pytest.approx(2 * 2 * STEP_S / 3600)


def test_a_group_is_scored_when_it_is_complete_or_the_whole_batch_when_it_is():
    """One place: groups are complete every 2 x 10 x .75 = 15 s, on each engine. Scores of a group take 2 s of one scorer; only
    those of the last two groups are waited for."""
    config = {"max_sequences": 1, "num_scorers": 1, "num_steps": 1, "score_s": 1}
    assert simulate(plan(**config)).steps[0].waited_s == pytest.approx(30 + 8)
    for early in ({"scores_early": True}, {"max_off_policy_steps": 1}):
        assert simulate(plan(**config, **early)).steps[0].waited_s == pytest.approx(30 + 4)


@pytest.mark.parametrize(
    "train_step_s, seconds",
    [
        (3, 5 * 15 + 3),  # sampling is the bottleneck: training the last batch comes behind all of it
        (40, 15 + 5 * 40),  # training is: sampling the first batch comes before all of it
    ],
)
def test_the_asynchronous_loop_takes_as_long_as_its_bottleneck(train_step_s, seconds):
    free = {"score_s": 0, "transfer_s": 0, "train_token_s": 0}
    found = simulate(plan(max_off_policy_steps=1, train_step_s=train_step_s, **free))
    assert found.seconds == pytest.approx(seconds)


@pytest.mark.parametrize("seed", range(4))
def test_the_asynchronous_loop_lies_between_its_bottleneck_and_the_synchronous_loop(seed):
    config = plan(**RANDOM, seed=seed, max_off_policy_steps=1)
    found, synchronous = simulate(config), simulate(config.model_copy(update={"max_off_policy_steps": 0}))
    trains = sum(step.trained_s for step in found.steps) + config.num_steps * config.transfer_s
    samples = found.engines_busy * found.seconds  # of the mean engine
    assert max(trains, samples) < found.seconds < synchronous.seconds


@pytest.mark.parametrize("updates, bound", [(1, 1), (1, 3), (2, 5), (4, 4)])
@pytest.mark.parametrize("failures", [{}, FAILING], ids=["sound", "failing"])
def test_no_rollout_is_staler_than_the_bound(updates, bound, failures):
    options = RANDOM | failures | {"updates_per_batch": updates, "max_off_policy_steps": bound, "train_step_s": 40}
    found = simulate(plan(**options))
    assert found.staleness_max == bound // updates * updates
    assert 0 < found.staleness <= bound


def test_both_loops_learn_from_the_same_lengths():
    one, other = (simulate(plan(**RANDOM, max_off_policy_steps=ahead)) for ahead in (0, 2))
    assert [s.response_tokens for s in one.steps] == [s.response_tokens for s in other.steps]


def test_the_same_seed_gives_the_same_run_and_another_one_another():
    options = RANDOM | FAILING | {"max_off_policy_steps": 1}
    one, again, other = (simulate(plan(**options, seed=seed)) for seed in (3, 3, 4))
    assert one == again
    assert one.seconds != other.seconds


def test_log_normal_lengths_have_the_mean_that_was_asked_for():
    found = simulate(plan(**RANDOM | {"prompts_per_step": 1000, "mean_response_tokens": 300, "max_sequences": 4000}))
    mean = sum(step.response_tokens for step in found.steps) / (12 * 2000)
    assert mean == pytest.approx(300, rel=0.04)  # 3 standard errors: 1.3 x 300 / sqrt(24000) = 2.5 each


def test_no_response_is_longer_than_the_limit():
    found = simulate(plan(response_tokens=[50], max_response_tokens=20))
    assert {step.response_tokens for step in found.steps} == {8 * 20}


# ---- failures -------------------------------------------------------------------------------------------------------


def test_a_trainer_that_fails_costs_its_restart_and_the_steps_since_the_checkpoint():
    options = {"num_steps": 60, "trainer_mtbf_h": 0.3, "trainer_restart_s": 50, "checkpoint_every_steps": 4}
    found = simulate(plan(**options))
    fails, made = found.num_trainer_failures, len(found.steps)
    assert made > 60
    assert made - 60 <= 3 * fails
    least = made * STEP_S + 50 * fails
    assert least < found.seconds <= least + 3.6 * fails  # what was trained of a batch when it failed
    expected = found.seconds * 2 / (0.3 * 3600)
    assert abs(fails - expected) < 4 * expected**0.5


def test_engines_that_fail_make_a_step_longer():
    found, sound = simulate(plan(num_steps=40, engine_mtbf_h=0.05, engine_restart_s=30)), simulate(plan(num_steps=40))
    expected = found.seconds * 2 / (0.05 * 3600)
    assert abs(found.num_engine_failures - expected) < 4 * expected**0.5
    assert found.seconds > sound.seconds + 30 * found.num_engine_failures / 4  # seldom both at once, or while both wait
    assert len(found.steps) == 40


@pytest.mark.parametrize("option", ["engine_mtbf_h", "trainer_mtbf_h"])
def test_failures_that_leave_no_time_to_work_end_the_simulation(option):
    with pytest.raises(UserError, match=f"^{option} must leave time to work"):
        simulate(plan(**{option: 1e-6}))


# ---- options --------------------------------------------------------------------------------------------------------

CHANGES = {
    "seed": 5,
    "response_tokens": [7],
    "max_response_tokens": 12,
    "max_off_policy_steps": 4,
    "shared_gpus": True,
    "scores_early": True,
    "engine_mtbf_h": 0.2,
    "trainer_mtbf_h": 0.2,
}
BY_SPLITS = {"split_gpus"}  # tests/simulate/test_splits.py


@pytest.mark.parametrize("name", sorted(set(SimulationConfig.model_fields) - BY_SPLITS))
def test_each_option_moves_something(name):
    ahead = 0 if name == "scores_early" else 2
    base = plan(**RANDOM | FAILING | {"max_off_policy_steps": ahead, "num_scorers": 1})
    value = CHANGES[name] if name in CHANGES else 2 * getattr(base, name)
    changed = base.model_copy(update={name: value})
    one, other = simulate(base), simulate(changed)
    assert (one.steps, one.cost_per_step) != (other.steps, other.cost_per_step)
