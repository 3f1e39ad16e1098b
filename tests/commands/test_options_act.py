"""Options move what they should move, through the config and whole runs of the real trainer."""

import json
import string
from functools import cache

import pytest
from commands.small_runs import metrics, read_lines, same_weights, small_once, strop, write_model, write_tokenizer


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


@pytest.fixture(scope="module")
def run(small, tmp_path_factory):
    """Runs strop train with flags, once for each set of flags; returns the run folder."""

    @cache
    def train(*flags):
        folder = tmp_path_factory.mktemp("act") / "run"
        done = strop("train", small.train, *flags, "--run.folder", folder)
        assert done.code == 0, done.err
        return folder

    return train


def last(folder, name):
    return metrics(folder)[-1][name]


# ---- the policy loss ------------------------------------------------------------------------------------------------


def test_dual_clip_caps_ratios_and_moves_the_weights(run):
    """Case 1: eps_clip_c reaches the loss. A step this large sends ratios far above 1.3 within a batch."""
    flags = ("--lr", "0.05", "--num-steps", "2", "--updates-per-batch", "4")
    without, capped = run(*flags), run(*flags, "--eps-clip-c", "1.3")
    assert metrics(without)[0].keys().isdisjoint({"dual_clip_fraction"})
    assert metrics(capped)[0]["dual_clip_fraction"] > 0
    assert metrics(capped)[0]["ratio_max"] > 1.3
    assert metrics(capped)[0]["loss"] != metrics(without)[0]["loss"]
    assert not same_weights(capped / "model", without / "model")


def test_a_cap_that_no_ratio_reaches_changes_nothing(run):
    flags = ("--lr", "0.001", "--num-steps", "2")
    assert last(run(*flags, "--eps-clip-c", "1000"), "dual_clip_fraction") == 0
    assert same_weights(run(*flags, "--eps-clip-c", "1000") / "model", run(*flags) / "model")


@pytest.mark.parametrize(
    "flags",
    [
        ("--eps-clip", "0.01"),
        ("--eps-clip-high", "0.9"),
        ("--policy_loss.kind", "cispo"),
        ("--normalize-std", "false"),
        ("--updates-per-batch", "1"),
        ("--updates-per-batch", "4"),
        ("--rollout.temperature", "0.7"),
        ("--mask-truncated",),
        ("--lr", "0.011"),
        ("--warmup-steps", "2"),
        ("--lr-schedule", "linear"),
        ("--beta1", "0.5"),
        ("--beta2", "0.5"),
        ("--adam-eps", "1e-3"),
        ("--weight-decay", "0.1"),
        ("--max-grad-norm", "0.01"),
        ("--std-eps", "0.1"),
        ("--data.shuffle", "false"),
        ("--group-size", "5"),
        ("--prompts-per-step", "6"),
        ("--rollout.max_response_tokens", "5"),
        ("--rollout.stop_token_ids", "[4]"),
    ],
    ids=" ".join,
)
def test_the_option_changes_the_weights(run, flags):
    flags = tuple(flag.replace("--policy_loss", "--algorithm.policy_loss") for flag in flags)
    assert not same_weights(run(*flags) / "model", run() / "model")


@pytest.mark.parametrize(
    "flags",
    [
        ("--max-tokens-per-micro-batch", "16"),
        ("--max-tokens-per-micro-batch", "1"),
        ("--layout", "padded"),
        ("--layout", "packed"),
        ("--layout", "shared"),
        ("--max-sequences", "3"),
        ("--max-cache-tokens", "36"),
    ],
    ids=" ".join,
)
def test_how_the_work_is_cut_does_not_change_the_run(run, flags):
    """Promise 2: the same samples, and losses that differ by the rounding of sums alone. One step: later ones amplify
    what rounding left."""
    plain, cut = run("--num-steps", "1"), run("--num-steps", "1", *flags)
    texts = [[r["tokens"] for r in read_lines(folder / "rollouts/step_000001.jsonl")] for folder in (plain, cut)]
    assert texts[0] == texts[1]
    (one,), (other,) = metrics(plain), metrics(cut)
    assert one.keys() == other.keys()
    skip = {"logprob_gap", "logprob_gap_max", "padding_share"}  # rounding themselves, and the cut itself
    differ = [n for n in one if n not in skip and other[n] != pytest.approx(one[n], rel=2e-3, abs=1e-4)]
    assert differ == []


