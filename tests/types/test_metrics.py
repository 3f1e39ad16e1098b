"""Metrics merge to the same number however a step was cut, and prompts and rollouts stay as they were made."""

import dataclasses
import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.types import ConfigError, Metric, Prompt, StropError, UserError, merge_metrics

seeded = settings(derandomize=True, deadline=None, max_examples=100)
numbers = st.integers(-(2**40), 2**40).map(float)  # whole numbers: sums are exact, so equality may be asked for
kinds = st.sampled_from(["mean", "sum", "max", "min"])
parts = st.lists(st.tuples(numbers, st.integers(0, 1000).map(float)), min_size=1, max_size=8)


def metrics(kind, rows):
    # a maximum or minimum is of one kind of number and has no count to merge
    return [Metric(kind, total, count if kind in ("mean", "sum") else 1.0) for total, count in rows]


def total(parts):
    return merge_metrics({"x": part} for part in parts)["x"]


@seeded
@given(kinds, parts, parts)
def test_merging_is_commutative(kind, a, b):
    a, b = metrics(kind, a), metrics(kind, b)
    assert total(a) + total(b) == total(b) + total(a)
    assert total(a + b) == total(list(reversed(b + a)))


@seeded
@given(kinds, parts, st.data())
def test_merging_is_associative_however_the_parts_are_cut(kind, rows, data):
    parts = metrics(kind, rows)
    cut = data.draw(st.integers(1, len(parts)))
    pieces = [parts[:cut], parts[cut:]]
    assert total([total(piece) for piece in pieces if piece]) == total(parts)


@seeded
@given(parts)
def test_values_are_those_of_all_numbers_at_once(rows):
    totals, counts = [t for t, _ in rows], [c for _, c in rows]
    assert total(metrics("sum", rows)).value == sum(totals)
    assert total(metrics("max", rows)).value == sorted(totals)[-1]
    assert total(metrics("min", rows)).value == sorted(totals)[0]
    expected = math.fsum(totals) / math.fsum(counts) if any(counts) else 0.0
    assert total(metrics("mean", rows)).value == expected


def test_a_mean_is_of_tokens_not_of_parts():
    # 1 token of 4 and 3 tokens of 1: 7 / 4, not (4 + 1) / 2
    assert (Metric.mean(4.0, 1) + Metric.mean(3.0, 3)).value == 1.75


def test_a_part_without_tokens_changes_nothing_and_alone_is_zero():
    assert (Metric.mean(6.0, 4) + Metric.mean(0.0, 0)).value == 1.5
    assert Metric.mean(0.0, 0).value == 0.0


def test_metrics_of_different_kinds_are_never_added():
    with pytest.raises(AssertionError):
        Metric("max", 1.0) + Metric("sum", 1.0)


def test_names_that_only_some_parts_have_are_kept():
    merged = merge_metrics([{"a": Metric("sum", 1.0)}, {"b": Metric("max", 2.0)}, {"a": Metric("sum", 3.0)}])
    assert {name: metric.value for name, metric in merged.items()} == {"a": 4.0, "b": 2.0}
    assert merge_metrics([]) == {}


def test_merging_leaves_the_parts_as_they_were():
    part = {"a": Metric("sum", 1.0)}
    merge_metrics([part, {"a": Metric("sum", 2.0), "b": Metric("sum", 5.0)}])
    assert part == {"a": Metric("sum", 1.0)}


def test_a_prompt_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Prompt(row=0, tokens=(1,), text="a").row = 1


def test_what_a_user_can_mend_is_a_value_error_of_strop():
    assert issubclass(ConfigError, UserError)
    assert issubclass(UserError, ValueError)
    assert issubclass(UserError, StropError)


def test_types_import_nothing_but_the_standard_library():
    program = (
        "import sys; before = set(sys.modules); import strop.types; "
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(new - set(sys.stdlib_module_names) - {'strop'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
