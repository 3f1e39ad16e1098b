"""What happens between sampling and the loss, through the command: filters with resampling, length penalties, sources,
a curriculum, and the cap on tokens in flight."""

import json
import shutil
from functools import cache

import pytest
from commands.small_runs import metrics, read_lines, refusing, same_weights, small_once, strop

FUNCTIONS = """
def ends(rollout):
    return float(rollout.finish_reason == "stop" and rollout.num_response_tokens < 4)

def named(rollout):
    return {"ends": ends(rollout), "letters": rollout.text.count("a") / 8}

def even_rows(group):
    return group.prompt.row % 2 == 0

def first_half(rollout):
    return rollout.sample < 2

def everything(given):
    return True

def nothing(given):
    return False

def maybe(given):
    return "maybe"

def slime_even(args, samples, **kwargs):
    from slime.rollout.filter_hub.base_types import DynamicFilterOutput
    keep = sum(samples[0].tokens) % 2 == args.rest
    return DynamicFilterOutput(keep=keep, reason=None if keep else "odd_sum")
"""
# Rewards of 0 and 1 alone, so that some groups have equal ones; 7 prompts a round for the 4 of a step.
EQUAL = ("--filter.equal_rewards", "--num-steps", "4")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """Names functions of the file above."""
    file = tmp_path_factory.mktemp("mine") / "mine.py"
    file.write_text(FUNCTIONS)
    return lambda name: f"{file}:{name}"


@pytest.fixture(scope="module")
def run(small, mine, tmp_path_factory):
    """Runs strop train with flags and the reward `ends`, once for each set of flags; returns the run folder."""

    @cache
    def train(*flags):
        folder = tmp_path_factory.mktemp("before") / "run"
        given = ("--reward.function", mine("ends"), *flags) if "--reward.function" not in flags else flags
        done = strop("train", small.train, *given, "--run.folder", folder)
        assert done.code == 0, done.err
        return folder

    return train


def groups(folder, step):
    """Rewards of each group of a step, by group."""
    rows = read_lines(folder / f"rollouts/step_{step:06d}.jsonl")
    assert len(rows) % 4 == 0
    return [[r["reward"] for r in rows[i : i + 4]] for i in range(0, len(rows), 4)]


# ---- filters --------------------------------------------------------------------------------------------------------


def test_a_step_always_has_its_number_of_groups_and_none_with_equal_rewards(run):
    folder = run(*EQUAL)
    for step in (1, 2, 3, 4):
        assert len(groups(folder, step)) == 4
        assert all(len(set(rewards)) == 2 for rewards in groups(folder, step))
    assert sum(row["dropped/equal_rewards"] for row in metrics(folder)) > 0
    assert any(len(set(rewards)) == 1 for step in (1, 2) for rewards in groups(run("--num-steps", "2"), step))


@pytest.mark.parametrize("flags", [(), ("--prompts-per-round", "7"), ("--prompts-per-round", "7", "--surplus", "keep")])
def test_every_prompt_that_was_sampled_is_used_waits_or_is_counted_under_its_reason(run, flags):
    waiting = 0
    for row in metrics(run(*EQUAL, *flags)):
        dropped = row["dropped/equal_rewards"] + row["dropped/no_reward"] + row["dropped/surplus"]
        assert row["prompts_sampled"] + waiting == 4 + dropped + row["waiting_groups"]
        assert row["prompts_sampled"] == row["rounds"] * (7 if flags else 4)
        waiting = row["waiting_groups"]
        assert row["dropped/surplus"] == 0 or "keep" not in flags


def test_reward_is_that_of_all_that_was_sampled_not_of_what_was_kept(run):
    """Every kept group has both rewards. What was dropped had one; the metric is over both."""
    (row,) = metrics(run("--filter.equal_rewards", "--num-steps", "1"))
    assert row["equal_reward_groups"] == row["dropped/equal_rewards"] / row["prompts_sampled"] > 0


def test_filters_that_keep_everything_change_nothing(run, mine):
    """The seeds of samples are those of a run without filters."""
    filters = ("--filter.group", mine("everything"), "--filter.rollout", mine("everything"))
    assert same_weights(run(*filters) / "model", run() / "model")


def test_what_a_seed_follows_from_is_the_number_of_the_prompt_not_the_step(run):
    """With rounds of 7 the first 4 of the first round are the prompts of a plain first step, with the same answers."""
    wide = run("--filter.equal_rewards", "--num-steps", "1", "--prompts-per-round", "7")
    plain = read_lines(run("--num-steps", "1") / "rollouts/step_000001.jsonl")
    answers = {(r["prompt_row"], r["sample"]): r["tokens"] for r in plain}
    shared = [r for r in read_lines(wide / "rollouts/step_000001.jsonl") if (r["prompt_row"], r["sample"]) in answers]
    assert len(shared) >= 4
    assert all(r["tokens"] == answers[r["prompt_row"], r["sample"]] for r in shared)


