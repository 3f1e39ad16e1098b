"""Rewards per token and per turn, weights of named rewards and async scorers, through the command."""

import re
import signal

import pytest
from commands.small_runs import metrics, read_lines, same_weights, small_once, strop
from forked import Command

REWARDS = """
import asyncio
from pathlib import Path
from strop.types import TokenRewards, TurnRewards

def value(rollout):
    return sum(letter in "abcd" for letter in rollout.text) / 4 + rollout.sample / 2

def early(rollout):
    return [value(rollout)] + [0.0] * (rollout.num_response_tokens - 1)

def late(rollout):
    return [0.0] * (rollout.num_response_tokens - 1) + [value(rollout)]

def turn(rollout):
    return TurnRewards([value(rollout)])

def named(rollout):
    return {"right": value(rollout), "dense": TokenRewards(early(rollout))}

async def remote(rollout):
    await asyncio.sleep(0.001 * (rollout.sample % 3))
    return early(rollout)

async def stuck(rollout):
    print("step in flight", flush=True)
    try:
        await asyncio.sleep(3600)
    finally:
        (Path(__file__).parent / f"closed-{rollout.prompt.row}-{rollout.sample}").write_text("")
"""
PROCESS = ("--algorithm.advantage.kind", "process")
GAE = ("--algorithm.advantage.kind", "gae", "--lam", "0.9")
RETURNS = ("--algorithm.advantage.kind", "reinforce_plus_plus", "--gamma", "0.9")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