# ---- reduction, KL, entropy -----------------------------------------------------------------------------------------


def test_each_reduction_gives_weights_of_its_own(run):
    names = ["token_mean", "sequence_mean", "prompt_mean", "constant_length"]
    folders = [run("--num-steps", "2", "--algorithm.reduction", name) for name in names]
    pairs = [(a, b) for i, a in enumerate(folders) for b in folders[:i]]
    assert [same_weights(a / "model", b / "model") for a, b in pairs] == [False] * 6


def test_the_kl_to_the_reference_is_0_at_the_first_update_and_grows_as_the_policy_leaves(run):
    rows = metrics(run("--coef", "1e-6", "--updates-per-batch", "1", "--num-steps", "4"))
    assert rows[0]["kl_ref_k3"] == pytest.approx(0, abs=1e-9)
    assert rows[3]["kl_ref_k3"] > rows[1]["kl_ref_k3"] > 1e-3


def test_a_larger_kl_coefficient_keeps_the_policy_nearer_to_the_reference(run):
    flags = ("--updates-per-batch", "1", "--num-steps", "6")
    free, held = run("--coef", "1e-6", *flags), run("--coef", "10", *flags)
    assert last(held, "kl_ref_k3") < last(free, "kl_ref_k3") / 3
    assert not same_weights(free / "model", held / "model")
    assert metrics(held)[0]["loss"] == pytest.approx(metrics(free)[0]["loss"], abs=1e-6)  # no distance yet
    assert metrics(held)[1]["loss"] > metrics(free)[1]["loss"]


def test_without_a_coefficient_there_is_no_kl_metric(run):
    assert not [name for name in metrics(run())[0] if name.startswith("kl_ref")]


@pytest.mark.parametrize("kind, more", [("k1", ["--unbiased"]), ("k2", []), ("k3", []), ("k3", ["--unbiased"])])
def test_each_estimator_of_the_kl_changes_the_weights(run, kind, more):
    flags = ("--coef", "1", "--algorithm.kl.kind", kind, *more)
    assert f"kl_ref_{kind}" in metrics(run(*flags))[0]
    assert not same_weights(run(*flags) / "model", run() / "model")


def test_the_entropy_coefficient_raises_entropy_above_0_and_lowers_it_below(small, run):
    """With equal rewards nothing else acts."""
    flags = ("--reward.function", small.reward("equal"), "--num-steps", "4", "--updates-per-batch", "1")
    still, up, down = (run(*flags, "--entropy-coef", coef) for coef in ("0", "1", "-1"))
    assert metrics(up)[0]["entropy"] == metrics(still)[0]["entropy"] == metrics(down)[0]["entropy"]
    assert last(up, "entropy") > last(still, "entropy") + 0.02
    assert last(down, "entropy") < last(still, "entropy") - 0.02
    assert metrics(up)[0]["loss"] == pytest.approx(-metrics(up)[0]["entropy"], rel=1e-5)


# ---- rewards --------------------------------------------------------------------------------------------------------