def test_a_group_filter_of_yours_decides_which_prompts_are_learned_from(run, mine):
    folder = run("--filter.group", mine("even_rows"), "--num-steps", "2")
    rows = [r["prompt_row"] for n in (1, 2) for r in read_lines(folder / f"rollouts/step_{n:06d}.jsonl")]
    assert len(rows) == 32
    assert [row for row in rows if row % 2] == []
    assert sum(row["dropped/group_filter"] for row in metrics(folder)) > 0


def test_a_rollout_filter_of_yours_leaves_the_others_to_learn_from(run, mine):
    folder = run("--filter.rollout", mine("first_half"), "--num-steps", "1")
    rows = read_lines(folder / "rollouts/step_000001.jsonl")
    assert [r["excluded"] for r in rows[:4]] == [None, None, "rollout_filter", "rollout_filter"]
    assert metrics(folder)[0]["dropped/rollout_filter"] == 8
    assert not same_weights(folder / "model", run("--num-steps", "1") / "model")


def test_a_filter_of_slime_s_runs_unchanged_and_its_reasons_are_metrics(run, mine):
    flags = ("--filter.group", mine("slime_even"), "--filter.group_kind", "slime", "--filter.group_args.rest", "0")
    folder = run(*flags, "--num-steps", "2")
    rows = [r for n in (1, 2) for r in read_lines(folder / f"rollouts/step_{n:06d}.jsonl") if r["sample"] == 0]
    found = metrics(folder)
    dropped = sum(row.get("dropped/group_filter/odd_sum", 0) for row in found)
    assert dropped == sum(row["dropped/group_filter"] for row in found) > 0
    assert len(rows) == 8


def test_filters_that_keep_nothing_end_the_run_with_the_reason_and_the_counts(small, mine, tmp_path):
    """Case 30: 3 rounds of 4 prompts, nothing left; never an endless loop. Nothing was made, so nothing stays."""
    flags = ("--filter.equal_rewards", "--reward.function", small.reward("equal"), "--max-rounds", "3")
    done = strop("train", small.train, *flags, "--run.folder", tmp_path / "run")
    assert done.code == 2
    assert (
        "filter.max_rounds must be enough to fill a step, got 3: step 1 has 0 of 4 groups after 12 prompts" in done.err
    )
    assert "Dropped: equal_rewards 12 " in done.err
    assert not (tmp_path / "run").exists()


def test_a_filter_that_says_neither_true_nor_false_is_refused_with_the_row(small, mine, tmp_path):
    done = strop("train", small.train, "--filter.group", mine("maybe"), "--run.folder", tmp_path / "run")
    assert done.code == 2
    assert "must return true or false, got 'maybe' of type str for prompt row" in done.err


def test_groups_that_waited_are_older_and_the_gap_to_the_sampler_is_measured_on_the_fresh_ones(run):
    """2 updates a step: what waited one step is 2 updates old. The guard's bound of 0.001 holds for fresh tokens alone."""
    found = metrics(run(*EQUAL, "--prompts-per-round", "7", "--surplus", "keep"))
    assert found[0]["staleness_max"] == 0
    assert max(row["staleness_max"] for row in found) >= 2
    assert all(row.get("logprob_gap", 0.0) < 1e-5 for row in found)


# ---- resume ---------------------------------------------------------------------------------------------------------


def test_some_steps_then_resuming_equals_all_steps_at_once_with_groups_that_wait(small, mine, tmp_path):
    """Everything of this page at once: what waits, the curriculum's means, each source's place, the prompts ever sampled."""
    rows = read_lines(small.folder / "train.jsonl")[:24]
    data = tmp_path / "sources.jsonl"
    data.write_text(
        "".join(json.dumps(r | {"source": "even" if i % 2 == 0 else "odd"}) + "\n" for i, r in enumerate(rows))
    )
    flags = ("--data.path", data, "--data.source_weights.even", "2", "--data.source_weights.odd", "1")
    flags += (
        "--curriculum.kind",
        "accuracy",
        "--length_penalty.kind",
        "soft_overlong",
        "--reward.function",
        mine("ends"),
    )
    flags += ("--filter.equal_rewards", "--prompts-per-round", "7", "--surplus", "keep", "--num-steps", "5")
    flags += ("--checkpoint-every-steps", "1", "--keep-checkpoints", "9")
    whole = tmp_path / "whole"
    done = strop("train", small.train, *flags, "--run.folder", whole)
    assert done.code == 0, done.err
    assert any(row["waiting_groups"] > 0 for row in metrics(whole))
    for step in (1, 2, 3, 4):
        part = tmp_path / f"part{step}"
        shutil.copytree(whole, part)
        for later in range(step + 1, 6):
            shutil.rmtree(part / f"checkpoints/step_{later:06d}")
        done = strop("train", small.train, *flags, "--run.folder", part, "--resume")
        assert done.code == 0, done.err
        assert same_weights(part / "model", whole / "model")
        assert metrics(part) == metrics(whole)
        last = "checkpoints/step_000005"
        for file in (whole / last).iterdir():
            assert (part / last / file.name).read_bytes() == file.read_bytes(), file.name


