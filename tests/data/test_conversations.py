"""Conversations: of each turn that is learned, the tokens that a model would have to sample, its end token among them.

What is learned stands in brackets: <|im_start|>assistant\\n[c<|im_end|>]\\n.
"""

import pytest
from chat_templates import (
    CHATML,
    DEFAULT_SYSTEM,
    LLAMA3,
    MARKED,
    MARKED_SHORT,
    MISTRAL,
    PLAIN,
    QWEN3,
    R1,
    THINKING,
    chat_tokenizer,
)
from tokenizers.pre_tokenizers import Metaspace, Sequence

from strop.data.chat import encode_prompt
from strop.data.conversations import encode_conversation
from strop.types import ConfigError, DataError

WHERE = "rows.jsonl, line 7"


def talk(*contents, system=None, **flags):
    """User and assistant in turn; `flags` are those of messages by their number, as m1={"train": False}."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    messages = [{"role": "system", "content": system}, *messages] if system is not None else messages
    return [message | flags.get(f"m{i}", {}) for i, message in enumerate(messages)]


def columns(template, messages, train_on="assistant", merges=(), chat="auto", system_prompt=None, table="data"):
    tokenizer = chat_tokenizer(template, merges=merges)
    options = {"train_on": train_on, "chat": chat, "system_prompt": system_prompt, "table": table}
    tokens, mask = encode_conversation(tokenizer, messages, where=WHERE, **options)
    assert len(tokens) == len(mask)
    found, is_open = "", False
    for token, is_learned in zip(tokenizer.convert_ids_to_tokens(list(tokens)), mask, strict=True):
        found += ("[" if is_learned and not is_open else "]" if is_open and not is_learned else "") + token
        is_open = is_learned
    return found + "]" * is_open


TWO = talk("ab", "c", "d", "ef")
ONE_WITH_SYSTEM = talk("ab", "c", system="s")


@pytest.mark.parametrize(
    "template, messages, expected",
    [
        (
            CHATML,
            TWO,
            "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n[c<|im_end|>]\n"
            "<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\n[ef<|im_end|>]\n",
        ),
        (
            CHATML,
            ONE_WITH_SYSTEM,
            "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n[c<|im_end|>]\n",
        ),
        (  # a tool speaks between two turns of the assistant
            CHATML,
            [*talk("ab", "c"), {"role": "tool", "content": "d"}, {"role": "assistant", "content": "e"}],
            "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n[c<|im_end|>]\n"
            "<|im_start|>tool\nd<|im_end|>\n<|im_start|>assistant\n[e<|im_end|>]\n",
        ),
        (
            LLAMA3,
            talk(" ab", "c \n", "d", " ef"),  # trimmed by the template
            "<|begin|><|header|>user<|/header|>\n\nab<|eot|><|header|>assistant<|/header|>\n\n[c<|eot|>]"
            "<|header|>user<|/header|>\n\nd<|eot|><|header|>assistant<|/header|>\n\n[ef<|eot|>]",
        ),
        (MISTRAL, TWO, "<s>[INST]ab[/INST][ c</s>][INST]d[/INST][ ef</s>]"),
        (MISTRAL, ONE_WITH_SYSTEM, "<s>[INST]s\n\nab[/INST][ c</s>]"),
        (
            QWEN3,
            talk("ab", "<think>\nz\n</think>\n\nc"),
            "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n[<think>\nz\n</think>\n\nc<|im_end|>]\n",
        ),
        (
            QWEN3,
            talk("ab", "c"),  # an empty thought is written, and the model has to say it
            "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n[<think>\n\n</think>\n\nc<|im_end|>]\n",
        ),
        (
            MARKED,
            TWO,
            "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n[c<|im_end|>]\n"
            "<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\n[ef<|im_end|>]\n",
        ),
        (PLAIN, talk("ab", "c"), "user ab\nassistant [c\n</s>]"),  # nothing ends its turns: the last one gets an end
    ],
)
def test_all_turns_of_the_assistant_are_learned_with_their_end_tokens_and_nothing_else(template, messages, expected):
    assert columns(template, messages) == expected


def test_a_template_s_own_marks_and_its_rendered_beginnings_give_the_same_mask():
    assert columns(MARKED, TWO) == columns(MARKED_SHORT, TWO) == columns(CHATML, TWO)


@pytest.mark.parametrize("template", [CHATML, MARKED, MARKED_SHORT])
def test_last_learns_the_last_turn_of_the_assistant_alone(template):
    expected = (
        "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n"
        "<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\n[ef<|im_end|>]\n"
    )
    assert columns(template, TWO, "last") == expected


def test_all_learns_every_token():
    assert columns(MISTRAL, TWO, "all") == "[<s>[INST]ab[/INST] c</s>[INST]d[/INST] ef</s>]"


def test_all_adds_the_end_token_that_a_template_does_not_write_after_an_answer():
    assert columns(PLAIN, talk("ab", "c"), "all") == "[user ab\nassistant c\n</s>]"
    assert columns(PLAIN, talk("ab", "c", "d"), "all") == "[user ab\nassistant c\nuser d\n]"


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_all_leaves_out_the_text_of_a_message_that_says_so_and_keeps_the_heads_of_all_others(template):
    found = columns(template, talk("ab", "c", "d", "ef", m1={"train": False}), "all", system_prompt="s")
    assert found == (
        "[<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nab<|im_end|>\n]<|im_start|>assistant\nc<|im_end|>\n"
        "[<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\nef<|im_end|>\n]"
    )
    found = columns(template, talk("ab", "c", m0={"train": False}), "all")
    assert found == "<|im_start|>user\nab<|im_end|>\n[<|im_start|>assistant\nc<|im_end|>\n]"


def test_what_a_template_writes_of_its_own_before_the_first_message_is_not_that_message_s():
    system = "<|im_start|>system\nz<|im_end|>\n"
    answer = "<|im_start|>assistant\n[c<|im_end|>]\n"
    found = columns(DEFAULT_SYSTEM, talk("ab", "c", m0={"train": True}))
    assert found == f"<s>{system}[<|im_start|>user\nab<|im_end|>\n]{answer}"
    found = columns(DEFAULT_SYSTEM, talk("ab", "c", system="s", m0={"train": True}))
    assert found == f"<s>[<|im_start|>system\ns<|im_end|>\n]<|im_start|>user\nab<|im_end|>\n{answer}"
    found = columns(DEFAULT_SYSTEM, talk("ab", "c", m0={"train": False}), "all")
    assert found == f"[<s>{system}]<|im_start|>user\nab<|im_end|>\n[<|im_start|>assistant\nc<|im_end|>\n]"
    assert columns(MISTRAL, talk("ab", "c", m0={"train": True})) == "<s>[[INST]ab[/INST] c</s>]"


def test_where_a_template_begins_the_thought_for_the_model_what_comes_after_is_learned():
    thought = talk("ab", "<think>\nz\n</think>\n\nc")
    head = "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert columns(THINKING, thought) == f"{head}[z\n</think>\n\nc<|im_end|>]\n"
    assert columns(THINKING, talk("ab", "c")) == f"{head}[\n</think>\n\nc<|im_end|>]\n"


def test_last_works_where_a_template_rewrites_earlier_turns():
    found = columns(QWEN3, talk("ab", "<think>\nz\n</think>\n\nc", "d", "<think>\ny\n</think>\n\nef"), "last")
    assert found == (
        "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n"
        "<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\n[<think>\ny\n</think>\n\nef<|im_end|>]\n"
    )
    assert (
        columns(MISTRAL, talk("a", "b", "c", "d", system="s"), "last")
        == "<s>[INST]a[/INST] b</s>[INST]s\n\nc[/INST][ d</s>]"
    )


@pytest.mark.parametrize("name, off, on", [("train", False, True), ("step_loss_mask", 0, 1)])
@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_a_message_that_says_so_itself_is_learned_or_is_not(template, name, off, on):
    start = "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"
    without_first = columns(template, talk("ab", "c", "d", "ef", m1={name: off}))
    assert without_first.startswith(f"{start}c<|im_end|>\n")
    assert without_first.endswith("[ef<|im_end|>]\n")
    with_first = columns(template, talk("ab", "c", "d", "ef", m1={name: on}), "last")
    assert with_first.startswith(f"{start}[c<|im_end|>]\n")
    of_the_user = columns(template, talk("ab", "c", m0={name: on}))
    assert of_the_user == "[<|im_start|>user\nab<|im_end|>\n]<|im_start|>assistant\n[c<|im_end|>]\n"
    not_of_all = columns(template, talk("ab", "c", m1={name: off}), "all")
    assert not_of_all == "[<|im_start|>user\nab<|im_end|>\n]<|im_start|>assistant\nc<|im_end|>\n"


def test_tokens_are_those_of_the_whole_text_where_none_reaches_over_an_edge():
    """This tokenizer writes a space before a text that begins with a letter, so a piece by itself would get one."""
    tokenizer = chat_tokenizer(MISTRAL.replace("{{ ' ' + m['content']", "{{ m['content']"))
    core, space = tokenizer.backend_tokenizer, Metaspace(replacement=" ", prepend_scheme="first", split=False)
    core.pre_tokenizer = Sequence([space, core.pre_tokenizer])
    messages = talk("ab", "c")
    tokens, mask = encode_conversation(
        tokenizer, messages, train_on="last", chat="auto", system_prompt=None, where=WHERE
    )
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert list(tokens) == tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(tokens)[-mask.count(True) :][-1] == "</s>"


def test_two_turns_of_the_assistant_in_a_row_are_told_apart():
    messages = [*talk("a", "b", m1={"train": False}), {"role": "assistant", "content": "c"}]
    template = MARKED.replace("{{ '<|im_start|>assistant\n' }}{% generation", "{% generation").replace("{{ '\n' }}", "")
    assert columns(template, messages) == "<|im_start|>user\na<|im_end|>\nb<|im_end|>[c<|im_end|>]"


def test_the_flags_are_not_handed_to_the_template():
    template = "{% for m in messages %}{% for k in m %}{{ k + ' ' }}{% endfor %}{% endfor %}<|eot|>"
    assert columns(template, talk("a", "b", m1={"train": True}), "all") == "[role content role content <|eot|>]"


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_a_token_that_reaches_over_the_head_of_a_turn_is_cut_as_it_is_when_the_model_samples(template):
    """An answer that begins with a line feed: the head's own line feed would merge with it into one token."""
    messages = talk("a", "\nb")
    found = columns(template, messages, merges=("\n\n",))
    assert found == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[\nb<|im_end|>]\n"
    tokenizer = chat_tokenizer(template, merges=("\n\n",))
    _, prompt = encode_prompt(tokenizer, messages[:1], chat="auto", system_prompt=None, where=WHERE)
    tokens, mask = encode_conversation(
        tokenizer, messages, train_on="last", chat="auto", system_prompt=None, where=WHERE
    )
    assert tokens[: mask.index(True)] == prompt


