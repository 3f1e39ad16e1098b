"""Simulated engines against arithmetic by hand."""

import pytest
import simpy
from simulate.plans import plan

from strop.simulate.engine import Fleet, Sample, SimulatedEngine, decode_seconds


def test_two_engines_with_unequal_lengths():
    """1 s a step and 1 s a sequence. One engine: both for 2 tokens of 3 s, the longer one for 2 more of 2 s: 10 s. The
    other one: 3 tokens of 3 s: 9 s."""
    config = plan(decode_step_s=1, decode_sequence_s=1)
    assert decode_seconds(config, [[2, 4], [3, 3]]) == pytest.approx(10)
    assert decode_seconds(config, [[3, 3], [2, 4]]) == pytest.approx(10)
    assert decode_seconds(config, [[3, 3], [3, 3]]) == pytest.approx(9)


@pytest.mark.parametrize(
    "places, lengths, seconds",
    [
        (1, [2, 3], 2 * 2 + 3 * 2),
        (2, [1, 3, 2], 1 * 3 + 2 * 3),  # the third takes the place of the first, and ends with the second
        (2, [2, 2, 2], 2 * 3 + 2 * 2),
        (3, [1, 3, 2], 1 * 4 + 1 * 3 + 1 * 2),
    ],
)
def test_a_sample_that_waits_takes_the_next_free_place(places, lengths, seconds):
    config = plan(num_engines=1, max_sequences=places, decode_step_s=1, decode_sequence_s=1)
    assert decode_seconds(config, [lengths]) == pytest.approx(seconds)


def test_a_group_goes_to_the_engine_with_the_fewest_samples_in_flight():
    """Groups of 1, 3, 1 and 1: the last two go to the first engine, whose three samples of 5 tokens take 5 x 4 s."""
    config = plan(decode_step_s=1, decode_sequence_s=1)
    assert decode_seconds(config, [[5], [1, 1, 1], [5], [5]]) == pytest.approx(20)


def engine_at(**options):
    """An engine of one second a token, and the seconds at which its samples end."""
    env, ends = simpy.Environment(), []
    config = plan(decode_step_s=1, decode_sequence_s=0, **options)
    return env, SimulatedEngine(env, config, lambda _: ends.append(env.now)), ends


@pytest.mark.parametrize("loses, end", [(False, 7), (True, 9)])
def test_a_stop_holds_what_is_running_and_a_failure_begins_it_anew(loses, end):
    """4 tokens, stopped from second 2 to 5: 2 are left, or all 4."""
    env, engine, ends = engine_at()

    def stop():
        yield env.timeout(2)
        engine.stop(loses=loses)
        yield env.timeout(3)
        engine.go()

    env.process(stop())
    engine.submit([Sample(4)])
    env.run()
    assert ends == [end]
    assert engine.busy_s == end - 3


def test_what_failed_comes_before_what_waits_and_gets_the_version_of_then():
    env, engine, ends = engine_at(max_sequences=1)
    first, second = Sample(4), Sample(1)

    def fail():
        yield env.timeout(2)
        engine.stop(loses=True)
        engine.version = 7
        engine.go()

    env.process(fail())
    engine.submit([first, second])
    env.run()
    assert ends == [6, 7]
    assert (first.version, second.version) == (7, 7)


def test_an_engine_that_fails_while_it_takes_weights_is_back_after_both():
    env, engine, ends = engine_at()

    def stops():
        engine.stop()
        yield env.timeout(1)
        engine.stop(loses=True)
        yield env.timeout(1)
        engine.go()
        yield env.timeout(8)
        engine.go()

    env.process(stops())
    engine.submit([Sample(4)])
    env.run()
    assert ends == [14]


def test_busy_seconds_and_sequence_seconds_are_counted():
    """As in the first test: 6 s with 2 sequences and 4 s with 1; 9 s with 2."""
    env, config = simpy.Environment(), plan(decode_step_s=1, decode_sequence_s=1)
    fleet = Fleet(env, config, lambda _: None)
    fleet.submit([[Sample(2), Sample(4)], [Sample(3), Sample(3)]])
    env.run()
    assert [engine.busy_s for engine in fleet.engines] == pytest.approx([10, 9])
    assert [engine.sequence_s for engine in fleet.engines] == pytest.approx([16, 18])


def test_a_sample_has_the_version_at_its_beginning():
    env, engine, _ = engine_at(max_sequences=1)
    first, second = Sample(4), Sample(4)

    def update():
        yield env.timeout(2)
        engine.version = 1

    env.process(update())
    engine.submit([first, second])
    env.run()
    assert (first.version, second.version) == (0, 1)
