"""Where a prompt comes from: read from a column, and a reward metric of its own."""

import json

import pytest
from letter_tokenizers import make_tokenizer

from strop.config import JSONLOptions
from strop.data import load_prompts
from strop.runtime.collect import reward_by_source
from strop.runtime.scores import score_answers
from strop.types import DataError, Prompt, Rollout


@pytest.fixture
def tokenizer():
    return make_tokenizer()


def _file(tmp_path, *rows):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_the_source_of_a_prompt_is_read_from_the_column_that_the_option_names(tmp_path, tokenizer):
    path = _file(tmp_path, {"prompt": "ab", "from": "letters"}, {"prompt": "b"})
    found = load_prompts(JSONLOptions(path=path, source_key="from", chat="never"), tokenizer)
    assert [prompt.source for prompt in found.prompts] == ["letters", None]


@pytest.mark.parametrize("source", [3, "", ["a"]])
def test_a_source_that_is_no_name_is_refused_with_file_and_line(tmp_path, tokenizer, source):
    path = _file(tmp_path, {"prompt": "ab"}, {"prompt": "b", "source": source})
    with pytest.raises(DataError, match=r"line 2: 'source' \(data.source_key\) must be a name, got"):
        load_prompts(JSONLOptions(path=path, chat="never"), tokenizer)


def _rollout(row, source, reward):
    prompt = Prompt(row=row, tokens=(5,), text="a", source=source)
    return Rollout(prompt, row, 0, (5, 6), (False, True), (0.0, -0.1), (-1, 0), "stop", "b", reward=reward)


def test_each_source_has_the_mean_reward_of_its_scored_rollouts():
    rollouts = [_rollout(0, "a", 1.0), _rollout(1, "a", 0.0), _rollout(2, "a", None), _rollout(3, "b", 3.0)]
    rollouts.append(_rollout(4, None, 9.0))
    found = {name: metric.value for name, metric in reward_by_source(rollouts).items()}
    assert found == {"reward/of/a": 0.5, "reward/of/b": 3.0}


def test_an_evaluation_weighs_the_prompts_of_a_source_alike_whatever_their_samples():
    # a: prompt 0 has samples 1, 1, 1 (mean 1), prompt 1 has one of 0 (mean 0): .5, where all samples together give .75.
    rollouts = [_rollout(0, "a", 1.0)] * 3 + [_rollout(1, "a", 0.0), _rollout(2, "b", 2.0)]
    found = score_answers(rollouts, num_samples=3, success_reward=1.0, answer_key=lambda rollout: rollout.text)
    assert found.reward_of == {"a": 0.5, "b": 2.0}