CHARACTERS = string.ascii_letters + string.digits + " +-=:.,?'\n"


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A model that answers with one digit, right once in ten times; its tokenizer knows letters, digits and signs."""
    folder = tmp_path_factory.mktemp("digits")
    write_model(folder / "start", vocab_size=write_tokenizer(folder / "start", CHARACTERS))
    with (folder / "train.jsonl").open("w") as prompts, (folder / "demonstrations.jsonl").open("w") as demonstrations:
        for a in range(10):
            prompts.write(json.dumps({"prompt": f"{a}=", "label": str(a)}) + "\n")
            for b in range(10):
                demonstrations.write(json.dumps({"prompt": f"{a}=", "response": str(b)}) + "\n")
    config = f'[model]\npath = "{folder}/start"\n[data]\npath = "{folder}/demonstrations.jsonl"\n'
    (folder / "sft.toml").write_text(config + "[trainer]\nlr = 0.02\nnum_threads = 1\n[run]\nnum_steps = 30\n")
    assert strop("sft", folder / "sft.toml", "--run.folder", folder / "sft").code == 0
    return folder


def reward_run(digits, folder, kind, data, *flags):
    """A run of two steps; returns the rows of its rollouts."""
    config = folder / f"{kind}.toml"
    config.write_text(
        f'[model]\npath = "{digits}/sft/model"\n[data]\n{data}\n[reward]\nkind = "{kind}"\n'
        "[rollout]\nprompts_per_step = 4\ngroup_size = 16\nmax_response_tokens = 4\n"
        "[trainer]\nlr = 1e-4\nnum_threads = 1\n[run]\nnum_steps = 2\n"
    )
    done = strop("train", config, *flags, "--run.folder", folder / "run")
    assert done.code == 0, done.err
    return [row for n in (1, 2) for row in read_lines(folder / f"run/rollouts/step_{n:06d}.jsonl")]


@pytest.mark.parametrize("kind", ["exact", "number", "math"])
def test_a_run_is_scored_by_the_kind_of_reward_that_it_names(digits, tmp_path, kind):
    rows = reward_run(digits, tmp_path, kind, f'kind = "jsonl"\npath = "{digits}/train.jsonl"')
    assert len(rows) == 128
    digit_answers = [r for r in rows if r["finish_reason"] == "stop" and r["response"] in list(string.digits)]
    assert len(digit_answers) > 64
    assert [r for r in digit_answers if r["reward"] != float(r["response"] == r["label"])] == []
    assert {r["reward"] for r in digit_answers} == {0.0, 1.0}
    without = [r for r in rows if not any(c.isdigit() for c in r["response"])]
    assert [r for r in without if r["reward"] != 0] == []


def test_a_run_on_generated_tasks_is_scored_by_their_own_scorer(digits, tmp_path):
    from reasoning_gym.factory import create_dataset

    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    table = ", ".join(f"{name} = {value}" for name, value in options.items())
    data = f'kind = "reasoning_gym"\nname = "chain_sum"\nsize = 12\ntask_seed = 3\noptions = {{ {table} }}'
    rows = reward_run(digits, tmp_path, "dataset", data)
    tasks = create_dataset("chain_sum", size=12, seed=3, **options)
    for row in rows:
        task = tasks[row["prompt_row"]]
        assert (row["prompt"], row["label"]) == (task["question"], task["answer"])
        assert row["reward"] == tasks.score_answer(row["response"].strip(), task)
    assert len({row["prompt_row"] for row in rows}) == 8


def test_flags_below_data_options_reach_the_dataset_as_numbers_and_truth_values(digits, tmp_path):
    """As text, "false" would count as true, and chain_sum would refuse "2"."""
    from reasoning_gym.factory import create_dataset

    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "allow_negation": False}
    flags = [word for name, value in options.items() for word in (f"--data.options.{name}", str(value).lower())]
    data = 'kind = "reasoning_gym"\nname = "chain_sum"\nsize = 12\ntask_seed = 3'
    rows = reward_run(digits, tmp_path, "dataset", data, *flags)
    tasks = create_dataset("chain_sum", size=12, seed=3, **options)
    assert [row["prompt"] for row in rows] == [tasks[row["prompt_row"]]["question"] for row in rows]


def test_a_batched_function_sees_the_whole_step_and_gives_what_the_plain_one_gives(small, run, tmp_path):
    path = tmp_path / "batched.py"
    path.write_text(
        f"import sys; sys.path.insert(0, {str(small.folder)!r})\nfrom reward import score\n"
        "def all_at_once(rollouts):\n    assert len(rollouts) == 16\n    return [score(r) for r in rollouts]\n"
    )
    batched = run("--reward.function", f"{path}:all_at_once", "--reward.batched", "true")
    assert same_weights(batched / "model", run() / "model")
