"""Sources in given shares: exact to resume, refused where names do not fit."""

import json
from collections import Counter

import pytest

from strop.config.data import JSONLOptions
from strop.config.filtering import AccuracyCurriculumOptions, NoCurriculumOptions
from strop.data import make_cursor
from strop.types import ConfigError, DataError, Prompt

NO_CURRICULUM = NoCurriculumOptions()


def prompts(*sources):
    return [Prompt(row=row, tokens=(1,), text="", source=source) for row, source in enumerate(sources)]


def cursor(sources, weights, *, seed=0, shuffle=True, curriculum=NO_CURRICULUM):
    data = JSONLOptions(path="d", source_weights=weights, shuffle=shuffle)
    return make_cursor(prompts(*sources), data, curriculum, seed=seed)


SOURCES = ["a"] * 5 + ["b"] * 3 + ["c"] * 2


def test_sources_come_in_their_shares():
    """Shares 3/4 and 1/4 of 4000 draws: 3000 with a standard deviation of sqrt(4000 x 3/16) = 27."""
    taken = Counter(SOURCES[row] for row in cursor(SOURCES[:8], {"a": 6, "b": 2}).take(4000))
    assert abs(taken["a"] - 3000) < 4 * 27
    assert taken["a"] + taken["b"] == 4000


def test_a_weight_of_0_leaves_a_source_out():
    assert {SOURCES[row] for row in cursor(SOURCES, {"a": 1, "b": 0, "c": 1}).take(200)} == {"a", "c"}


def test_each_source_goes_through_its_own_rows_in_passes():
    taken = cursor(SOURCES, {"a": 1, "b": 5, "c": 2}).take(300)
    for name in "abc":
        own = [row for row in taken if SOURCES[row] == name]
        rows = sorted(row for row, source in enumerate(SOURCES) if source == name)
        passes = [own[i : i + len(rows)] for i in range(0, len(own) - len(rows), len(rows))]
        assert len(passes) > 2
        assert all(sorted(one) == rows for one in passes)


def test_without_shuffling_each_source_keeps_its_order():
    own = [row for row in cursor(SOURCES, {"a": 1, "b": 1, "c": 1}, shuffle=False).take(60) if SOURCES[row] == "a"]
    assert own[:7] == [0, 1, 2, 3, 4, 0, 1]


def test_seeds_draw_sources_of_their_own_and_one_seed_draws_the_same():
    weights = {"a": 1, "b": 1, "c": 1}
    first = cursor(SOURCES, weights, seed=1).take(40)
    assert first == cursor(SOURCES, weights, seed=1).take(40)
    assert first != cursor(SOURCES, weights, seed=2).take(40)


def test_two_sources_of_one_size_have_orders_of_their_own():
    taken = cursor(["a"] * 30 + ["b"] * 30, {"a": 1, "b": 1}).take(400)
    assert [r for r in taken if r < 30][:30] != [r - 30 for r in taken if r >= 30][:30]


@pytest.mark.parametrize("curriculum", [NoCurriculumOptions(), AccuracyCurriculumOptions()])
def test_rows_taken_with_a_stop_equal_those_of_an_uninterrupted_run(curriculum):
    def run(stops):
        given, taken = {"a": 2.0, "b": 1.0, "c": 0.5}, []
        now = cursor(SOURCES, given, curriculum=curriculum)
        for step in range(12):
            if step in stops:
                state = json.loads(json.dumps(now.state()))
                now = cursor(SOURCES, given, curriculum=curriculum)
                now.load_state(state)
            rows = now.take(4)
            for row in rows:
                now.observe(row, row / 10 + 0.01 * step)
            taken += rows
        return taken, now.state()

    assert run({3, 4, 9}) == run(set())


@pytest.mark.parametrize(
    "sources, weights, message",
    [
        (["a", "b"], {"a": 1, "c": 1}, "must name sources of the data, got c. The data has a, b."),
        (["a", "b"], {"a": 1}, "must give every source of the data a weight, 0 to leave it out, got none for b."),
        (["a", None, None], {"a": 1}, "needs a source in every row, got none in row 1: 2 of 3 rows"),
    ],
)
def test_weights_that_do_not_fit_the_data_are_refused_with_the_names(sources, weights, message):
    with pytest.raises(DataError) as error:
        cursor(sources, weights)
    assert message in str(error.value)


def test_a_state_of_other_weights_is_refused():
    state = cursor(SOURCES, {"a": 1, "b": 1, "c": 1}).state()
    with pytest.raises(DataError, match="weights must be the same as when the state was saved"):
        cursor(SOURCES, {"a": 2, "b": 1, "c": 1}).load_state(state)


def test_a_damaged_state_is_refused():
    state = cursor(SOURCES, {"a": 1, "b": 1, "c": 1}).state() | {"taken": -1}
    with pytest.raises(DataError, match="damaged"):
        cursor(SOURCES, {"a": 1, "b": 1, "c": 1}).load_state(state)


def test_weights_that_are_all_0_are_refused_before_anything_is_read():
    from strop.config import TrainConfig, make_config

    root = {"model": {"path": "m"}, "reward": {"kind": "exact"}}
    data = {"kind": "jsonl", "path": "d", "source_weights": {"a": 0.0}}
    with pytest.raises(ConfigError, match=r"data.source_weights must have a weight above 0"):
        make_config(TrainConfig, root | {"data": data}, {}, file="x.toml")
