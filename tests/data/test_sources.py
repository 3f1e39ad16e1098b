"""Sources of prompts: every row is a prompt with its label, or an error that says which row and why."""

import json
import subprocess
import sys

import pyarrow
import pytest
from letter_tokenizers import make_chat_tokenizer, make_tokenizer
from pyarrow import parquet

from strop.config.data import JSONLOptions, ParquetOptions, ReasoningGymOptions
from strop.data.sources import load_prompts
from strop.types import DataError, UserError


@pytest.fixture
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def chat_tokenizer():
    return make_chat_tokenizer()


@pytest.fixture
def jsonl(tmp_path):
    def write(*lines):
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        return str(path)

    return write


def test_rows_become_prompts_with_label_and_metadata(jsonl, tokenizer):
    path = jsonl({"prompt": "ab", "label": "5", "metadata": {"level": 3}}, "", {"prompt": "c"})
    loaded = load_prompts(JSONLOptions(path=path), tokenizer)
    first, second = loaded.prompts
    assert (first.row, first.tokens, first.text, first.label, first.metadata) == (0, (3, 4), "ab", "5", {"level": 3})
    assert (second.row, second.tokens, second.label, second.metadata) == (1, (5,), None, {})
    assert loaded.num_skipped == 0


def test_columns_have_the_names_that_the_options_give_them(jsonl, tokenizer):
    path = jsonl({"q": "ab", "a": 5, "m": {"level": 3}, "prompt": "c", "label": 6})
    options = JSONLOptions(path=path, prompt_key="q", label_key="a", metadata_key="m")
    prompt = load_prompts(options, tokenizer).prompts[0]
    assert (prompt.text, prompt.label, prompt.metadata) == ("ab", 5, {"level": 3})


@pytest.mark.parametrize("option", ["label_key", "metadata_key"])
def test_a_column_that_is_named_and_that_no_row_has_is_an_error_with_those_there_are(
    jsonl, tokenizer, tmp_path, option
):
    rows = [{"prompt": "a", "answer": 5}, {"prompt": "b", "extra": {}}]
    parquet.write_table(pyarrow.Table.from_pylist(rows[:1]), tmp_path / "rows.parquet")
    named = {option: "answr"}
    message = rf"^.*rows\.\w+: no row has the key 'answr', which data\.{option} names\. The keys there are: 'prompt', 'answer'"
    for options in (
        JSONLOptions(path=jsonl(*rows), **named),
        ParquetOptions(path=str(tmp_path / "rows.parquet"), **named),
    ):
        with pytest.raises(DataError, match=message):
            load_prompts(options, tokenizer)
    # named, and there in one row; or not named by anybody
    assert load_prompts(JSONLOptions(path=jsonl(*rows), label_key="extra"), tokenizer).prompts[0].label is None
    assert load_prompts(JSONLOptions(path=jsonl(*rows), **{option: option.removesuffix("_key")}), tokenizer).prompts


def test_chat_and_system_prompt_reach_the_prompts(jsonl, chat_tokenizer):
    path = jsonl({"prompt": "ab"})
    loaded = load_prompts(JSONLOptions(path=path, system_prompt="c"), chat_tokenizer)
    assert loaded.prompts[0].text == "<s>system:c\n<s>user:ab\nassistant:"
    assert load_prompts(JSONLOptions(path=path, chat="never"), chat_tokenizer).prompts[0].text == "ab"


@pytest.mark.parametrize(
    "row, reason",
    [
        (
            {"question": "ab", "label": 5},
            "has no key 'prompt', which data.prompt_key names. Its keys: 'question', 'label'",
        ),
        ({}, "has no key 'prompt', which data.prompt_key names. Its keys: none"),
        ({"prompt": 5}, "the prompt must be text or a list of messages, got int"),
        ({"prompt": ""}, "the prompt has no tokens"),
        ({"prompt": None}, "the prompt must be text or a list of messages, got NoneType"),
        ({"prompt": "a" * 10_000_001}, "the prompt must have at most 10000000 characters, got 10000001"),
        ({"prompt": "a", "metadata": "x"}, "'metadata' (data.metadata_key) must be an object, got str"),
    ],
)
def test_a_row_that_is_no_prompt_is_an_error_with_file_and_physical_line(jsonl, tokenizer, row, reason):
    path = jsonl("", {"prompt": "a"}, "  ", row)
    with pytest.raises(DataError) as caught:
        load_prompts(JSONLOptions(path=path, skip_bad_lines=True), tokenizer)
    assert str(caught.value).startswith(f"{path}, line 4: {reason}")


