"""What counts as an act: what a user sees of a run, above rounding."""

import torch

from strop.config import TrainConfig
from strop.config.tree import leaves
from strop.runtime.audit.outcome import Outcome
from strop.runtime.audit.variations import is_choice, other_values

BASE = Outcome(losses=(0.5, 0.25), weights=torch.tensor([3.0, 4.0]))


def changes(other, option="boldness", *, base=BASE, stops_by_choice=False):
    return set(base.changes_to(other, option, stops_by_choice=stops_by_choice))


def test_a_change_as_small_as_rounding_is_none():
    # 0.5 * 1e-5 = 5e-6 for the loss; the weights have length 5, so 5e-5 for the update
    assert changes(Outcome((0.5 + 4e-6, 0.25), torch.tensor([3.0, 4.00004]))) == set()
    assert changes(Outcome((0.5 + 6e-6, 0.25), torch.tensor([3.0, 4.00006]))) == {"loss", "update"}


def test_whole_numbers_are_compared_exactly_and_others_up_to_rounding():
    rows = ((0.1, 0), (0.1000001, 0), (0.1, 1))
    one, same, other = (Outcome(others={"schedule": [row]}) for row in rows)
    assert changes(same, base=one) == set()
    assert changes(other, base=one) == {"schedule"}


def test_an_error_is_no_act_of_a_value_that_is_only_checked():
    assert changes(Outcome(error="no such file")) == set()


def test_an_error_is_an_act_of_a_choice_between_stopping_and_going_on():
    assert changes(Outcome(error="line 4 is broken"), stops_by_choice=True) == {"stops"}
    assert changes(BASE, base=Outcome(error="line 4 is broken"), stops_by_choice=True) == {"goes on"}


def test_a_guard_that_stops_the_run_is_an_act_of_its_bound():
    assert changes(Outcome(error="max_logprob_gap must hold", is_guard=True)) == {"stops"}


def test_metrics_threads_and_passes_are_acts_only_of_the_options_that_mean_them():
    for part, option in (("metrics", "source_key"), ("threads", "num_threads"), ("forward passes", "layout")):
        one, other = (Outcome(others={part: [number]}) for number in (1, 2))
        assert changes(other, base=one) == set()
        assert changes(other, option, base=one) == {part}


def test_a_value_that_type_or_range_refuse_is_never_tried():
    beta = next(leaf for leaf in leaves(TrainConfig) if leaf.path == "trainer.beta1")  # 0 <= beta1 < 1
    assert {0, 0.5, 0.75} <= set(other_values(beta, 0.9))
    assert all(0 <= value < 1 for value in other_values(beta, 0.9))


def test_every_word_of_a_choice_is_tried():
    reduction = next(leaf for leaf in leaves(TrainConfig) if leaf.path == "algorithm.reduction")
    assert is_choice(reduction)
    assert other_values(reduction, "token_mean") == ["sequence_mean", "prompt_mean", "constant_length"]
