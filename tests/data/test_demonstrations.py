"""Demonstrations: only the response and its end are learned."""

import json

import pytest
from chat_templates import CHATML, LLAMA3, MARKED, MISTRAL, PLAIN, QWEN3, R1
from chat_templates import chat_tokenizer as tokenizer_with
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


def test_a_prompt_without_the_template_of_the_tokenizer_ends_with_the_tokenizer_s_end(load, chat_tokenizer):
    loaded = load(chat_tokenizer, {"q": "ab", "r": "c"}, prompt_key="q", response_key="r", chat="never")
    assert table(loaded.demonstrations[0]) == [(1, False), (3, False), (4, False), (5, True), (2, True)]


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


# ---- conversations, Parquet, lengths --------------------------------------------------------------------------------

TALK = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]


@pytest.fixture
def chatml():
    return tokenizer_with(CHATML)


def test_a_row_with_messages_is_a_conversation_and_one_without_a_prompt_and_a_response(load, chatml):
    conversation, pair = load(chatml, {"messages": TALK}, {"messages": None, **PAIR}).demonstrations
    names = chatml.convert_ids_to_tokens(list(conversation.tokens))
    assert "".join(names) == "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n"
    assert [name for name, learned in zip(names, conversation.response_mask, strict=True) if learned] == [
        "c",
        "<|im_end|>",
    ]
    assert table(pair) == table(conversation)


@pytest.mark.parametrize("template", [CHATML, LLAMA3, MARKED, MISTRAL, PLAIN, QWEN3])
@pytest.mark.parametrize("options", [{}, {"system_prompt": "s"}, {"train_on": "last"}, {"train_on": "all"}])
def test_a_prompt_and_a_response_are_what_the_conversation_of_the_two_is(load, template, options):
    prompt = [{"role": "user", "content": "ab"}]
    rows = ({"messages": TALK}, PAIR, {"prompt": prompt, "response": "c"}, {"prompt": "ab", "response": "c</s>"})
    conversation, *pairs = load(tokenizer_with(template), *rows, **options).demonstrations
    assert [table(pair) for pair in pairs] == [table(conversation)] * 3


def test_of_a_prompt_of_several_turns_none_is_learned_unless_it_says_so(load, chatml):
    said = [{"role": "user", "content": "d"}, {"role": "assistant", "content": "e"}, TALK[0]]
    marked = [said[0], said[1] | {"train": True}, said[2]]
    alone, both, every = load(
        chatml,
        {"prompt": said, "response": "c"},
        {"prompt": marked, "response": "c"},
        {"messages": [*said, TALK[1]]},
    ).demonstrations
    assert sum(alone.response_mask) == 2  # c and its end
    assert both.response_mask == every.response_mask
    (as_last,) = load(chatml, {"messages": [*said, TALK[1]]}, train_on="last").demonstrations
    assert table(alone) == table(as_last)


def test_a_response_that_the_template_does_not_write_behind_the_head_of_an_answer_is_refused(load):
    with pytest.raises(DataError, match=r'line 1: message 1 cannot be found.*with data\.chat = "never"\.$'):
        load(tokenizer_with(R1), PAIR)


def test_the_column_of_conversations_and_what_is_learned_of_them_follow_the_options(load, chatml):
    (demonstration,) = load(chatml, {"talk": TALK}, messages_key="talk", train_on="all").demonstrations
    assert all(demonstration.response_mask)
    (pair,) = load(chatml, {"prompt": "ab", "response": "c"}, train_on="all").demonstrations
    assert all(pair.response_mask)


def test_a_row_with_a_conversation_and_a_response_is_an_error(load, chatml):
    with pytest.raises(DataError, match=r"line 1: has a conversation \('messages'\) and a response \('response'\)"):
        load(chatml, {"messages": TALK, "response": "c"})


def test_a_row_with_neither_is_an_error_that_names_both(load, tokenizer):
    with pytest.raises(DataError, match=r"no key 'messages' \(data.messages_key\), no key 'prompt'.*Its keys: 'a'"):
        load(tokenizer, {"a": 1})


