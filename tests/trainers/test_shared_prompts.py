"""Rows in which a prompt stands once before all its responses, and the choice of a layout: by hand, and against padded rows."""

import math
from dataclasses import replace

import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_batches import make_batch, make_critic, make_objective, make_rollout, make_trainer, seen_gradients, weighted

from strop.data import build_batch
from strop.trainers import Costs, cheapest, cut_batch, lay_out
from strop.types import UserError

seeded = settings(derandomize=True, deadline=None, max_examples=60)
SHARING = ("llama", "tied_llama", "qwen2", "qwen3", "gpt2", "phi")
GROUPS = [([1, 2, 3], [[4, 5], [6], [7, 8, 9]]), ([10, 11], [[12, 13, 14, 15], [16, 17]]), ([18], [[19], [20, 21]])]


def grouped(groups=GROUPS, order=None):
    """A batch of prompts with several responses each, rows in this order."""
    rollouts = [
        make_rollout(prompt, response, row=row, sample=sample)
        for row, (prompt, responses) in enumerate(groups)
        for sample, response in enumerate(responses)
    ]
    generator = torch.Generator().manual_seed(5)
    batch = weighted(build_batch(rollouts, torch.randn(len(rollouts), generator=generator).tolist()))
    return batch if order is None else batch.select(order)


# ---- the layout by hand ----------------------------------------------------------------------------------------------


def test_a_shared_row_by_hand():
    # prompt 5 6 with the responses 7 and 8 9, then prompt 5 with the response 6: another prompt, though it begins alike
    batch = grouped([([5, 6], [[7], [8, 9]]), ([5], [[6]])])
    laid = lay_out(batch, "shared")
    assert laid.input_ids.tolist() == [[5, 6, 7, 8, 9, 5, 6]]
    assert laid.position_ids.tolist() == [[0, 1, 2, 2, 3, 0, 1]]
    assert laid.places.tolist() == [0, 1, 2, 0, 1, 3, 4, 5, 6]
    assert laid.before[batch.loss_mask].tolist() == [
        1,
        1,
        3,
        5,
    ]  # both responses are predicted at the prompt's last token
    assert laid.attention_mask[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1, 1],
    ]


def test_a_group_too_large_for_the_budget_is_divided_and_repeats_its_prompt():
    # 3 + 2 + 1 = 6 positions, and 3 + 3 = 6
    batch = grouped(GROUPS[:1])
    found = cut_batch(batch, "shared", max_tokens=6)
    laid = [lay_out(batch.select(part.sequences), "shared", part.rows) for part in found.parts]
    assert sorted(one.input_ids.tolist() for one in laid) == [[[1, 2, 3, 4, 5, 6]], [[1, 2, 3, 7, 8, 9]]]


def test_tokens_that_are_trained_are_never_shared():
    # a second turn whose prompt holds the first turn's answer shares what stands before it alone
    first, second = make_rollout([1, 2], [3, 4]), make_rollout([1, 2, 3, 4, 5], [6])
    laid = lay_out(weighted(build_batch([first, second], [1.0, 1.0])), "shared")
    assert laid.input_ids.tolist() == [[1, 2, 3, 4, 3, 4, 5, 6]]
    first, second = make_rollout([1, 2, 3], [4]), make_rollout([1, 2], [3, 4])  # whose 3 is trained
    laid = lay_out(weighted(build_batch([first, second], [1.0, 1.0])), "shared")
    assert laid.input_ids.tolist() == [[1, 2, 3, 4, 1, 2, 3, 4]]


def test_sequences_of_one_group_with_different_prompts_share_nothing():
    rollouts = [make_rollout([1, 2], [3]), make_rollout([1, 4], [3])]
    laid = lay_out(weighted(build_batch(rollouts, [1.0, 1.0])), "shared")
    assert laid.input_ids.tolist() == [[1, 2, 3, 1, 4, 3]]


# ---- the same numbers ------------------------------------------------------------------------------------------------


