"""A problem says in which line and column it was written; all problems are said at once."""

import pytest

from strop.config import load_config
from strop.config.lines import Place, place_of
from strop.types import ConfigError

TEXT = '''\
# a run
[model]
path = "m" # weights

[data]
kind = """jsonl"""
  path = [
    1,
    2]
[algorithm]
kl = {kind = "k1", coef = -1}
policy_loss.eps_clip = 3

  [eval.data]
  path = "x"
"a b" = 1
'''


@pytest.mark.parametrize(
    "path, place",
    [
        ("model.path", (3, 1)),
        ("data", (5, 1)),
        ("data.kind", (6, 1)),
        ("data.path", (7, 3)),  # of the first line, though its value ends two lines later
        ("algorithm.kl.coef", (11, 20)),
        ("algorithm.policy_loss.eps_clip", (12, 1)),
        ("eval.data.path", (15, 3)),
        ("eval.data.a b", (16, 1)),
    ],
)
def test_an_option_is_found_where_its_statement_begins(path, place):
    assert place_of(TEXT, path) == Place(*place)


@pytest.mark.parametrize("text", [TEXT.replace("\n", "\r\n"), "\ufeff" + TEXT, TEXT.rstrip("\n")])
def test_line_ends_a_byte_order_mark_and_a_missing_last_line_end_move_no_place(text):
    assert place_of(text, "algorithm.kl.coef") == Place(11, 20)
    assert place_of(text, "eval.data.a b") == Place(16, 1)


def test_other_line_separators_of_unicode_end_no_line():
    assert place_of('a = "x\u2028y"\nb = 1', "b") == Place(2, 1)


def test_what_the_file_does_not_set_has_no_place():
    assert place_of(TEXT, "model.dtype") is None


BAD = """\
[model]
path = "m"
[data]
kind = "jsonl"
path = "p"
[reward]
kind = "exact"
[rollout]
group_size = 1
temprature = 1
prompts_per_step = 10
[algorithm]
updates_per_batch = 3
policy_loss = {kind = "cispo", eps_clip_c = 3}
[trainer]
warmup_steps = 1000
lr = "fast"
[runn]
num_steps = 3
"""


@pytest.fixture
def refusal(tmp_path):
    def call(text, overrides=None):
        (tmp_path / "run.toml").write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_config(tmp_path / "run.toml", overrides)
        return str(caught.value).replace(f"{tmp_path}/", "").split("\n")

    return call


def test_unknown_names_wrong_values_and_broken_rules_are_reported_together_each_with_its_place(refusal):
    found = refusal(BAD)
    ends = {line.partition(" ")[0]: line[line.rindex("(") :] for line in found}
    assert ends == {
        "rollout.temprature": "(run.toml, line 10, column 1)",
        "algorithm.policy_loss.eps_clip_c": "(run.toml, line 14, column 32)",
        "trainer.lr": "(run.toml, line 17, column 1)",
        "runn": "(run.toml, line 18, column 1)",
        "algorithm.updates_per_batch": "(run.toml, line 13, column 1)",
        "rollout.group_size": "(run.toml, line 9, column 1)",
        "trainer.warmup_steps": "(run.toml, line 16, column 1)",
    }


def test_a_problem_of_a_flag_says_command_line_and_one_of_a_preset_names_it(refusal):
    good = BAD[: BAD.index("[rollout]")]
    assert refusal(good, {"rollout.group_size": 0})[0].endswith("got 0. (command line)")
    both = good + "[rollout]\ngroup_size = 4\n"
    assert refusal(both, {"rollout.group_size": 0})[0].endswith("got 0. (command line)")
    text = good + '[algorithm]\npreset = "grpo"\nadvantage = {kind = "rloo", std_eps = 1}\n'
    assert refusal(text)[0].endswith("(run.toml, line 10, column 29)")


def test_an_idle_option_has_its_place(refusal):
    found = refusal(BAD[: BAD.index("[rollout]")] + "[algorithm.kl]\nunbiased = true\n")
    assert found == [
        "algorithm.kl.unbiased = True is only used when algorithm.kl.coef is above 0. Leave it out, or change what keeps it "
        "from acting. (run.toml, line 9, column 1)"
    ]


def test_a_rule_about_a_value_that_is_wrong_anyway_is_not_told_twice(refusal):
    # coef is no number: whether kind and target can act beside it is not known
    good = BAD[: BAD.index("[rollout]")]
    found = refusal(good + '[algorithm.kl]\ncoef = "much"\nkind = "k2"\ntarget = 0.1\n[run]\nfolder = ""\n')
    assert [line.partition(" ")[0] for line in found] == ["algorithm.kl.coef", "run.folder"]


def test_two_numbers_that_cannot_fit_are_both_shown(refusal):
    found = refusal(BAD[: BAD.index("[rollout]")] + "[trainer]\nwarmup_steps = 40\n[run]\nnum_steps = 40\n")
    assert "the run's 40 optimizer steps (run.num_steps = 40 x algorithm.updates_per_batch = 1), got 40" in found[0]
