"""An options class and the function it configures have the same names, or nothing starts."""

from typing import Literal

import pytest
import torch

from strop.algorithms import ADVANTAGES, POLICY_LOSSES, bind
from strop.config import Options


class OneFieldOptions(Options):
    kind: Literal["scaled"] = "scaled"
    scale: float = 1.0


class TwoFieldsOptions(OneFieldOptions):
    offset: float = 0.0


def scaled(values, *, scale):
    return values * scale


def scaled_and_shifted(values, *, scale, offset):
    return values * scale + offset


def no_formula(_):
    return []


def test_a_field_without_an_argument_is_refused_by_name():
    with pytest.raises(TypeError, match=r"fields without an argument \['offset'\], arguments without a field \[\]"):
        bind(TwoFieldsOptions, scaled, no_formula)


def test_an_argument_without_a_field_is_refused_by_name():
    with pytest.raises(TypeError, match=r"fields without an argument \[\], arguments without a field \['offset'\]"):
        bind(OneFieldOptions, scaled_and_shifted, no_formula)


def test_a_misspelled_field_is_refused_from_both_sides():
    def scaled_by(values, *, factor):
        return values * factor

    with pytest.raises(TypeError, match=r"\['scale'\], arguments without a field \['factor'\]"):
        bind(OneFieldOptions, scaled_by, no_formula)


def test_an_argument_that_is_not_keyword_only_does_not_count_as_one():
    def positional(values, scale):
        return values * scale

    with pytest.raises(TypeError, match=r"fields without an argument \['scale'\]"):
        bind(OneFieldOptions, positional, no_formula)


def test_a_bound_call_hands_over_every_field_under_its_own_name():
    # 3 * 2 + 10 = 16; swapped fields would give 3 * 10 + 2 = 32
    bound = bind(TwoFieldsOptions, scaled_and_shifted, no_formula)
    assert bound(TwoFieldsOptions(scale=2.0, offset=10.0), torch.tensor(3.0)).item() == 16.0


@pytest.mark.parametrize("table", [POLICY_LOSSES, ADVANTAGES], ids=["policy_loss", "advantage"])
def test_every_variant_is_found_under_its_own_kind(table):
    for kind, binding in table.items():
        assert binding.options.model_fields["kind"].default == kind
