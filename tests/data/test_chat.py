"""Prompts to token ids: the template once, no second start token, no end token, no option without effect."""

import pytest
from letter_tokenizers import make_chat_tokenizer, make_tokenizer

from strop.data.chat import encode_prompt
from strop.types import ConfigError, DataError


@pytest.fixture
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def chat_tokenizer():
    return make_chat_tokenizer()


WHERE = "rows.jsonl, line 4"
MESSAGES = [{"role": "user", "content": "ab"}]


def encode(tokenizer, prompt, chat="auto", system_prompt=None):
    return encode_prompt(tokenizer, prompt, chat=chat, system_prompt=system_prompt, where=WHERE)


def test_text_without_a_template_is_tokenised_as_it_is(tokenizer):
    assert encode(tokenizer, "abc") == ("abc", (3, 4, 5))


def test_a_template_is_rendered_with_the_head_of_the_answer_and_brings_its_own_special_tokens(chat_tokenizer):
    text, tokens = encode(chat_tokenizer, "ab")
    assert text == "<s>user:ab\nassistant:"
    assert tokens[0] == 1
    assert tokens.count(1) == 1  # the tokenizer would have added a second <s>
    assert len(tokens) == 1 + len("user:ab\nassistant:")
    assert encode(chat_tokenizer, MESSAGES) == (text, tokens)
    assert encode(chat_tokenizer, "ab", chat="always") == (text, tokens)


def test_chat_never_takes_text_as_it_is_although_there_is_a_template(chat_tokenizer):
    assert encode(chat_tokenizer, "ab", chat="never") == ("ab", (1, 3, 4))


def test_the_system_prompt_goes_before_the_messages(chat_tokenizer):
    assert encode(chat_tokenizer, "ab", system_prompt="c")[0] == "<s>system:c\n<s>user:ab\nassistant:"
    assert encode(chat_tokenizer, MESSAGES, system_prompt="c")[0] == "<s>system:c\n<s>user:ab\nassistant:"
    assert MESSAGES == [{"role": "user", "content": "ab"}]


@pytest.mark.parametrize("adds, expected", [("<s> $A </s>", (1, 3, 4)), ("$A </s>", (3, 4)), ("<s> $A", (1, 3, 4))])
def test_a_prompt_never_ends_with_an_end_token_that_the_tokenizer_added(adds, expected):
    assert encode(make_tokenizer(adds=adds), "ab") == ("ab", expected)


def test_an_end_token_that_stands_in_the_text_stays():
    assert encode(make_tokenizer(adds="$A </s>"), "ab</s>") == ("ab</s>", (3, 4, 2))


@pytest.mark.parametrize(
    "has_template, prompt, chat, system_prompt, option",
    [
        (False, "ab", "always", None, "data.chat"),
        (True, MESSAGES, "never", None, "data.chat"),
        (False, "ab", "auto", "be brief", "data.system_prompt"),
        (True, "ab", "never", "be brief", "data.system_prompt"),
        (True, "ab", "never", "", "data.system_prompt"),
    ],
)
def test_an_option_that_cannot_be_obeyed_is_refused(
    tokenizer, chat_tokenizer, has_template, prompt, chat, system_prompt, option
):
    with pytest.raises(ConfigError, match=rf"^{option} must be .*, got '?\"?"):
        encode(chat_tokenizer if has_template else tokenizer, prompt, chat, system_prompt)


@pytest.mark.parametrize(
    "prompt, reason",
    [
        (None, "must be text or a list of messages, got NoneType"),
        (5, "must be text or a list of messages, got int"),
        ([], "empty list"),
        (["ab"], 'message 0 must be an object with "role" and "content", got \'ab\''),
        ([{"role": "user"}], 'message 0 must be an object with "role" and "content"'),
        ([{"role": "user", "content": None}], '"content" of message 0 must be text, got NoneType'),
        ([*MESSAGES, {"role": 3, "content": "a"}], '"role" of message 1 must be text, got int'),
        ([*MESSAGES, {"role": "assistant", "content": "5"}], "the last message is the assistant's"),
    ],
)
def test_a_prompt_of_the_wrong_kind_is_an_error_with_its_place(chat_tokenizer, prompt, reason):
    with pytest.raises(DataError) as caught:
        encode(chat_tokenizer, prompt)
    assert str(caught.value).startswith(WHERE + ": ")
    assert reason in str(caught.value)


def test_messages_need_a_template(tokenizer):
    with pytest.raises(DataError, match=r"line 4: the prompt is messages, but the tokenizer has no chat template"):
        encode(tokenizer, MESSAGES)


def test_two_system_messages_are_an_error(chat_tokenizer):
    prompt = [{"role": "system", "content": "their own"}, *MESSAGES]
    with pytest.raises(DataError, match=r"'their own' beside data\.system_prompt = 'mine'"):
        encode(chat_tokenizer, prompt, system_prompt="mine")


def test_what_a_template_refuses_is_an_error_with_its_place_and_reason():
    tokenizer = make_tokenizer(chat_template="{{ raise_exception('no system role here') }}")
    with pytest.raises(DataError, match=r"line 4: the chat template refuses the prompt, no system role here"):
        encode(tokenizer, "ab")


def test_a_prompt_without_tokens_is_an_error(tokenizer):
    with pytest.raises(DataError, match="line 4: the prompt has no tokens"):
        encode(tokenizer, "")