def test_a_filter_s_file_that_has_changed_is_said_when_resuming(small, mine, tmp_path):
    file = tmp_path / "filter.py"
    file.write_text(FUNCTIONS)
    flags = ("--filter.group", f"{file}:everything", "--checkpoint-every-steps", "1", "--run.folder", tmp_path / "run")
    assert strop("train", small.train, *flags, "--num-steps", "1").code == 0
    file.write_text(FUNCTIONS + "\n")
    done = strop("train", small.train, *flags, "--num-steps", "2", "--resume")
    assert done.code == 0, done.err
    assert "a file of filter.group or filter.rollout has changed" in done.out


# ---- length penalties -----------------------------------------------------------------------------------------------


def test_the_scorer_s_reward_stays_visible_beside_the_penalty_and_what_is_trained(run):
    """At most 6 tokens, the last 2 of them punished: 5 pay half, 6 pay all."""
    flags = ("--num-steps", "1", "--length_penalty.kind", "soft_overlong", "--buffer-tokens", "2")
    folder, plain = run(*flags), run("--num-steps", "1")
    (row,), (before,) = metrics(folder), metrics(plain)
    assert row["reward"] == before["reward"]
    rows = read_lines(folder / "rollouts/step_000001.jsonl")
    paid = {n: -max(0, n - 4) / 2 for n in range(1, 7)}
    assert [r["length_penalty"] for r in rows] == [paid[r["num_response_tokens"]] for r in rows]
    assert row["length_penalty"] == pytest.approx(sum(r["length_penalty"] for r in rows) / 16)
    assert row["reward/after_penalty"] == pytest.approx(row["reward"] + row["length_penalty"])
    assert row["loss"] != before["loss"]


def test_with_rewards_kept_apart_the_penalty_is_normalised_alone(run, mine):
    """gdpo divides each named reward by its own deviation: a coefficient alone changes nothing but rounding."""
    flags = ("--reward.function", mine("named"), "--algorithm.advantage.kind", "gdpo", "--num-steps", "1")
    penalty = ("--length_penalty.kind", "per_token", "--penalty-coef")
    losses = [metrics(run(*flags, *more))[0]["loss"] for more in ((), (*penalty, "0.5"), (*penalty, "5"))]
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)
    assert losses[1] == pytest.approx(losses[2], rel=1e-3)


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            ("--length_penalty.kind", "soft_overlong", "--buffer-tokens", "7"),
            "length_penalty.buffer_tokens must be at most rollout.max_response_tokens, got 7 and 6",
        ),
        (
            ("--length_penalty.kind", "per_token", "--target-tokens", "6"),
            "length_penalty.target_tokens must be below rollout.max_response_tokens, got 6 and 6",
        ),
        (
            ("--length_penalty.kind", "soft_overlong", "--algorithm.advantage.kind", "pass_at_k", "--advantage.k", "2"),
            "length_penalty.kind must be none with algorithm.advantage.kind = pass_at_k, got soft_overlong",
        ),
        (
            ("--filter.equal_rewards", "--group-size", "1", "--algorithm.advantage.kind", "reinforce_plus_plus"),
            "filter.equal_rewards must be false with rollout.group_size = 1",
        ),
        (("--prompts-per-round", "8"), "rollout.prompts_per_round = 8 is only used with a filter"),
        (
            ("--filter.equal_rewards", "--prompts-per-round", "3"),
            "rollout.prompts_per_round must be at least rollout.prompts_per_step, got 3 and 4",
        ),
        (("--surplus", "keep"), "filter.surplus = keep is only used with a filter"),
        (("--max-tokens-in-flight", "27"), "rollout.max_tokens_in_flight must be at least 28, got 27"),
    ],
)
def test_what_cannot_be_is_refused_before_the_model_is_read(small, tmp_path, flags, message):
    flags = [flag.replace("--advantage.k", "--algorithm.advantage.k") for flag in flags]
    assert message in refusing(tmp_path)("train", small.train, *flags, "--model.path", "no/such/model")


