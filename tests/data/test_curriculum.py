"""The curriculum: unseen prompts first, then by the distance of their mean reward from the target."""

import json
import math
from collections import Counter

import pytest

from strop.config.filtering import AccuracyCurriculumOptions
from strop.data.curriculum import AccuracyCurriculum
from strop.types import DataError


def curriculum(num_rows, *, seed=0, shuffle=True, **options):
    return AccuracyCurriculum(num_rows, seed=seed, shuffle=shuffle, options=AccuracyCurriculumOptions(**options))


def seen(means, **options):
    """A curriculum whose first pass is over, with these means."""
    made = curriculum(len(means), **options)
    made.take(len(means))
    for row, mean in enumerate(means):
        made.observe(row, mean)
    return made


def test_every_row_comes_once_before_any_comes_again():
    made = curriculum(7)
    taken = made.take(3)
    for row in taken:
        made.observe(row, 0.5)  # as likely as a row can be
    taken += made.take(4)
    assert sorted(taken) == list(range(7))


def test_a_take_that_spans_the_end_of_the_first_pass_has_no_row_twice():
    made = curriculum(7)
    made.take(5)
    assert sorted(made.take(7)) == list(range(7))


def test_a_take_of_more_rows_than_there_are_has_each_about_equally_often():
    assert sorted(Counter(curriculum(3).take(8)).values()) == [2, 3, 3]


def test_the_mean_of_a_row_follows_by_the_rate():
    """0.25 of the newest: 1, then 1 + (0 - 1) / 4 = 0.75, then 0.75 + (1 - 0.75) / 4 = 0.8125."""
    made, means = curriculum(2, rate=0.25), []
    for reward in (1.0, 0.0, 1.0):
        made.observe(0, reward)
        means.append(dict(made.state()["means"])[0])
    assert means == [1.0, 0.75, 0.8125]


def test_rows_are_drawn_in_proportion_to_their_weights():
    """exp(-|m - .5| / .25) of .5, .25 and 1 is 1, e^-1 and e^-2: shares .665, .245, .090 of 3000 single draws."""
    made = seen([0.5, 0.25, 1.0])
    drawn = Counter(made.take(1)[0] for _ in range(3000))
    weights = [1.0, math.exp(-1), math.exp(-2)]
    for row, weight in enumerate(weights):
        share = weight / sum(weights)
        assert abs(drawn[row] - 3000 * share) < 4 * math.sqrt(3000 * share * (1 - share))


def test_the_target_and_the_width_say_which_rows_are_likely():
    means = [0.0, 0.5, 1.0]
    assert Counter(seen(means, target_reward=1.0, width=0.05).take(1)[0] for _ in range(20)) == {2: 20}
    wide = seen(means, target_reward=1.0, width=100.0)
    assert min(Counter(wide.take(1)[0] for _ in range(600)).values()) > 150


def test_a_row_that_never_got_a_score_stays_as_likely_as_one_at_the_target():
    made = curriculum(2, width=0.01)
    made.take(2)
    made.observe(0, 0.0)
    assert {made.take(1)[0] for _ in range(20)} == {1}


def test_rewards_far_away_from_the_target_leave_every_weight_a_number():
    assert sorted(seen([1e30, -1e30, 5.0]).take(3)) == [0, 1, 2]


@pytest.mark.parametrize("stops", [{1}, {2, 5}, {3, 4, 9}])
def test_rows_taken_with_a_stop_equal_those_of_an_uninterrupted_run(stops):
    def run(stops):
        now, taken = curriculum(9, seed=3), []
        for step in range(12):
            if step in stops:
                state = json.loads(json.dumps(now.state()))
                now = curriculum(9, seed=3)
                now.load_state(state)
            rows = now.take(4)
            for row in rows[:3]:
                now.observe(row, (row * 7 + step) % 5 / 4)
            taken += rows
        return taken

    assert run(stops) == run(set())


def test_metrics_are_the_mean_over_rows_seen_and_their_share():
    made = curriculum(4)
    assert made.metrics()["curriculum/mean_accuracy"].count == 0
    made.observe(0, 1.0)
    made.observe(2, 0.5)
    assert {n: m.value for n, m in made.metrics().items()} == {"curriculum/mean_accuracy": 0.75, "curriculum/seen": 0.5}


def test_seeds_draw_rows_of_their_own():
    one, other = (seen([0.5] * 20, seed=seed) for seed in (0, 1))
    assert one.take(10) != other.take(10)


@pytest.mark.parametrize("wrong", [{"curriculum": "none"}, {"means": 3}, {"num_draws": None}, {"first_pass": {}}])
def test_a_state_that_is_not_one_is_refused(wrong):
    made = curriculum(4)
    with pytest.raises(DataError, match="data cursor"):
        made.load_state(made.state() | wrong)
