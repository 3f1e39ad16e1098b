"""Demonstrations: only the response and its end are learned."""

import json

import pytest
from letter_tokenizers import make_chat_tokenizer, make_tokenizer

from strop.config.data import DemonstrationOptions
from strop.data.demonstrations import load_demonstrations
from strop.types import ConfigError, DataError


@pytest.fixture
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def chat_tokenizer():
    return make_chat_tokenizer()


@pytest.fixture
def load(tmp_path):
    def read(tokenizer, *rows, **options):
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
        return load_demonstrations(DemonstrationOptions(path=str(path), **options), tokenizer)

    return read


def table(demonstration):
    return list(zip(demonstration.tokens, demonstration.response_mask, strict=True))


def test_the_response_and_its_end_token_are_learned_and_the_prompt_is_not(load):
    tokenizer = make_tokenizer(adds="<s> $A </s>")
    loaded = load(tokenizer, "", {"prompt": "ab", "response": "c"})
    assert table(loaded.demonstrations[0]) == [(1, False), (3, False), (4, False), (5, True), (2, True)]


def test_an_end_token_that_the_response_brings_is_not_doubled(load, tokenizer):
    loaded = load(tokenizer, {"prompt": "a", "response": "c</s>"})
    assert table(loaded.demonstrations[0]) == [(3, False), (5, True), (2, True)]


def test_a_chat_prompt_goes_through_the_template(load, chat_tokenizer):
    loaded = load(chat_tokenizer, {"q": "ab", "r": "c"}, prompt_key="q", response_key="r", system_prompt="b")
    tokens, mask = loaded.demonstrations[0].tokens, loaded.demonstrations[0].response_mask
    assert tokens[-2:] == (5, 2)
    assert tokens.count(1) == 2  # <s> of the system's and of the user's turn
    assert mask == (False,) * (len(tokens) - 2) + (True, True)


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"prompt": "a"}, "has no key 'response', which data.response_key names. Its keys: 'prompt'"),
        ({"response": "a"}, "has no key 'prompt', which data.prompt_key names"),
        ({"prompt": "a", "response": ""}, "the response ('response') must be text, got empty text"),
        ({"prompt": "a", "response": None}, "the response ('response') must be text, got NoneType"),
        ({"prompt": "a", "response": ["c"]}, "the response ('response') must be text, got list"),
        ({"prompt": "", "response": "c"}, "the prompt has no tokens"),
    ],
)
def test_a_row_without_prompt_or_response_is_an_error_with_its_line(load, tokenizer, row, reason):
    with pytest.raises(DataError) as caught:
        load(tokenizer, "", row)
    assert f"rows.jsonl, line 2: {reason}" in str(caught.value)


def test_broken_lines_are_counted_when_they_may_be_left_out(load, tokenizer):
    loaded = load(tokenizer, "{", {"prompt": "a", "response": "c"}, skip_bad_lines=True)
    assert [demonstration.row for demonstration in loaded.demonstrations] == [0]
    assert loaded.num_skipped == 1


def test_a_tokenizer_without_an_end_token_is_refused(load):
    with pytest.raises(ConfigError, match=r"^model\.path must have a tokenizer with an end token"):
        load(make_tokenizer(eos=None), {"prompt": "a", "response": "c"})