# ---- sources, curriculum, tokens in flight --------------------------------------------------------------------------


def test_the_cap_on_tokens_in_flight_holds_and_changes_no_sample(run):
    """A prompt of 5 tokens and 6 of response, 4 times: 44 for a group. 100 let two groups in, of four."""
    folder = run("--num-steps", "1", "--max-tokens-in-flight", "100")
    assert 44 <= metrics(folder)[0]["tokens_in_flight"] <= 100
    rows, plain = (read_lines(f / "rollouts/step_000001.jsonl") for f in (folder, run("--num-steps", "1")))
    assert [r["tokens"] for r in rows] == [r["tokens"] for r in plain]


def test_a_prompt_whose_samples_do_not_fit_under_the_cap_is_refused_before_sampling(small, tmp_path):
    done = strop("train", small.train, "--max-tokens-in-flight", "29", "--run.folder", tmp_path / "run")
    assert done.code == 2
    assert "rollout.max_tokens_in_flight must be at least" in done.err
    assert "got 29: the 4 samples of prompt row" in done.err
    assert not (tmp_path / "run").exists()


def test_a_cache_that_holds_no_whole_prompt_and_response_is_refused_before_sampling(small, tmp_path):
    done = strop("train", small.train, "--max-cache-tokens", "9", "--run.folder", tmp_path / "run")
    assert done.code == 2
    assert "engine.max_cache_tokens must be at least" in done.err
    assert "tokens, and rollout.max_response_tokens = 6" in done.err
    assert not (tmp_path / "run").exists()


def test_source_weights_that_name_no_source_of_the_data_are_refused(small, tmp_path):
    done = strop("train", small.train, "--data.source_weights.gsm8k", "1", "--run.folder", tmp_path / "run")
    assert done.code == 2
    assert "data.source_weights needs a source in every row, got none in row 0: 64 of 64 rows" in done.err


def test_source_weights_do_not_act_in_an_evaluation(small, tmp_path):
    flags = (*small.eval_flags, "--eval.data.source_weights.a", "1")
    assert "eval.data.source_weights = {'a': 1.0} cannot act" in refusing(tmp_path)("train", small.train, *flags)


def test_a_curriculum_sees_every_prompt_once_and_then_those_near_its_target(run):
    """6 prompts, 4 a step: after two steps every one was seen."""
    flags = ("--curriculum.kind", "accuracy", "--data.max_prompts", "6", "--num-steps", "3")
    found = metrics(run(*flags))
    assert [row["curriculum/seen"] for row in found] == [pytest.approx(4 / 6), 1.0, 1.0]
    assert found[0]["curriculum/mean_accuracy"] == pytest.approx(found[0]["reward"])
    assert not same_weights(run(*flags) / "model", run("--data.max_prompts", "6", "--num-steps", "3") / "model")


# ---- the preset dapo ------------------------------------------------------------------------------------------------


def test_explain_shows_what_the_preset_dapo_sets_outside_of_the_objective(small, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    done = strop("explain", small.train, "--preset", "dapo", "--max-response-tokens", "20")
    assert done.code == 0, done.err
    said = [" ".join(line.split()) for line in done.out.splitlines()]
    for beginning in (
        "filter.equal_rewards True preset dapo ",
        "length_penalty.kind soft_overlong preset dapo ",
        "length_penalty.buffer_tokens 4 derived from rollout.max_response_tokens ",
    ):
        assert any(line.startswith(beginning) for line in said), beginning
    assert "R = score - 1 min(max(n - 16, 0), 4) / 4, n = tokens of the response" in said
    assert "groups whose scores are all equal are dropped" in said
    assert not any("with changes of yours" in line for line in said)


def test_what_is_set_beside_the_preset_wins(run, small):
    done = strop(
        "explain", small.train, "--preset", "dapo", "--filter.equal_rewards", "false", "--length_penalty.kind", "none"
    )
    assert done.code == 0, done.err
    assert "with changes of yours" in done.out
    assert "groups whose scores are all equal" not in done.out
    assert "n = tokens of the response" not in done.out


def test_the_preset_dapo_drops_equal_groups_and_punishes_length(run):
    (row,) = metrics(run("--preset", "dapo", "--num-steps", "1"))
    assert row["dropped/equal_rewards"] > 0
    assert row["length_penalty"] < 0
