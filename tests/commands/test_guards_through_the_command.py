"""Guards and the steps that are not made, through the command."""

import json

import pytest
from commands.small_runs import metrics, read_lines, same_weights, small_once, strop


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


@pytest.fixture
def trained(small, tmp_path):
    def run(*flags, config=None):
        done = strop("train", config or small.train, *flags, "--run.folder", tmp_path / "run")
        return done, tmp_path / "run"

    return run


def test_a_gap_between_engine_and_trainer_above_the_bound_stops_the_run_before_the_step(small, trained):
    done, run = trained("--guards.max_logprob_gap", "1e-12")
    assert done.code == 1
    assert done.err.startswith("stopped: guards.max_logprob_gap must hold")
    assert "1e-12" in done.err
    assert "Traceback" not in done.err
    assert same_weights(run / "model", small.start)
    assert not (run / "metrics.jsonl").exists()


def test_the_default_bound_lets_an_honest_run_pass(trained):
    done, run = trained()
    assert done.code == 0
    assert max(row["logprob_gap"] for row in metrics(run)) < 1e-4  # promise 4 of the design, float32 on CPU


def test_a_model_whose_weights_are_not_finite_stops_with_a_guard(small, trained, tmp_path):
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    broken.mkdir()
    for path in small.start.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    done, run = trained("--model.path", broken)
    assert done.code == 1
    assert "not finite" in done.err
    assert not (run / "metrics.jsonl").exists()


def test_a_guard_that_stops_the_second_update_of_a_batch_saves_the_model_from_before_the_batch(small, trained):
    """The first update, at an absurd learning rate, ruins the weights; the second one's loss is not finite."""
    done, run = trained("--lr", "1e30", "--checkpoint-every-steps", "1")
    assert done.code == 1
    assert "not finite" in done.err
    assert not (run / "metrics.jsonl").exists()
    assert same_weights(run / "model", small.start)


@pytest.fixture(scope="module")
def endless(small):
    """The small model with the embedding of its end token at 0: at a low temperature it never ends a response."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(small.start)
    model.get_input_embeddings().weight.data[1] = 0.0
    model.save_pretrained(small.folder / "endless")
    AutoTokenizer.from_pretrained(small.start).save_pretrained(small.folder / "endless")
    return small.folder / "endless"


@pytest.mark.parametrize("mask_truncated", [True, False])
def test_no_step_is_made_where_all_responses_are_truncated_and_masked(endless, trained, mask_truncated):
    """Case 18. The entropy term gives a gradient even where the low temperature makes all samples of a group equal."""
    flags = ["--model.path", endless, "--rollout.temperature", "0.05", "--entropy-coef", "0.1", "--weight-decay", "0.1"]
    done, run = trained(*flags, "--mask-truncated", str(mask_truncated).lower())
    assert done.code == 0, done.err
    rows = metrics(run)
    assert [row["truncated"] for row in rows] == [1.0] * 3
    assert same_weights(run / "model", endless) == mask_truncated
    assert [row.get("skipped_steps") for row in rows] == [2.0 if mask_truncated else None] * 3
    assert [("grad_norm" in row) for row in rows] == [not mask_truncated] * 3


def test_masked_truncated_responses_leave_the_loss_and_not_the_statistics(trained):
    done, run = trained("--mask-truncated", "--num-steps", "1")
    assert done.code == 0
    (row,) = metrics(run)
    assert 0 < row["truncated"] < 1
    rewards = [r["reward"] for r in read_lines(run / "rollouts/step_000001.jsonl")]
    assert row["reward"] == pytest.approx(sum(rewards) / 16, abs=1e-12)


@pytest.mark.parametrize("preset", ["cispo", "grpo", "dr_grpo"])
def test_equal_rewards_everywhere_give_loss_0_and_leave_the_weights(small, trained, preset):
    """Case 8, groups of seven. GRPO's KL term is 0 too, for the policy stays at the reference."""
    flags = ["--reward.function", small.reward("equal"), "--algorithm.preset", preset]
    done, run = trained(*flags, "--group-size", "7")
    assert done.code == 0
    rows = metrics(run)
    assert [row["equal_reward_groups"] for row in rows] == [1.0] * 3
    assert [abs(row["loss"]) < 1e-7 for row in rows] == [True] * 3
    assert same_weights(run / "model", small.start)


def test_unequal_rewards_are_not_counted_as_equal(trained):
    _, run = trained()
    for row in metrics(run):
        groups = {}
        for r in read_lines(run / f"rollouts/step_{row['step']:06d}.jsonl"):
            groups.setdefault(r["prompt_row"], set()).add(r["reward"])
        assert row["equal_reward_groups"] == sum(len(rewards) == 1 for rewards in groups.values()) / 4


def test_groups_that_exclusions_leave_with_one_rollout_are_said_once_and_counted(trained, tmp_path):
    """Case 9."""
    (tmp_path / "first.py").write_text("def score(rollout):\n    return 1.0 if rollout.sample == 0 else None\n")
    done, run = trained("--reward.function", f"{tmp_path}/first.py:score")
    assert done.code == 0, done.err
    assert [row["groups_of_one"] for row in metrics(run)] == [4.0] * 3
    assert done.out.count("warning: 4 of 4 groups have one scored rollout left") == 1


def test_one_sample_per_prompt_that_is_asked_for_is_no_group_of_one(trained):
    done, run = trained("--group-size", "1", "--algorithm.advantage.kind", "reinforce_plus_plus")
    assert done.code == 0, done.err
    assert [row for row in metrics(run) if "groups_of_one" in row] == []


def test_weights_that_the_last_update_ruined_do_not_replace_a_good_model(small, trained):
    """At a rate and decay of this size some weights end infinite; there is no further step that would notice."""
    flags = ("--num-steps", "1", "--updates-per-batch", "1", "--checkpoint-every-steps", "1")
    done, run = trained("--lr", "1e30", "--weight-decay", "1e10", "--beta1", "0", *flags)
    assert done.code == 1, done
    assert "stopped: the weights are not finite after step 1" in done.err
    assert "no model was written" in done.out
    assert not (run / "model").exists()
    assert not (run / "checkpoints").exists()


def test_a_run_in_which_no_rollout_has_a_score_makes_no_step(small, trained, tmp_path):
    (tmp_path / "silent.py").write_text("def score(rollout):\n    return None\n")
    done, run = trained("--reward.function", f"{tmp_path}/silent.py:score")
    assert done.code == 0, done.err
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["skipped_steps"] for row in rows] == [2.0] * 3
    assert [row["reward/num_excluded"] for row in rows] == [16] * 3
    assert [name for name in rows[0] if name in ("reward", "equal_reward_groups", "loss")] == []  # not 0: not measured
    assert [line for line in done.out.splitlines() if "no-op updates 2" in line and "left out 16" in line] != []
    assert same_weights(run / "model", small.start)
