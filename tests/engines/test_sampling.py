"""From logits to a token: the right frequencies, the right log-probability of the kept set, the right random numbers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.engines.sampling import sample, uniforms

seeded = settings(derandomize=True, deadline=None, max_examples=100)
CASE_21 = (0.5, 0.3, 0.15, 0.05)


def draw(probabilities, uniform, *, temperature=1.0, top_p=1.0, top_k=0):
    """Tokens and log-probabilities at each of these uniform numbers, all from one distribution."""
    count = len(uniform)
    return sample(
        torch.tensor(probabilities).log().expand(count, -1),
        torch.as_tensor(uniform, dtype=torch.float32),
        temperature=torch.full((count,), float(temperature)),
        tail=(torch.full((count,), float(top_p)), torch.full((count,), top_k)),
    )


# ---- values by hand --------------------------------------------------------------------------------------------------


def test_a_uniform_number_picks_the_token_whose_interval_holds_it():
    # cumulative: .5, .8, .95, 1
    tokens, logprobs = draw(CASE_21, [0.0, 0.49, 0.51, 0.79, 0.81, 0.94, 0.96, 0.9999])
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    # ln .5, ln .3, ln .15, ln .05
    wanted = [-0.693147, -0.693147, -1.203973, -1.203973, -1.897120, -1.897120, -2.995732, -2.995732]
    assert logprobs.tolist() == pytest.approx(wanted, abs=1e-5)


def test_top_p_keeps_the_smallest_set_that_reaches_it_and_renormalises():
    # case 21: {0, 1} with .5 + .3 = .8; token 0: ln(.5 / .8) = -.4700; token 1: ln(.3 / .8) = -.9808
    tokens, logprobs = draw(CASE_21, [0.0, 0.62, 0.63, 0.9999], top_p=0.8)  # .5 / .8 = .625
    assert tokens.tolist() == [0, 0, 1, 1]
    assert logprobs.tolist() == pytest.approx([-0.470004, -0.470004, -0.980829, -0.980829], abs=1e-5)


def test_top_p_keeps_the_token_that_passes_it():
    # .81 needs the third: {0, 1, 2}, sum .95; token 2: ln(.15 / .95) = -1.845827
    tokens, logprobs = draw(CASE_21, [0.9999], top_p=0.81)
    assert tokens.tolist() == [2]
    assert logprobs.tolist() == pytest.approx([-1.845827], abs=1e-5)


def test_a_set_that_reaches_top_p_exactly_is_enough():
    # four tokens of exactly 1/4: two of them are 1/2
    tokens, logprobs = draw((0.25, 0.25, 0.25, 0.25), [0.0, 0.9999], top_p=0.5)
    assert len(set(tokens.tolist())) == 2
    assert logprobs.tolist() == pytest.approx([-0.693147, -0.693147], abs=1e-5)


def test_top_p_works_by_probability_not_by_position():
    # the same set, likeliest last: {2, 3}; token 2: ln(.3 / .8)
    tokens, logprobs = draw((0.05, 0.15, 0.3, 0.5), [0.0, 0.9999], top_p=0.8)
    assert tokens.tolist() == [2, 3]
    assert logprobs.tolist() == pytest.approx([-0.980829, -0.470004], abs=1e-5)


def test_a_tiny_top_p_keeps_the_likeliest_token():
    tokens, logprobs = draw((0.1, 0.2, 0.4, 0.3), [0.0, 0.5, 0.9999], top_p=1e-9)
    assert tokens.tolist() == [2, 2, 2]
    assert logprobs.tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-6)


def test_top_k_keeps_so_many_and_renormalises():
    # 3 of 4: sum .95; tokens 0 and 2: ln(.5 / .95) = -.641854, ln(.15 / .95) = -1.845827
    tokens, logprobs = draw(CASE_21, [0.0, 0.9999], top_k=3)
    assert tokens.tolist() == [0, 2]
    assert logprobs.tolist() == pytest.approx([-0.641854, -1.845827], abs=1e-5)


def test_top_k_above_the_vocabulary_keeps_all():
    tokens, logprobs = draw(CASE_21, [0.9999], top_k=100)
    assert tokens.tolist() == [3]
    assert logprobs.tolist() == pytest.approx([-2.995732], abs=1e-5)


def test_top_k_and_top_p_together_keep_what_both_keep():
    # top_k 1 within top_p .8
    assert draw(CASE_21, [0.0, 0.9999], top_k=1, top_p=0.8)[0].tolist() == [0, 0]
    # top_p .4 within top_k 3
    assert draw(CASE_21, [0.0, 0.9999], top_k=3, top_p=0.4)[0].tolist() == [0, 0]


def test_temperature_changes_both_the_draw_and_its_logprob():
    # T = 2: square roots .707107, .547723, .387298, .223607, sum 1.865735: p = .378996, .293569, .207585, .119850
    tokens, logprobs = draw(CASE_21, [0.37, 0.39, 0.9999], temperature=2.0)
    assert tokens.tolist() == [0, 1, 3]
    assert logprobs.tolist() == pytest.approx([math.log(0.378996), math.log(0.293569), math.log(0.119850)], abs=1e-5)


def test_temperature_comes_before_top_p():
    # at T = 2 token 0 has .379 and tokens 0, 1 have .673: top_p .5 keeps {0, 1}, where at T = 1 it would keep {0}
    tokens, logprobs = draw(CASE_21, [0.9999], temperature=2.0, top_p=0.5)
    assert tokens.tolist() == [1]
    assert logprobs.tolist() == pytest.approx([math.log(0.293569 / 0.672565)], abs=1e-5)


def test_temperature_zero_takes_the_likeliest_with_its_logprob_at_temperature_one():
    tokens, logprobs = draw((0.1, 0.2, 0.4, 0.3), [0.0, 0.5, 0.9999], temperature=0.0)
    assert tokens.tolist() == [2, 2, 2]
    assert logprobs.tolist() == pytest.approx([math.log(0.4)] * 3, abs=1e-6)


def test_every_row_has_settings_of_its_own():
    logits = torch.tensor(CASE_21).log().expand(4, -1)
    tokens, logprobs = sample(
        logits,
        torch.full((4,), 0.9999),
        temperature=torch.tensor([1.0, 0.0, 1.0, 1.0]),
        tail=(torch.tensor([1.0, 1.0, 0.8, 1.0]), torch.tensor([0, 0, 0, 3])),
    )
    assert tokens.tolist() == [3, 0, 1, 2]
    assert logprobs.tolist() == pytest.approx([-2.995732, -0.693147, -0.980829, -1.845827], abs=1e-5)


@seeded
@given(st.integers(0, 2**31), st.integers(2, 60))
def test_what_is_left_out_as_1_or_kept_whole_changes_no_bit(seed, vocab):
    generator = torch.Generator().manual_seed(seed)
    logits, uniform = torch.randn(3, vocab, generator=generator), torch.rand(3, generator=generator)
    plain = sample(logits, uniform)
    said = sample(logits, uniform, temperature=torch.ones(3), tail=(torch.ones(3), torch.zeros(3, dtype=torch.int64)))
    assert plain[0].tolist() == said[0].tolist()
    assert plain[1].tolist() == said[1].tolist()


def test_a_token_of_probability_zero_is_never_drawn():
    tokens, _ = draw((0.0, 0.5, 0.0, 0.5, 0.0), [0.0, 0.25, 0.5, 0.75, 1 - 2**-22])
    assert set(tokens.tolist()) == {1, 3}


@seeded
@given(st.lists(st.floats(-30, 30), min_size=1, max_size=50), st.floats(0.2, 3.0))
def test_the_largest_uniform_number_draws_a_token_of_the_vocabulary(logits, temperature):
    tokens, logprobs = sample(
        torch.tensor([logits]),
        torch.tensor([1 - 2**-22]),
        temperature=torch.tensor([temperature]),
        tail=(torch.ones(1), torch.zeros(1, dtype=torch.int64)),
    )
    assert 0 <= tokens.item() < len(logits)
    assert math.isfinite(logprobs.item())


# ---- random numbers --------------------------------------------------------------------------------------------------

# The first outputs of SplitMix64 for seed 1234567, as published with its reference implementation.
SPLITMIX = (6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821)


def test_uniforms_are_the_top_bits_of_splitmix64():
    found = uniforms(np.full(5, 1234567, dtype=np.uint64), np.arange(5))
    assert found.tolist() == [number // 2**42 / 2**22 for number in SPLITMIX]  # 22 of 64 bits: exact in float32
    assert found.dtype == torch.float32


def test_uniforms_depend_on_seed_and_position_alone():
    seeds, positions = np.array([3, 9, 3, 2**63 - 1], dtype=np.uint64), np.array([0, 5, 7, 2])
    together = uniforms(seeds, positions).tolist()
    alone = [uniforms(seeds[i : i + 1], positions[i : i + 1]).item() for i in range(4)]
    assert together == alone
    assert len(set(together)) == 4


def test_uniforms_lie_in_zero_to_one_and_fill_it_evenly():
    # 2^16 numbers in 16 equal boxes. Hoeffding: a box is off by more than t with probability 2 exp(-2 N t^2);
    # t = .0115 makes 16 boxes fail together with less than 16 x 2 exp(-17.3) = 1e-6.
    seeds, positions = np.meshgrid(np.arange(256, dtype=np.uint64), np.arange(256))
    found = uniforms(seeds.ravel(), positions.ravel())
    assert found.min() >= 0
    assert found.max() < 1
    shares = torch.histc(found, bins=16, min=0, max=1) / len(found)
    assert (shares - 1 / 16).abs().max() < 0.0115


# ---- frequencies -----------------------------------------------------------------------------------------------------

# N = 40000 draws, at most 6 tokens. Hoeffding: a token's share is off by more than t with probability 2 exp(-2 N t^2);
# t = .0143 makes any of 6 fail with less than 6 x 2 exp(-16.36) = 1e-6. The seeds are fixed besides.
NUM_DRAWS, BOUND = 40_000, 0.0143


@pytest.mark.parametrize(
    "settings, wanted",
    [
        ({}, [0.35, 0.05, 0.2, 0.1, 0.05, 0.25]),
        # square roots .591608, .223607, .447214, .316228, .223607, .5, sum 2.302264
        ({"temperature": 2.0}, [0.256968, 0.097125, 0.194250, 0.137355, 0.097125, 0.217178]),
        # .35 + .25 = .6 < .75, with .2 it is .8: {0, 5, 2}
        ({"top_p": 0.75}, [0.4375, 0, 0.25, 0, 0, 0.3125]),
        # .35 + .25 = .6
        ({"top_k": 2}, [0.583333, 0, 0, 0, 0, 0.416667]),
    ],
)
def test_frequencies_match_the_probabilities(settings, wanted):
    uniform = uniforms(np.arange(NUM_DRAWS, dtype=np.uint64), np.full(NUM_DRAWS, 3))
    tokens, logprobs = draw((0.35, 0.05, 0.2, 0.1, 0.05, 0.25), uniform, **settings)
    shares = torch.bincount(tokens, minlength=6) / NUM_DRAWS
    assert shares.tolist() == pytest.approx(wanted, abs=BOUND)
    assert (shares[torch.tensor(wanted) == 0] == 0).all()
    # and each draw reports the probability that it was drawn with
    assert logprobs.exp().tolist() == pytest.approx([wanted[t] for t in tokens.tolist()], abs=1e-5)
