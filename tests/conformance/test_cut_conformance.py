"""For every policy loss, reduction and correction: loss, gradient and metrics of a step do not depend on how it is cut, laid
out or ordered, nor on what stands in masked slots.
"""

import math
from dataclasses import replace

import conformance_cases as suite
import pytest
import torch
from conformance_cases import ALONE, CASES, LOSSES, REDUCTIONS, UNEVEN, WHOLE

from strop.algorithms import CORRECTIONS, POLICY_LOSSES
from strop.trainers import cut_batch

CHECKS = {
    "micro-batches": [(suite.check_cut, budget) for budget in (ALONE, UNEVEN)],
    "order": [(suite.check_order,)],
    "layout": [
        (suite.check_layout, "left_padded", WHOLE),
        *((suite.check_layout, "packed", b) for b in (WHOLE, UNEVEN)),
    ],
    "masked slots": [(suite.check_masked_slots, values) for values in ((math.nan,), (math.inf, -math.inf, math.nan))],
}


@pytest.mark.parametrize("name", CASES)
def test_neither_cut_nor_order_nor_layout_nor_what_stands_in_masked_slots_changes_a_step(name):
    for what, checks in CHECKS.items():
        for check, *how in checks:
            try:
                check(name, *how)
            except AssertionError as error:
                pytest.fail(f"{what} {how}: {error}")


def first_updates(loss):
    """The first of two updates on a batch, cut and laid out in four ways: what each trainer's real step gives."""
    # a small opsm_delta and the |log r| of kl_cov have a kink at r = 1, where a rounding error would decide
    objective = suite.make_objective({"policy_loss": LOSSES[loss], "opsm_delta": 1e-4})
    for layout, budget in (("padded", WHOLE), ("padded", UNEVEN), ("packed", WHOLE), ("packed", UNEVEN)):
        old = suite.trainer_of(layout, budget).logprobs(suite.made_batch(), temperature=objective.temperature)
        part = replace(suite.made_batch(), old_logprobs=old).select((0, 1, 2, 3, 4))
        ready = suite.prepared(part, objective, updates_done=0)
        yield suite.stepped(ready, objective, layout=layout, budget=budget)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_first_update_of_several_does_not_depend_on_the_cut(loss):
    """Old log-probabilities come from a pass over the whole batch, the update is made on a part of it."""
    wanted, *others = first_updates(loss)
    for found in others:
        suite.check_gradients(found[1], wanted[1])


def test_in_the_first_update_of_several_every_ratio_is_exactly_1():
    for metrics, _ in first_updates("kl_cov"):
        assert (metrics["ratio_min"], metrics["ratio_max"]) == (1.0, 1.0)
        assert metrics["opsm_rejected"] == 0


# ---- the suite itself -----------------------------------------------------------------------------------------------


def test_every_registered_variant_is_in_the_suite():
    for kind in POLICY_LOSSES:
        for reduction in REDUCTIONS:
            mine = [a for a in CASES.values() if a["policy_loss"]["kind"] == kind and a.get("reduction") == reduction]
            found = {a.get("correction", {"kind": "none"})["kind"] for a in mine}
            assert found == {"none", *CORRECTIONS}, f"{kind} with {reduction} lacks a correction"


def test_the_cuts_are_what_their_names_say():
    for layout in ("padded", "packed"):
        sizes = [
            [len(part.sequences) for part in cut_batch(suite.made_batch(), layout, max_tokens=budget).parts]
            for budget in (ALONE, WHOLE, UNEVEN)
        ]
        assert set(sizes[0]) == {1}
        assert sizes[1] == ([9, 1] if layout == "padded" else [10])  # the one of 2 tokens would be mostly padding
        sizes = sizes[2]
        assert len(sizes) > 2
        assert len(set(sizes)) > 1


def test_both_signs_meet_ratios_inside_and_far_outside_of_every_band():
    batch = suite.made_batch()
    mask = batch.loss_mask
    with torch.no_grad():
        log_ratio = (suite.plain_logprobs(suite.llama(), batch) - batch.old_logprobs)[mask]
    for sign in (batch.advantages[mask] > 0, batch.advantages[mask] < 0):
        for low, high in ((-9, -1.7), (-0.2, 0.2), (1.7, 9)):  # CISPO's bound, the highest default, is at log 5 = 1.61
            assert ((log_ratio > low) & (log_ratio < high) & sign).any()


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_that_can_clip_clips_some_tokens_of_the_batch(loss):
    metrics, _ = suite.whole(f"{loss}-{REDUCTIONS[0]}")
    if not clips_anywhere(loss):
        assert metrics["clip_fraction"] == 0
    else:
        assert 0.02 < metrics["clip_fraction"] < 0.98


def clips_anywhere(loss):
    """Whether it calls any token clipped at the widest log-ratios, under either sign."""
    size, ones = 4, torch.ones(4)
    tokens = {
        "logprobs": torch.tensor([-21.0, -21.0, -0.01, -0.01]),
        "old_logprobs": torch.tensor([-0.01, -0.01, -21.0, -21.0]),
        "advantages": torch.tensor([1.0, -1.0, 1.0, -1.0]),
        "loss_mask": ones.bool(),
        "sequence_ids": torch.arange(size),
        "selected": ones.bool(),
    }
    binding = POLICY_LOSSES[LOSSES[loss]["kind"]]
    options = binding.options.model_validate(LOSSES[loss])
    return bool(binding(options, type("Tokens", (), tokens)).clipped.any())


@pytest.mark.parametrize("correction", suite.CORRECTION_TABLES)
def test_a_correction_weighs_and_cuts_some_tokens_of_the_batch(correction):
    metrics, gradients = suite.whole(f"reinforce-{REDUCTIONS[0]}-{correction}")
    _, plain = suite.whole(f"reinforce-{REDUCTIONS[0]}")
    assert metrics["correction_rejected"] < 0.9
    assert any(not torch.allclose(gradients[name], plain[name], rtol=0.05) for name in plain)


@pytest.mark.parametrize("name", [n for n in CASES if n.endswith("-everything")])
def test_veto_and_sequence_masking_reject_some_and_not_all(name):
    metrics, _ = suite.whole(name)
    assert 0 < metrics["veto_rejected"] < 1
    assert 0 < metrics["opsm_rejected"] < 1
    assert metrics["kl_ref_k3"] > 0
