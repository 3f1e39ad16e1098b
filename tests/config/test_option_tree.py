"""The tree of options as a whole: all is described, and whatever a user writes ends in a config or a ConfigError."""

import copy
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strop.config import SFTConfig, TrainConfig, make_config, to_toml, tree
from strop.config.overrides import parse_flags
from strop.types import ConfigError

ROOTS = [TrainConfig, SFTConfig]
VALID = {
    TrainConfig: {"model": {"path": "m"}, "data": {"kind": "jsonl", "path": "d"}, "reward": {"kind": "exact"}},
    SFTConfig: {"model": {"path": "m"}, "data": {"path": "d"}},
}
seeded = settings(derandomize=True, deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])


def outcome(call, *args, **kwargs):
    """What the call returns, or the message of its ConfigError. Anything else that is raised fails the test."""
    try:
        return call(*args, **kwargs)
    except ConfigError as error:
        return str(error)


def names_of(root):
    return sorted({part for path in (*tree.paths(root), *tree.tables(root)) for part in path.split(".")})


KINDS = sorted({leaf.kind for root in ROOTS for leaf in tree.leaves(root) if leaf.kind})
NAMES = st.sampled_from(sorted({name for root in ROOTS for name in names_of(root)})) | st.text(max_size=6)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from([*KINDS, "none", "grpo", "cispo", "k2", "float32", "token_mean"])
)
NESTED = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize("root", ROOTS)
def test_every_option_is_described_in_a_sentence(root):
    undescribed = [
        f"{leaf.path} of {leaf.owner.__name__}"
        for leaf in tree.leaves(root)
        if not _is_sentence(leaf.field.description or "")
        # the tag of a variant: its class says what it is
        and not (leaf.name == "kind" and len(get_args(leaf.field.annotation)) == 1)
    ]
    assert undescribed == []


def _is_sentence(text):
    return text != "" and text.strip() == text and text.endswith(".")


@pytest.mark.parametrize("root", ROOTS)
def test_every_class_of_options_says_what_it_is(root):
    for owner in {leaf.owner for leaf in tree.leaves(root)}:
        assert owner.__doc__, owner
        assert owner.__doc__ != owner.__mro__[1].__doc__, owner


@pytest.mark.parametrize("root", ROOTS)
@seeded
@given(values=st.dictionaries(NAMES, NESTED, max_size=5), valid=st.booleans())
def test_whatever_a_file_holds_ends_in_a_config_or_a_config_error(root, values, valid):
    merged = copy.deepcopy(VALID[root]) | values if valid else values
    found = outcome(make_config, root, merged, {}, file="f.toml")
    assert isinstance(found, root) or found.strip()


@pytest.mark.parametrize("root", ROOTS)
@seeded
@given(data=st.data())
def test_whatever_one_option_is_set_to_ends_in_a_config_or_a_config_error_that_names_it(root, data):
    path = data.draw(st.sampled_from(tree.paths(root)))
    value = data.draw(NESTED)
    found = outcome(make_config, root, copy.deepcopy(VALID[root]), {path: value}, file="f.toml")
    if isinstance(found, root):
        assert to_toml(found)
    else:
        table, _, name = path.rpartition(".")
        assert name in found or table in found  # another kind of the same table is named by its table


@pytest.mark.parametrize("root", ROOTS)
@seeded
@given(overrides=st.dictionaries(st.sampled_from(tree.paths(TrainConfig)) | st.text(max_size=8), NESTED, max_size=4))
def test_whatever_overrides_hold_ends_in_a_config_or_a_config_error(root, overrides):
    found = outcome(make_config, root, copy.deepcopy(VALID[root]), overrides, file="f.toml")
    assert isinstance(found, root) or found.strip()


@seeded
@given(
    st.lists(
        st.builds("--{}".format, NAMES) | st.text(max_size=6) | st.sampled_from(["[1,", "{a=", "none", "3"]), max_size=5
    )
)
def test_whatever_flags_hold_ends_in_overrides_or_a_config_error(args):
    found = outcome(parse_flags, TrainConfig, args)
    assert isinstance(found, dict) or found.strip()