def test_broken_lines_are_left_out_only_when_asked_for_and_counted(jsonl, tokenizer):
    path = jsonl({"prompt": "a"}, "[]", "{", {"prompt": "b"})
    with pytest.raises(DataError, match="line 2: must be a JSON object, got an array"):
        load_prompts(JSONLOptions(path=path), tokenizer)
    loaded = load_prompts(JSONLOptions(path=path, skip_bad_lines=True), tokenizer)
    assert [(prompt.row, prompt.text) for prompt in loaded.prompts] == [(0, "a"), (1, "b")]
    assert loaded.num_skipped == 2


def test_max_prompts_takes_the_first_rows_of_every_source(jsonl, tokenizer, tmp_path):
    rows = [{"prompt": text} for text in "abcd"]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    sources = [
        JSONLOptions(path=jsonl(*rows), max_prompts=2),
        ParquetOptions(path=str(tmp_path / "rows.parquet"), max_prompts=2),
    ]
    for options in sources:
        assert [prompt.text for prompt in load_prompts(options, tokenizer).prompts] == ["a", "b"]
    gym = ReasoningGymOptions(name="chain_sum", size=5, max_prompts=2)
    assert len(load_prompts(gym, tokenizer).prompts) == 2
    assert len(load_prompts(ReasoningGymOptions(name="chain_sum", size=2), tokenizer).prompts) == 2


def test_parquet_rows_become_prompts_and_a_missing_column_names_the_row(tmp_path, chat_tokenizer):
    path = tmp_path / "rows.parquet"
    messages = [{"role": "user", "content": "ab"}]
    parquet.write_table(pyarrow.Table.from_pylist([{"prompt": messages, "label": 7, "metadata": {"level": 3}}]), path)
    prompt = load_prompts(ParquetOptions(path=str(path)), chat_tokenizer).prompts[0]
    assert (prompt.text, prompt.label, prompt.metadata) == ("<s>user:ab\nassistant:", 7, {"level": 3})
    with pytest.raises(DataError, match=r"rows\.parquet, row 0: has no key 'q'.*'prompt', 'label', 'metadata'"):
        load_prompts(ParquetOptions(path=str(path), prompt_key="q"), chat_tokenizer)


def test_generated_tasks_follow_from_the_task_seed_and_the_options(tokenizer):
    def load(**options):
        return load_prompts(ReasoningGymOptions(name="chain_sum", size=4, **options), tokenizer).prompts

    first = load(task_seed=1)
    assert first == load(task_seed=1)
    assert [p.text for p in first] != [p.text for p in load(task_seed=2)]
    for prompt in load(options={"min_terms": 2, "max_terms": 2, "max_digits": 1}):
        left, operator, right = prompt.text.removesuffix(" =").split()[-3:]  # "... problem: 4 + 3 ="
        assert prompt.label == str(int(left) + int(right) if operator == "+" else int(left) - int(right))
        assert prompt.metadata["entry"]["answer"] == prompt.label
        assert prompt.metadata["dataset"] == "chain_sum"


@pytest.mark.parametrize(
    "given, reason",
    [
        (
            {"name": "chain_sums"},
            r"data\.name must be a dataset of reasoning-gym, got 'chain_sums'. The nearest: chain_sum",
        ),
        ({"name": "zzzzqqqq"}, r"got 'zzzzqqqq'. There are: .*chain_sum"),
        ({"options": {"min_term": 1}}, r"data\.options must fit reasoning-gym's chain_sum, got .*min_term"),
        ({"options": {"min_terms": 0}}, r"data\.options must fit .*min_terms must be positive"),
        ({"options": {"seed": 3}}, r"data\.options must not have seed, got 3. Set data\.task_seed"),
        ({"options": {"size": 3}}, r"data\.options must not have size, got 3. Set data\.size"),
    ],
)
def test_settings_that_reasoning_gym_does_not_have_are_user_errors(tokenizer, given, reason):
    with pytest.raises(UserError, match=reason):
        load_prompts(ReasoningGymOptions(**{"name": "chain_sum"} | given), tokenizer)


def test_without_reasoning_gym_the_error_says_what_to_install(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(UserError, match=r"pip install 'strop\[tasks\]'"):
        load_prompts(ReasoningGymOptions(name="chain_sum"), tokenizer)


def test_reading_a_file_imports_no_generator_and_no_parquet(jsonl):
    program = (
        "import sys; import strop.data.sources as s; from strop.config.data import JSONLOptions\n"
        "class T:\n  chat_template = None; eos_token_id = None\n  encode = lambda self, text, **options: [7]\n"
        f"print(s.load_prompts(JSONLOptions(path={jsonl({'prompt': 'a'})!r}), T()).prompts[0].tokens)\n"
        "print([m for m in ('reasoning_gym', 'pyarrow', 'sympy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["(7,)", "[]"]
