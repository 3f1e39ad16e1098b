"""An options class and the function it configures have the same names, or nothing starts."""

import types
from typing import Literal

import pytest
import torch

from strop.algorithms import ADVANTAGES, CORRECTIONS, POLICY_LOSSES, bind
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
    assert bound(TwoFieldsOptions(scale=2.0, offset=10.0), holder(values=torch.tensor(3.0))).item() == 16.0


def holder(**tensors):
    return types.SimpleNamespace(**tensors)


def test_a_bound_call_takes_each_tensor_by_its_name_from_whatever_holds_it():
    # (7 - 2) * 3 = 15; in the order in which the holder lists them it would be (2 - 7) * 3 = -15
    def scaled_difference(first, second, *, scale):
        return (first - second) * scale

    bound = bind(OneFieldOptions, scaled_difference, no_formula)
    assert bound(OneFieldOptions(scale=3.0), holder(second=2.0, third=100.0, first=7.0)) == 15.0


def test_a_tensor_that_the_holder_lacks_is_an_error_not_a_default():
    with pytest.raises(AttributeError, match="values"):
        bind(OneFieldOptions, scaled, no_formula)(OneFieldOptions(), holder(value=1.0))


# ---- a variant of two functions: one that is called, and one that decides over the whole step ------------------------


def above(values, *, offset):
    return values > offset


def test_two_functions_share_the_fields_and_each_gets_its_own():
    bound = bind(TwoFieldsOptions, scaled, no_formula, above)
    options = TwoFieldsOptions(scale=2.0, offset=10.0)
    values = holder(values=torch.tensor([3.0, 11.0]))
    assert bound(options, values).tolist() == [6.0, 22.0]
    assert bound.selected(options, values).tolist() == [False, True]


def test_a_field_that_neither_of_two_functions_takes_is_refused_by_name():
    with pytest.raises(TypeError, match=r"fields without an argument \['offset'\], arguments without a field \[\]"):
        bind(TwoFieldsOptions, scaled, no_formula, scaled)


def test_an_argument_of_the_second_function_without_a_field_is_refused_by_name():
    with pytest.raises(TypeError, match=r"fields without an argument \[\], arguments without a field \['offset'\]"):
        bind(OneFieldOptions, scaled, no_formula, above)


@pytest.mark.parametrize(
    "table", [POLICY_LOSSES, ADVANTAGES, CORRECTIONS], ids=["policy_loss", "advantage", "correction"]
)
def test_every_variant_is_found_under_its_own_kind(table):
    for kind, binding in table.items():
        assert binding.options.model_fields["kind"].default == kind