@pytest.mark.parametrize("template", [CHATML, LLAMA3, MISTRAL, QWEN3, MARKED])
def test_what_stands_before_a_learned_turn_is_the_prompt_that_the_model_is_sampled_with(template):
    messages = talk("ab", "c", "d", "ef")
    tokenizer = chat_tokenizer(template)
    tokens, mask = encode_conversation(
        tokenizer, messages, train_on="last", chat="auto", system_prompt=None, where=WHERE
    )
    _, prompt = encode_prompt(tokenizer, messages[:3], chat="auto", system_prompt=None, where=WHERE)
    assert tokens[: mask.index(True)] == prompt


def test_the_system_prompt_goes_before_and_the_numbers_of_messages_stay_those_of_the_row():
    assert columns(CHATML, talk("ab", "c"), system_prompt="s") == columns(CHATML, ONE_WITH_SYSTEM)
    with pytest.raises(DataError, match=r"message 1 \(assistant\) is rewritten"):
        columns(QWEN3, TWO, system_prompt="s")


def test_content_may_be_missing_beside_tool_calls():
    calls = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    template = CHATML.replace(
        "m['content'] +", "m['content'] + (m['tool_calls'][0]['name'] if m['tool_calls'] else '') +"
    )
    found = columns(template, [*talk("a"), calls])
    assert found == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[f<|im_end|>]\n"


