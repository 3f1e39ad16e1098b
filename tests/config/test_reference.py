"""Options in words: what strop help, strop schema and the options page say, made from the tree itself."""

import json
import tomllib
from typing import Annotated

import jsonschema
import pytest
from pydantic import Field

from strop.config import Options, SFTConfig, TrainConfig, tree
from strop.config.reference import entries, json_schema, search, takes

ROOTS = [TrainConfig, SFTConfig]


@pytest.mark.parametrize("root", ROOTS)
def test_every_option_of_the_tree_has_an_entry_with_type_and_description(root):
    named = {e.path for e in entries(root)}
    single = {leaf.path for leaf in tree.leaves(root) if leaf.name == "kind"}
    assert named | single == set(tree.paths(root))
    assert [e.path for e in entries(root) if not e.takes or not e.description.endswith((".", "..."))] == []


def test_a_required_option_has_no_default_and_none_is_a_word():
    found = {e.path: e for e in entries(TrainConfig)}
    assert found["model.path"].default == ""
    assert found["algorithm.veto_ratio"].default == "none"
    assert found["trainer.layout"].takes == "auto | padded | packed | shared"
    assert found["rollout.stop_token_ids"].default == "[]"


def test_the_same_name_in_several_kinds_is_listed_for_each():
    kinds = [e.kind for e in search(TrainConfig, "eps_clip_c")]
    assert kinds == ["ppo_clip"]
    assert {"ppo_clip", "cispo", "gspo"} <= {e.kind for e in search(TrainConfig, "eps-clip")}


@pytest.mark.parametrize(
    "words, path",
    [
        ("--eps-clip-c", "algorithm.policy_loss.eps_clip_c"),
        ("kl coef", "algorithm.kl.coef"),
        ("dual clip", "algorithm.policy_loss.eps_clip_c"),
        ("learning rate", "trainer.lr"),
    ],
)
def test_options_are_found_by_name_or_by_what_they_mean(words, path):
    assert path in [e.path for e in search(TrainConfig, words)]


@pytest.mark.parametrize("root", ROOTS)
def test_the_schema_takes_what_the_loader_takes(root, examples):
    schema = json_schema(root)
    jsonschema.Draft202012Validator.check_schema(schema)
    json.dumps(schema)
    for path in examples[root]:
        jsonschema.validate(tomllib.loads(path.read_text()), schema, cls=jsonschema.Draft202012Validator)


WRONG = [
    {"trainer": {"lr": "fast"}},
    {"trainer": {"beta1": 1.0}},
    {"trainr": {"lr": 1e-3}},
    {"algorithm": {"policy_loss": {"kind": "cispo", "eps_clip_c": 3.0}}},
    {"algorithm": {"preset": "ppo2"}},
    {"rollout": {"group_size": 0}},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_the_schema_refuses_what_the_loader_refuses(wrong, examples):
    values = tomllib.loads(examples[TrainConfig][0].read_text())
    for table, options in wrong.items():
        values[table] = {**values.get(table, {}), **options}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values, json_schema(TrainConfig), cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize("table", [{"data": {"path": "x"}}, {"reward": {}}, {"reward": {"strip": False}}], ids=str)
def test_a_table_of_no_default_kind_must_name_it_in_the_schema_as_for_the_loader(table, examples):
    values = {**tomllib.loads(examples[TrainConfig][0].read_text()), **table}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values, json_schema(TrainConfig), cls=jsonschema.Draft202012Validator)


def test_every_property_of_the_schema_is_described():
    for root in (TrainConfig, SFTConfig):
        for name, definition in json_schema(root)["$defs"].items():
            leaves = {key: value for key, value in definition["properties"].items() if "$ref" not in str(value)}
            assert [key for key, value in leaves.items() if not value.get("description")] == [], name


def test_a_table_may_leave_its_kind_to_the_preset(examples):
    values = tomllib.loads(examples[TrainConfig][0].read_text())
    values["algorithm"] = {"preset": "gspo", "updates_per_batch": 2, "policy_loss": {"eps_clip": 1e-3}}
    jsonschema.validate(values, json_schema(TrainConfig), cls=jsonschema.Draft202012Validator)


def test_none_is_written_as_a_word(examples):
    values = tomllib.loads(examples[TrainConfig][0].read_text())
    values["algorithm"]["veto_ratio"] = "none"
    jsonschema.validate(values, json_schema(TrainConfig), cls=jsonschema.Draft202012Validator)


@pytest.fixture
def examples():
    from pathlib import Path

    root = Path(__file__).parents[2] / "examples"
    return {
        TrainConfig: [root / "quickstart/cispo.toml", root / "smollm2-sums/config.toml"],
        SFTConfig: [root / "quickstart/sft.toml"],
    }


def test_a_list_says_what_its_entries_are():
    class Lists(Options):
        names: tuple[str, ...] = Field(default=(), description="Names.")
        ids: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(), description="Ids.")

    assert [takes(leaf) for leaf in tree.leaves(Lists)] == ["list of texts", "list of whole numbers"]