def stepped(name, layout, batch, budget=10_000, **options):
    model = getattr(tiny_models, name)()
    objective = make_objective(temperature=0.7, entropy_coef=0.01)
    with seen_gradients(model) as gradients:
        metrics = make_trainer(model, layout=layout, max_tokens_per_micro_batch=budget, **options).step(
            batch, objective
        )
    return {n: m.value for n, m in metrics.items() if n != "padding_share"}, gradients


def assert_same(found, wanted):
    assert found[0] == pytest.approx(wanted[0], rel=2e-5, abs=1e-6)
    for name, gradient in wanted[1].items():  # float32 sums in another order
        assert (found[1][name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


@pytest.mark.parametrize("layout", ["shared", "packed", "auto"])
@pytest.mark.parametrize("budget", [1, 7, 16, 10_000])
def test_gradients_are_those_of_padded_rows_at_any_budget(layout, budget):
    batch = grouped(order=[6, 0, 3, 1, 5, 2, 4])
    assert_same(stepped("llama", layout, batch, budget), stepped("llama", "padded", batch))


@pytest.mark.parametrize("name", SHARING)
def test_gradients_are_those_of_padded_rows_for_every_model_that_shares(name):
    assert_same(stepped(name, "shared", grouped()), stepped(name, "padded", grouped()))


def test_logprobs_and_values_are_those_of_padded_rows():
    model, batch = tiny_models.llama(), grouped()
    wanted, found = (make_trainer(model, layout=layout).logprobs(batch) for layout in ("padded", "shared"))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    values = []
    for layout in ("padded", "shared"):
        critic = make_critic(tiny_models.llama(), layout=layout)
        torch.manual_seed(3)
        torch.nn.init.normal_(critic.model.head.weight)
        values.append(critic.values(batch))
    assert values[0].abs().max() > 0.1
    torch.testing.assert_close(values[1], values[0], rtol=1e-5, atol=1e-5)


def test_a_response_sees_nothing_of_the_ones_beside_it():
    # bit for bit: another neighbour of the same length
    model = tiny_models.llama()
    one, other = (grouped([([1, 2, 3], [neighbour, [7, 8, 9]])]) for neighbour in ([4, 5], [30, 31]))
    found = [make_trainer(model, layout="shared").logprobs(batch)[-3:] for batch in (one, other)]
    assert torch.equal(*found)
    assert found[0].abs().max() > 0.1


@pytest.mark.parametrize("layout", ["packed", "shared"])
def test_the_bigram_model_of_case_19_by_hand_with_a_prompt_of_two_responses(layout):
    # 1 -> 2, 2 -> 2, 2 -> 0 and 1 -> 0 of one prompt [0, 1], and 1 -> 0 of the prompt [1]
    batch = grouped([([0, 1], [[2, 2, 0], [0]]), ([1], [[0]])])
    found = make_trainer(tiny_models.bigram(), layout=layout).logprobs(batch)[batch.loss_mask]
    assert found.tolist() == pytest.approx([math.log(p) for p in (0.3, 0.5, 0.25, 0.1, 0.1)], abs=1e-6)


@pytest.mark.parametrize("layout", ["packed", "shared"])
def test_an_end_token_that_is_the_pad_token_is_trained_on_as_in_case_20(layout):
    model = tiny_models.llama(pad_token_id=2, eos_token_id=2)
    batch = grouped([([4], [[5, 6, 2], [5, 6, 7, 8, 9]])])
    wanted, found = (make_trainer(model, layout=kind).logprobs(batch)[batch.loss_mask] for kind in ("padded", layout))
    assert found.shape == (8,)
    assert found.tolist() == pytest.approx(wanted.tolist(), abs=2e-5)


@pytest.mark.parametrize("name", ["sliding_mistral", "gemma2"])
def test_a_model_for_which_a_prepared_mask_would_be_wrong_is_refused_and_left_out_by_auto(name):
    model, batch = getattr(tiny_models, name)(), grouped()
    with pytest.raises(UserError, match=r"trainer\.layout must be padded or auto for \w+, got shared"):
        make_trainer(model, layout="shared")
    wanted, found = (make_trainer(model, layout=layout).logprobs(batch) for layout in ("padded", "auto"))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_masked_slots_of_a_shared_row_change_nothing():
    batch = grouped()
    broken = batch.rollout_logprobs.masked_fill(~batch.loss_mask, math.nan)
    assert_same(stepped("llama", "shared", replace(batch, rollout_logprobs=broken)), stepped("llama", "shared", batch))


# ---- the cut and the choice ------------------------------------------------------------------------------------------


@st.composite
def batches(draw):
    sizes = st.lists(st.integers(1, 12), min_size=1, max_size=5)
    groups = draw(st.lists(st.tuples(st.integers(1, 9), sizes), min_size=1, max_size=5))
    made = [([row] * prompt, [[30] * size for size in responses]) for row, (prompt, responses) in enumerate(groups)]
    count = sum(len(responses) for _, responses in made)
    return grouped(made, draw(st.permutations(range(count))))


@seeded
@given(batches(), st.integers(1, 120), st.sampled_from(["padded", "packed", "shared"]))
def test_a_cut_takes_every_sequence_once_within_the_budget_and_counts_what_is_laid_out(batch, budget, kind):
    found = cut_batch(batch, kind, max_tokens=budget, costs=Costs(100.0, 1.0))
    assert sorted(s for part in found.parts for s in part.sequences) == list(range(batch.num_sequences))
    positions = padding = 0
    for sequences, rows in found.parts:
        laid = lay_out(batch.select(sequences), kind, rows)
        assert len(sequences) == 1 or laid.input_ids.numel() <= budget
        positions += laid.input_ids.numel()
        padding += laid.input_ids.numel() - laid.places.unique().numel()
    assert (found.positions, found.padding) == (positions, padding)


def chosen(prompt, response, *, pair, samples=8, groups=4):
    made = [([row] * prompt, [[30] * response] * samples) for row in range(groups)]
    kinds = ("padded", "packed", "shared")
    return cheapest(grouped(made), kinds, max_tokens=4096, costs=Costs(1000.0, pair)).kind


def test_long_prompts_are_shared_and_long_responses_are_not_where_attention_costs():
    # prompt 64, 8 responses of 16: 4 x 192 positions in place of 4 x 640
    assert chosen(64, 16, pair=1.0) == "shared"
    # prompt 16, 8 responses of 128: 4160 positions in place of 4608, and rows of 2 x 144 or more attend to twice as much
    assert chosen(16, 128, pair=10.0) == "padded"


@pytest.mark.parametrize("ratio", [512 / 393216, 34560 / 106168320], ids=["quickstart", "SmolLM2"])
@pytest.mark.parametrize("longest", [8, 64, 1024])
def test_ragged_responses_have_less_than_5_percent_of_padding_with_the_costs_of_two_models(longest, ratio):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, longest + 1, (64,), generator=generator).tolist()
    batch = make_batch(*[([1] * 10, [2] * size) for size in sizes])
    found = cheapest(batch, ("padded", "packed"), max_tokens=4096, costs=Costs(1.0, ratio))
    assert found.padding < 0.05 * found.positions


def test_the_padding_share_of_a_step_is_measured():
    # rows of 5 and 3 positions: 2 of 10 are padding
    batch = make_batch(([1, 2], [3, 4, 5]), ([1], [2, 3]))
    found = make_trainer(tiny_models.llama(), layout="padded").step(batch, make_objective())
    assert found["padding_share"].value == pytest.approx(0.2)


def test_the_same_batch_is_always_cut_the_same_way():
    batch = grouped()
    kinds = ("padded", "packed", "shared")
    one, other = (cheapest(batch, kinds, max_tokens=64, costs=Costs(9.0, 1.0)) for _ in range(2))
    assert one == other