# ---- refused --------------------------------------------------------------------------------------------------------


def refusal(*arguments, **more):
    with pytest.raises(DataError) as caught:
        columns(*arguments, **more)
    assert str(caught.value).startswith(f"{WHERE}: ")
    return str(caught.value)


def test_a_turn_that_loses_its_thought_once_others_follow_is_refused_with_row_and_turn():
    said = refusal(QWEN3, talk("ab", "<think>\nz\n</think>\n\nc", "d", "ef"))
    assert "message 1 (assistant) is rewritten by the chat template once others follow" in said
    assert "('<think>\\nz\\n</think>\\n\\nc<|i' alone, 'c<|im_end|>\\n<|im_start|>' in the whole)" in said
    assert said.endswith(
        'Set data.train_on = "last", or give every turn that is to be learned a row of its own, as its last message.'
    )


def test_a_system_message_that_moves_to_a_later_turn_is_refused():
    said = refusal(MISTRAL, talk("a", "b", "c", "d", system="s"))
    assert "message 2 cannot be found in the rendered conversation" in said
    assert "'s\\n\\na[/INST]' alone, 'a[/INST] b</s>[INST]s" in said


def test_a_turn_that_begins_otherwise_than_a_sampled_answer_is_refused():
    said = refusal(CHATML.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>ai\n' }}"), talk("a", "b"))
    assert (
        "the head of an answer that the chat template writes when a model is sampled is not that of this turn" in said
    )
    assert "('i\\n' alone, 'ssistant\\nb<|im_end|>\\n' in the whole)" in said


def test_an_answer_without_the_thought_that_the_head_begins_is_refused_with_what_can_be_done():
    """With content that the template keeps, the thought belongs there; where it drops it, another template is needed."""
    verbatim = R1.replace(".split('</think>')[-1]", "")
    said = refusal(verbatim, talk("ab", "c"))
    assert "is not that of this turn ('<think>\\n' alone, 'c<|im_end|>\\n' in the whole)" in said
    assert "Begin its content with '<think>\\n', as the model's answers begin. Or: Use a chat template without" in said
    learned = columns(verbatim, talk("ab", "<think>\nz</think>c"))
    assert learned.endswith("assistant\n<think>\n[z</think>c<|im_end|>]\n")
    said = refusal(R1, talk("ab", "<think>\nz</think>c"))
    assert "Begin its content" not in said
    assert "train_on" not in said
    assert said.endswith(
        "Use a chat template without this (chat_template.jinja in the model's folder), or write prompt and response out as "
        'text, with data.chat = "never".'
    )


@pytest.mark.parametrize(
    "messages, train_on, advice",
    [
        (talk("a", "b", "c", "d", "e", "f"), "assistant", 'Set validation.data.train_on = "last", or give every turn'),
        (
            talk("a", "b", "c", "d", m1={"train": True}),
            "last",
            'Set the "train" or "step_loss_mask" of message 1 to false, or give every turn',
        ),
        ([*talk("a", "b"), {"role": "user", "content": "c"}], "last", "Give every turn that is to be learned a row"),
        (
            talk("a", "b", "c", "d", m1={"train": False}),
            "all",
            'Take the "train" or "step_loss_mask" of message 1 away, or set validation.data.train_on = "last".',
        ),
    ],
)
def test_what_a_refusal_tells_to_do_helps_and_names_the_table(messages, train_on, advice):
    said = refusal(QWEN3, messages, train_on, table="validation.data")
    assert f". {advice}" in said
    assert " data." not in said


def test_a_conversation_of_which_nothing_is_learned_says_why():
    said = refusal(CHATML, talk("a", "b", m1={"train": False}))
    assert 'data.train_on = \'assistant\' names message 1, and "train" or "step_loss_mask" there says false' in said
    assert "no turn of the assistant" not in said
    said = refusal(CHATML, talk("a"), table="validation.data")
    assert said.endswith(
        "validation.data.train_on = 'assistant', and the conversation has no turn of the assistant. Leave the row out."
    )


def test_a_turn_that_nothing_ends_is_refused_where_others_follow():
    assert "message 1 has no end token" in refusal(PLAIN, TWO)


def test_marks_that_are_not_the_turns_are_refused():
    template = "{% generation %}{% for m in messages %}{{ m['content'] }}{% endfor %}{% endgeneration %}"
    assert "marks 1 stretches with {% generation %}, and the conversation has 2 turns" in refusal(template, TWO)


@pytest.mark.parametrize(
    "messages, reason",
    [
        ("ab", "a conversation must be a list of messages, got str"),
        ([], "a conversation must be a list of messages, got an empty list"),
        (["ab"], 'message 0 must be an object with "role" and "content", got \'ab\''),
        ([{"role": "user"}], '"content" of message 0 must be text, got none'),
        ([*talk("a"), {"role": 3, "content": "b"}], '"role" of message 1 must be text, got int'),
        (talk("a", "b", m1={"train": 2}), '"train" of message 1 must be true, false, 1 or 0, got 2'),
        (talk("a", "b", m1={"train": "no"}), "\"train\" of message 1 must be true, false, 1 or 0, got 'no'"),
        (talk("a", "b", m1={"train": True, "step_loss_mask": 0}), "train and step_loss_mask of message 1 must agree"),
        (talk("a"), "no message is learned. data.train_on = 'assistant'"),
        (talk("a", "b", m1={"train": False}), "no message is learned"),
    ],
)
def test_messages_of_the_wrong_kind_are_errors_with_their_place(messages, reason):
    assert reason in refusal(CHATML, messages)


def test_chat_never_is_refused_for_conversations():
    for table in ("data", "validation.data"):
        with pytest.raises(
            ConfigError, match=rf'^{table}\.chat must be "auto" or "always" for prompts that are messages'
        ):
            columns(CHATML, TWO, chat="never", table=table)


def test_a_conversation_needs_a_template():
    assert "the tokenizer has no chat template" in refusal(None, TWO)
