"""What a jump is: against the median over the updates of the last steps that were made."""

import pytest

from strop.config import TrainConfig, make_config
from strop.runtime.guard_memory import GuardMemory
from strop.types import GuardError, Metric

ROOT = {"model": {"path": "m"}, "data": {"kind": "jsonl", "path": "d"}, "reward": {"kind": "exact"}}


def memory(**guards):
    values = ROOT | {"algorithm": {"updates_per_batch": 2}, "guards": guards}
    return GuardMemory(make_config(TrainConfig, values, {}, file="x.toml"))


def watch(guards, loss, kl=0.0):
    guards.watch({"loss": Metric.mean(loss, 1), "kl_old_policy_k3": Metric.mean(kl, 1)})


def make_steps(guards, *losses):
    for loss in losses:
        watch(guards, loss)
        guards.step_made()


def refuses(guards, loss, kl=0.0):
    try:
        watch(guards, loss, kl)
    except GuardError as error:
        return error
    return None


def test_a_loss_is_held_against_the_median_of_the_absolute_losses_before():
    guards = memory(max_loss_jump=3)
    make_steps(guards, 10.0, 1.0, -2.0)  # |loss| 10, 1, 2: median 2, bound 6
    assert refuses(guards, 6.0) is None
    error = refuses(guards, -6.01)
    assert error.guard == "loss_jump"
    assert "|loss| is 6.01, 3 times its median of 2 over the last 3 steps (bound 3)" in str(error)


def test_only_the_last_steps_of_the_window_count():
    guards = memory(max_loss_jump=3, window_steps=2)
    make_steps(guards, 100.0, 1.0, 1.0)
    assert refuses(guards, 4.0)


def test_nothing_is_a_jump_before_the_third_step():
    make_steps(memory(max_loss_jump=2), 1.0, 1000.0)
    guards = memory(max_loss_jump=2)
    make_steps(guards, 1.0, 1.0)
    assert refuses(guards, 1000.0)


def test_a_kl_of_exactly_0_is_no_value_to_compare_with():
    guards = memory(max_kl_jump=5)
    for _ in range(3):  # the first update of a batch has KL 0, the second 0.1
        watch(guards, 0.0, kl=0.0)
        watch(guards, 0.0, kl=0.1)
        guards.step_made()
    assert refuses(guards, 0.0, kl=0.49) is None
    assert refuses(guards, 0.0, kl=0.51).guard == "kl_jump"


def test_a_value_that_is_no_number_is_a_jump():
    guards = memory(max_kl_jump=5)
    make_steps(guards, 1.0)
    watch(guards, 1.0, kl=1.0)
    guards.step_made()
    assert refuses(guards, 1.0, kl=float("nan"))


def test_a_refused_step_is_not_remembered():
    guards = memory(max_loss_jump=3)
    make_steps(guards, 1.0, 1.0)
    watch(guards, 2.9)
    guards.step_refused()
    guards.step_made()
    assert guards.state()["steps"] == [{"loss_jump": [1.0]}, {"loss_jump": [1.0]}]


def test_a_memory_goes_on_from_its_state():
    one, other = memory(max_loss_jump=3), memory(max_loss_jump=3)
    make_steps(one, 1.0, 2.0, 4.0)
    one.num_skipped, one.num_rollbacks = 3, 1
    other.load_state(one.state())
    assert other.state() == one.state()
    assert str(refuses(other, 7.0)) == str(refuses(one, 7.0))
    assert other.counts() == {"guard/skipped": 3.0, "guard/rollbacks": 1.0}


def test_going_back_keeps_the_count_of_what_guards_did():
    guards = memory(max_loss_jump=3)
    make_steps(guards, 1.0)
    state = guards.state()
    make_steps(guards, 2.0)
    guards.num_rollbacks = 1
    guards.load_steps(state)
    assert guards.state() == state | {"num_rollbacks": 1}


@pytest.mark.parametrize("name", ["max_loss_jump", "max_kl_jump"])
def test_a_factor_is_above_1(name):
    with pytest.raises(ValueError, match=f"guards.{name} must be greater than 1"):
        memory(**{name: 1.0})