def test_parquet_gives_what_jsonl_gives(load, chatml, tmp_path):
    """Parquet gives every message of a column the same keys, those it lacks as null."""
    import pyarrow
    from pyarrow import parquet

    rows = [{"messages": [TALK[0], {**TALK[1], "train": True}]}, {"messages": [*TALK, *TALK]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    options = DemonstrationOptions(kind="parquet", path=str(tmp_path / "rows.parquet"), train_on="last")
    assert load_demonstrations(options, chatml) == load(chatml, *rows, train_on="last")


def test_only_the_first_rows_are_used(load, tokenizer):
    assert len(load(tokenizer, *[PAIR] * 5, max_rows=2).demonstrations) == 2


PAIR = {"prompt": "ab", "response": "c"}  # a b c </s>
LONG = {"prompt": "ab", "response": "cde"}  # a b c d e </s>


def test_a_demonstration_that_is_too_long_is_an_error_with_its_line_and_both_lengths(load, tokenizer):
    said = r'line 2: the demonstration has 6 tokens and may have 4 \(data\.max_length_tokens\)\. Set data\.too_long = "drop"'
    with pytest.raises(DataError, match=said):
        load(tokenizer, PAIR, LONG, max_length_tokens=4)


def test_what_is_too_long_can_be_left_out_or_cut_and_is_counted(load, tokenizer):
    dropped = load(tokenizer, LONG, PAIR, max_length_tokens=4, too_long="drop")
    assert [d.row for d in dropped.demonstrations] == [1]
    assert (dropped.num_dropped, dropped.num_truncated) == (1, 0)
    cut = load(tokenizer, LONG, PAIR, max_length_tokens=4, too_long="truncate")
    assert table(cut.demonstrations[0]) == [(3, False), (4, False), (5, True), (6, True)]
    assert (cut.num_dropped, cut.num_truncated) == (0, 1)


def test_what_has_nothing_left_to_learn_once_it_is_cut_is_left_out(load, tokenizer):
    cut = load(tokenizer, {"prompt": "abcd", "response": "c"}, PAIR, max_length_tokens=4, too_long="truncate")
    assert [d.row for d in cut.demonstrations] == [1]
    assert (cut.num_dropped, cut.num_truncated) == (1, 0)
    with pytest.raises(DataError, match="none of the 1 rows is left"):
        load(tokenizer, LONG, max_length_tokens=2, too_long="drop")


def nothing_left(tokenizer, tmp_path, *rows, max_positions=None, **options):
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = DemonstrationOptions(path=str(tmp_path / "rows.jsonl"), **options)
    with pytest.raises(DataError) as caught:
        load_demonstrations(options, tokenizer, table="validation.data", max_positions=max_positions)
    return str(caught.value).partition("rows.jsonl: none of the ")[2]


LATE = {"prompt": "abcd", "response": "e"}  # a b c d e </s>: learned from its fifth token on


@pytest.mark.parametrize(
    "rows, limit, positions, too_long, said",
    [
        (  # PAIR has 4 tokens, c is its third
            (LONG, PAIR),
            3,
            None,
            "drop",
            "2 rows is left: all are longer than 3 tokens, the shortest has 4, and validation.data.too_long is drop. "
            'Raise validation.data.max_length_tokens to 4 or more, or set validation.data.too_long = "truncate".',
        ),
        (
            (LONG, LATE),
            2,
            5,
            "drop",
            "2 rows is left: all are longer than 2 tokens, the shortest has 6, and validation.data.too_long is drop. "
            "Shorten them, or take a model with more than 5 positions.",
        ),
        (
            (LONG,),
            None,
            4,
            "drop",
            "1 rows is left: all are longer than 4 tokens, the shortest has 6, and validation.data.too_long is drop. "
            'Set validation.data.too_long = "truncate".',
        ),
        (
            (LATE, LATE),
            3,
            6,
            "truncate",
            "2 rows is left: what is learned of each begins after 3 tokens, the first at token 5. "
            "Raise validation.data.max_length_tokens to 5 or more.",
        ),
        (
            (LATE,),
            None,
            4,
            "truncate",
            "1 rows is left: what is learned of each begins after 4 tokens, the first at token 5. "
            "Shorten them, or take a model with more than 4 positions.",
        ),
    ],
)
def test_where_nothing_is_left_what_is_true_and_possible_is_said(
    tokenizer, tmp_path, rows, limit, positions, too_long, said
):
    options = {"max_length_tokens": limit, "too_long": too_long}
    assert nothing_left(tokenizer, tmp_path, *rows, max_positions=positions, **options) == said


def test_without_a_limit_of_its_own_the_model_s_positions_are_the_limit(tokenizer, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(LONG))
    options = DemonstrationOptions(path=str(tmp_path / "rows.jsonl"))
    with pytest.raises(DataError, match=r"has 6 tokens and may have 5 \(the model's positions\)"):
        load_demonstrations(options, tokenizer, max_positions=5)
    beyond = options.model_copy(update={"max_length_tokens": 6})
    with pytest.raises(
        ConfigError, match=r"^validation\.data\.max_length_tokens must be at most the model's 5 positions"
    ):
        load_demonstrations(beyond, tokenizer, table="validation.data", max_positions=5)