@pytest.fixture(scope="module")
def rewards(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "rewards.py"
    path.write_text(REWARDS)
    return path


@pytest.fixture
def train(small, rewards, tmp_path):
    """A run of two steps of one update with a function of REWARDS; returns what the command left, and its folder."""

    def run(function, *flags, name="run", steps=2):
        flags = ("--reward.function", f"{rewards}:{function}", "--updates-per-batch", "1", *flags)
        folder = tmp_path / name
        return strop("train", small.train, "--num-steps", steps, *flags, "--run.folder", folder), folder

    return run


@pytest.mark.parametrize("kind", [PROCESS, RETURNS, GAE], ids=["process", "reinforce_plus_plus", "gae"])
def test_it_matters_which_token_earned_the_reward(train, kind):
    """One sum, on the first token or on the last."""
    folders = []
    for function in ("early", "late"):
        done, folder = train(function, "--reward.per", "token", *kind, name=function, steps=1)
        assert done.code == 0, done.err
        assert "takes their sum" not in done.out + done.err
        folders.append(folder)
    one, other = (metrics(folder)[0] for folder in folders)
    assert one["reward"] == other["reward"]
    assert one["grad_norm"] != pytest.approx(other["grad_norm"], rel=1e-3)


def test_where_the_sum_is_taken_that_is_said_once_and_it_does_not_matter(train):
    for function in ("early", "late"):
        done, folder = train(function, "--reward.per", "token", name=function)
        assert done.code == 0, done.err
        said = done.out + done.err
        assert said.count("algorithm.advantage.kind = group takes their sum, and which of them") == 1
        assert "The kinds for which it does: process, reinforce_plus_plus, gae." in said
    assert same_weights(folder / "model", folder.parent / "early/model")


def test_a_reward_at_the_end_of_the_only_turn_is_the_reward_of_the_response(train):
    """Limit: process with one step at the last token is GRPO, through the whole run."""
    _, by_turn = train("turn", *PROCESS, name="turn")
    _, plain = train("value", name="plain")
    one, other = metrics(by_turn)[0], metrics(plain)[0]
    assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
    assert one["reward"] == other["reward"]


def test_rollout_files_show_what_each_token_and_each_name_earned(train):
    done, folder = train("named", *PROCESS, "--reward.weights", "{right = 2.0, dense = 1.0}", steps=1)
    assert done.code == 0, done.err
    rows = read_lines(folder / "rollouts/step_000001.jsonl")
    assert len(rows) == 16
    for row in rows:
        value = sum(letter in "abcd" for letter in row["response"]) / 4 + row["sample"] / 2
        expected = [value] + [0.0] * (row["num_response_tokens"] - 1)
        expected[-1] += 2 * value
        assert row["token_rewards"] == pytest.approx(expected)
        assert row["reward_parts"] == {"right": value, "dense": value}
        assert row["reward"] == pytest.approx(3 * value)
    (first,) = metrics(folder)
    assert first["reward/part/right"] == first["reward/part/dense"] == pytest.approx(first["reward"] / 3)
    assert "R = 2 right + 1 dense" in (folder / "objective.txt").read_text()


def test_weights_of_gdpo_move_what_is_learned(train):
    folders = []
    for number, weights in enumerate(("{right = 1.0, dense = 1.0}", "{right = -1.0, dense = 0.5}")):
        flags = ("--algorithm.advantage.kind", "gdpo", "--reward.weights", weights)
        done, folder = train("named", *flags, name=f"run{number}", steps=1)
        assert done.code == 0, done.err
        folders.append(folder)
    assert not same_weights(folders[0] / "model", folders[1] / "model")
    assert "w_k = -1 for right, 0.5 for dense" in (folder / "objective.txt").read_text()


def test_an_async_scorer_gives_the_run_of_a_plain_one_and_resumes_bit_for_bit(train, small, rewards, tmp_path):
    flags = ("--reward.per", "token", *PROCESS)
    _, plain = train("early", *flags, name="plain", steps=3)
    done, whole = train("remote", *flags, "--reward.max_concurrent", "2", name="whole", steps=3)
    assert done.code == 0, done.err
    assert same_weights(plain / "model", whole / "model")
    limited = (*flags, "--reward.max_concurrent", "2", "--run.checkpoint_every_steps", "1")
    train("remote", *limited, name="parts", steps=1)
    done, parts = train("remote", *limited, "--resume", name="parts", steps=3)
    assert done.code == 0, done.err
    assert same_weights(parts / "model", whole / "model")
    assert metrics(parts) == metrics(whole)


def test_eval_shows_sums(small, rewards):
    flags = ("--reward.function", f"{rewards}:early", "--reward.per", "token", *small.eval_flags)
    by_token = strop("eval", small.train, *flags)
    plain = strop("eval", small.train, "--reward.function", f"{rewards}:value", *small.eval_flags)
    assert by_token.code == plain.code == 0, by_token.err
    numbers = [re.findall(r"reward \S+", done.out) for done in (by_token, plain)]
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize(
    "flags, says",
    [
        (("--reward.per", "turn", "--algorithm.policy_loss.kind", "gspo", *RETURNS[:2]), "reward.per must be response"),
        ((*PROCESS, "--algorithm.policy_loss.kind", "gspo"), "policy_loss.kind must not be gspo with algorithm.adv"),
        ((*PROCESS, "--group-size", "1"), "rollout.group_size must be 2 or more"),
        ((*PROCESS, "--coef", "0.1", "--algorithm.kl.place", "reward"), "algorithm.kl.place must be loss"),
        (("--reward.weights", "{a = 0.0}"), "reward.weights must not all be 0"),
        (("--reward.weights", "{a = true}"), "reward.weights.a"),
        (("--reward.max_concurrent", "3", "--reward.batched"), "reward.max_concurrent"),
    ],
    ids=["gspo, per turn", "gspo, process", "group of one", "KL", "weights", "a weight that is no number", "batched"],
)
def test_what_cannot_be_is_refused_before_the_model_is_loaded(train, flags, says):
    done, folder = train("early", *flags, steps=1)
    assert done.code == 2
    assert says in done.err
    assert not folder.exists()


def test_a_loss_of_whole_sequences_is_refused_at_the_first_batch_that_shows_such_rewards(train):
    done, folder = train("turn", "--algorithm.policy_loss.kind", "gspo", *RETURNS[:2])
    assert done.code == 2
    assert "algorithm.policy_loss.kind must not be gspo with rewards per token or turn" in done.err
    assert not folder.exists() or not (folder / "model").exists()


def test_ctrl_c_ends_async_calls_cleanly_and_at_once(small, rewards, tmp_path):
    flags = ("--reward.function", f"{rewards}:stuck", "--reward.max_concurrent", "3", "--run.folder", tmp_path / "run")
    with Command(tmp_path, "train", small.train, *flags) as command:
        command.until("step in flight")
        command.send_signal(signal.SIGINT)
        assert command.wait() == 130, command.err
    assert "interrupted after step 0; saving" in command.out + command.err
    assert "Traceback" not in command.err
    assert len(list(rewards.parent.glob("closed-*"))) == 3
