"""Files of rollouts: what is written comes back, to the last bit of a float32; what a person reads comes first."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rewards.written_rollouts import make_rollout

from strop.observe.rollout_file import read_rollouts, step_files, write_rollouts
from strop.types import DataError, Prompt, Rollout

numbers = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def rollouts(draw):
    mask = draw(st.lists(st.booleans(), min_size=1, max_size=12))
    count = len(mask)

    def by_token(values, elsewhere):
        drawn = draw(st.lists(values, min_size=count, max_size=count))
        return tuple(x if is_written else elsewhere for x, is_written in zip(drawn, mask, strict=True))

    tokens = tuple(draw(st.lists(st.integers(0, 10**6), min_size=count, max_size=count)))
    prompt = Prompt(
        row=draw(st.integers(0, 99)),
        tokens=tokens[: draw(st.integers(0, count))],
        text=draw(st.text()),
        label=draw(st.none() | st.text() | st.integers()),
        source=draw(st.none() | st.text()),
        metadata=draw(st.dictionaries(st.text(), st.integers() | st.text())),
    )
    return Rollout(
        prompt=prompt,
        group_id=draw(st.integers(0, 99)),
        sample=draw(st.integers(0, 99)),
        tokens=tokens,
        response_mask=tuple(mask),
        rollout_logprobs=by_token(st.floats(width=32, max_value=0, allow_nan=False), 0.0),
        policy_versions=by_token(st.integers(0, 10**6), -1),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        text=draw(st.text()),
        reward_parts=draw(st.none() | st.dictionaries(st.text(min_size=1), numbers, min_size=1)),
        token_rewards=draw(st.none() | st.just(by_token(st.none() | numbers, None))),
        reward=draw(st.none() | numbers),
        excluded=draw(st.none() | st.just("no_score")),
        length_penalty=draw(st.none() | numbers),
    )


@settings(max_examples=40, deadline=None)
@given(written=st.lists(rollouts(), max_size=3))
def test_what_is_written_comes_back_to_the_last_bit(tmp_path_factory, written):
    path = tmp_path_factory.mktemp("rollouts") / "step_000001.jsonl"
    write_rollouts(path, written)
    assert read_rollouts(path) == written


def test_a_float32_takes_no_more_digits_than_tell_it_from_its_neighbours(tmp_path):
    path = tmp_path / "step_000001.jsonl"
    third = 0.3333333432674408  # the float32 nearest to 1/3, as a double
    rollout = make_rollout("x")
    write_rollouts(path, [Rollout(**{**_fields(rollout), "rollout_logprobs": (0.0, 0.0, -third, -math.inf)})])
    assert '"rollout_logprobs": [-0.33333334, -Infinity]' in path.read_text()
    assert read_rollouts(path)[0].rollout_logprobs == (0.0, 0.0, -third, -math.inf)


def _fields(rollout):
    return {name: getattr(rollout, name) for name in rollout.__dataclass_fields__}


def test_what_a_person_reads_comes_first_and_is_all_there_is_in_the_text_form(tmp_path):
    path = tmp_path / "step_000001.jsonl"
    write_rollouts(path, [make_rollout("56", "56")])
    whole = list(json.loads(path.read_text()))
    write_rollouts(path, [make_rollout("56", "56")], form="text")
    text = list(json.loads(path.read_text()))
    assert whole[: len(text)] == text
    assert text[:6] == ["prompt_row", "sample", "prompt", "response", "label", "reward"]
    assert {"tokens", "rollout_logprobs", "policy_versions", "response_spans"} == set(whole[len(text) :]) - {
        "group",
        "prompt_length",
    }


def test_rollouts_that_a_guard_blames_say_so_first(tmp_path):
    path = tmp_path / "step_000001.jsonl"
    one, other = make_rollout("a"), make_rollout("b", sample=1)
    write_rollouts(path, [one, other], blamed={other.name: "not finite"})
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row.get("guard") for row in rows] == [None, "not finite"]
    assert next(iter(rows[1])) == "guard"
    assert [r.name for r in read_rollouts(path)] == [one.name, other.name]


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"reward": 1.0, "response": "x"}', "run.rollout_form = whole"),
        ("[1, 2", "must be a JSON object"),
        ("[" * 99999, "must be a JSON object"),
        ("{}", "KeyError: 'tokens'"),
        (
            '{"tokens": [1], "response_spans": [[0, 3]], "rollout_logprobs": [], "policy_versions": []}',
            "reach beyond 1",
        ),
    ],
)
def test_a_broken_line_is_named_with_what_is_wrong(tmp_path, line, message):
    path = tmp_path / "step_000001.jsonl"
    write_rollouts(path, [make_rollout("x")])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError) as caught:
        read_rollouts(path)
    assert f"{path}:2: " in str(caught.value)
    assert message in str(caught.value)


def test_steps_come_in_the_order_of_their_numbers(tmp_path):
    for name in ("step_1000000", "step_000009", "step_000010", "eval_000001", "step_x"):
        (tmp_path / f"{name}.jsonl").touch()
    assert [step for step, _ in step_files(tmp_path)] == [9, 10, 1000000]
