"""Whether a run goes on or begins, and what may be otherwise when it goes on."""

import json
import shutil

import pytest
from commands.sft_runs import write_sft_small
from commands.small_runs import metrics, read_lines, same_weights, small_once, strop

import strop as package
from strop.config import TrainConfig, make_config
from strop.runtime.differences import allowed_differences, decisive
from strop.types import ConfigError

FLAGS = ("--checkpoint-every-steps", "1", "--keep-checkpoints", "9", "--lr", "0.01")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


@pytest.fixture(scope="module")
def made(small, tmp_path_factory):
    """A run of two steps."""
    run = tmp_path_factory.mktemp("made") / "run"
    assert strop("train", small.train, *FLAGS, "--num-steps", "2", "--run.folder", run).code == 0
    return run


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made, tmp_path / "run")


def train(small, run, *flags):
    return strop("train", small.train, *FLAGS, "--run.folder", run, *flags)


# ---- --resume auto --------------------------------------------------------------------------------------------------


def test_auto_begins_where_there_is_no_run_and_goes_on_where_there_is_one(small, made, tmp_path):
    first = train(small, tmp_path / "run", "--resume", "auto", "--num-steps", "1")
    assert first.code == 0, first.err
    assert "resumed from" not in first.out
    then = train(small, tmp_path / "run", "--resume", "auto", "--num-steps", "2")
    assert "step_000001 after step 1" in then.out, then.err
    assert same_weights(tmp_path / "run/model", made / "model")


def test_auto_refuses_a_run_without_a_checkpoint_unless_it_may_be_replaced(small, run):
    shutil.rmtree(run / "checkpoints")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    done = train(small, run, "--resume", "auto", "--num-steps", "2")
    assert done.code == 2
    assert (
        f"run.folder = {str(run)!r} holds a run without a checkpoint, from which --resume auto cannot go on."
        in done.err
    )
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    again = train(small, run, "--resume", "auto", "--num-steps", "1", "--run.overwrite")
    assert again.code == 0, again.err
    assert len(metrics(run)) == 1


@pytest.mark.parametrize("num_steps_made, begins", [(0, True), (3, True), (4, False)])
def test_auto_begins_a_run_again_that_ended_before_a_checkpoint_of_it_was_complete(
    small, made, run, num_steps_made, begins
):
    """The first one, due after step 2, is complete before that of step 4 is."""
    for name in ("checkpoints", "model"):
        shutil.rmtree(run / name)
    (run / "checkpoints/.step_000002.new").mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {step + 1}}}\n' for step in range(num_steps_made)))
    config = (run / "config.toml").read_text().replace(str(made), str(run))
    (run / "config.toml").write_text(config.replace("checkpoint_every_steps = 1", "checkpoint_every_steps = 2"))
    done = train(small, run, "--resume", "auto", "--num-steps", "1")
    if begins:
        assert done.code == 0, done.err
        assert [row["step"] for row in metrics(run)] == [1]
        assert not (run / "rollouts/step_000002.jsonl").exists()  # of the run before
        assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000001"]
    else:
        assert "holds a run without a checkpoint" in done.err


@pytest.mark.parametrize("text", ["", "mine", "[run]\nfolder = 'runs/x'\ncheckpoint_every_steps = 9"])
def test_auto_leaves_a_folder_of_ones_own_files_as_it_is(small, tmp_path, text):
    """Such as the folder with one's own config.toml, named by run.folder = "."."""
    (tmp_path / "config.toml").write_text(text)
    done = train(small, tmp_path, "--resume", "auto", "--num-steps", "1")
    assert done.code == 2
    assert "holds a run without a checkpoint" in done.err
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"config.toml": text}


def test_a_run_of_the_other_command_is_not_resumed(small, tmp_path):
    folder = write_sft_small(tmp_path / "small")
    flags = ("--checkpoint-every-steps", "1", "--run.folder", tmp_path / "run")
    assert strop("sft", folder / "sft.toml", *flags, "--num-steps", "1").code == 0
    done = train(small, tmp_path / "run", "--resume")
    assert done.code == 2
    assert "step_000001 is of strop sft. strop sft CONFIG --resume goes on from it." in done.err


def test_auto_never_replaces_a_run_whose_checkpoints_are_all_damaged(small, run):
    for path in (run / "checkpoints").iterdir():
        (path / "run.json").unlink()
    done = train(small, run, "--resume", "auto", "--run.overwrite", "--num-steps", "1")
    assert done.code == 2
    assert "there is no complete checkpoint to resume from" in done.err
    assert len(metrics(run)) == 2


def test_auto_of_sft_begins_and_goes_on(tmp_path):
    folder = write_sft_small(tmp_path / "small")
    flags = ("--checkpoint-every-steps", "1", "--run.folder", tmp_path / "run", "--resume", "auto")
    assert "resumed" not in strop("sft", folder / "sft.toml", *flags, "--num-steps", "1").out
    assert "step_000001 after step 1" in strop("sft", folder / "sft.toml", *flags, "--num-steps", "2").out


@pytest.mark.parametrize("words", [["--resume", "CONFIG"], ["CONFIG", "--resume"], ["--resume", "newest", "CONFIG"]])
def test_what_follows_resume_is_its_word_only_if_it_is_one(small, run, words):
    words = [small.train if word == "CONFIG" else word for word in words]
    done = strop("train", *words, *FLAGS, "--run.folder", run, "--num-steps", "2")
    assert "step_000002 after step 2" in done.out, done.err


def test_another_word_is_refused_with_those_there_are(small, run):
    done = train(small, run, "--resume=last")
    assert done.code == 2
    assert "resume must be newest, auto, best, or the name of a checkpoint, such as step_000040, got 'last'" in done.err


# ---- --allow-change -------------------------------------------------------------------------------------------------


def test_all_differences_are_listed_each_with_what_confirms_it(small, run):
    done = train(small, run, "--resume", "--beta1", "0.8", "--std-eps", "0.1", "--seed", "3", "--data.shuffle", "false")
    assert done.code == 2
    lines = done.err.splitlines()
    assert lines[0] == "error: 4 problems"
    told = {line.split()[1]: line.partition("with ")[2].partition(",")[0] for line in lines[1:]}
    assert told == {
        "trainer.beta1": "--allow-change trainer.beta1",
        "algorithm.advantage.std_eps": "--allow-change algorithm.advantage.std_eps",
        "seed": "--allow-change seed --allow-change data",
        "data.shuffle": "--allow-change data",
    }


def test_the_limits_of_programs_are_part_of_a_run_and_those_of_functions_are_not():
    """A program is scored by whether it keeps to its limits; a function's only end what hangs."""

    def config(**reward):
        tables = {"model": {"path": "m"}, "data": {"kind": "jsonl", "path": "d"}, "reward": reward}
        return make_config(TrainConfig, tables, {}, file="x.toml")

    def check(**reward):
        of_checkpoint = json.loads(json.dumps(decisive(config(**reward))))
        return allowed_differences(config(**reward, timeout_s=5), of_checkpoint, frozenset())

    function, program = {"kind": "function", "function": "a:b"}, {"kind": "code"}
    assert check(**function) == []
    with pytest.raises(ConfigError, match=r"reward\.timeout_s must be 10\.0 as in the run that is resumed, got 5\.0"):
        check(**program)


def test_a_confirmed_change_acts_and_is_shown_and_written_down(small, made, run):
    flags = ("--num-steps", "3", "--resume", "--trainer.lr", "0.02", "--beta1", "0.8")
    refused = strop("train", small.train, *FLAGS[:4], "--run.folder", run, *flags, "--allow-change", "trainer.lr")
    assert refused.code == 2
    assert "trainer.beta1 must be 0.9" in refused.err
    assert "trainer.lr must be" not in refused.err
    done = strop(
        "train", small.train, *FLAGS[:4], "--run.folder", run, *flags, "--allow-change=lr", "--allow-change", "beta1"
    )
    assert done.code == 0, done.err
    assert "changed from step 3 on: trainer.lr = 0.02, was 0.01" in done.out
    assert read_lines(run / "changes.jsonl") == [
        {"step": 2, "option": "trainer.lr", "was": 0.01, "now": 0.02},
        {"step": 2, "option": "trainer.beta1", "was": 0.9, "now": 0.8},
    ]
    assert [row["lr"] for row in metrics(run)] == [0.01, 0.01, 0.02]
    # the checkpoint knows the change: the same flags need no word any more, and the file keeps it
    again = strop("train", small.train, *FLAGS[:4], "--run.folder", run, "--num-steps", "4", *flags[2:])
    assert again.code == 0, again.err
    assert len(read_lines(run / "changes.jsonl")) == 2


def test_a_change_that_is_confirmed_again_before_the_same_step_is_written_down_once(small, run):
    for lr in ("0.02", "0.03"):
        shutil.rmtree(run / "checkpoints/step_000003", ignore_errors=True)
        done = strop(
            *("train", small.train, *FLAGS[:4], "--run.folder", run, "--num-steps", "3", "--resume"),
            *("--trainer.lr", lr, "--allow-change", "trainer"),
        )
        assert done.code == 0, done.err
    assert read_lines(run / "changes.jsonl") == [{"step": 2, "option": "trainer.lr", "was": 0.01, "now": 0.03}]


@pytest.mark.parametrize(
    "name, says",
    [
        ("trainer.rate", "--allow-change must name an option or a table, got 'trainer.rate'"),
        ("eps_clipp", "The nearest option is algorithm.policy_loss.eps_clip"),
    ],
)
def test_a_name_that_is_none_is_refused(small, run, name, says):
    done = train(small, run, "--resume", "--allow-change", name)
    assert done.code == 2
    assert says in done.err


def test_allowing_a_change_needs_a_run_that_is_resumed(small, tmp_path):
    done = train(small, tmp_path / "run", "--allow-change", "lr")
    assert done.code == 2
    assert "--allow-change must come with --resume" in done.err
    assert list(tmp_path.iterdir()) == []
    config = package.load_config(small.train, {"run.folder": str(tmp_path / "run")})
    with pytest.raises(ConfigError, match="must come with --resume"):
        package.train(config, allow_change=["trainer.lr"])


def test_a_coefficient_that_adapts_begins_with_the_value_that_is_confirmed(small, tmp_path):
    kl = ("--algorithm.kl.target", "0.01", "--run.folder", tmp_path / "run", "--algorithm.kl.coef")
    assert strop("train", small.train, *FLAGS, *kl, "0.1", "--num-steps", "1").code == 0
    flags = ("--num-steps", "2", "--resume", "--allow-change", "algorithm.kl.coef")
    assert strop("train", small.train, *FLAGS, *kl, "0.5", *flags).code == 0
    assert metrics(tmp_path / "run")[1]["kl_coef"] == pytest.approx(0.5, rel=0.2)  # moves by at most a fifth a batch


@pytest.mark.parametrize(
    "flags, what",
    [
        (("--algorithm.kl.coef", "0.1"), "reference"),
        (("--algorithm.advantage.kind", "gae"), "critic"),
    ],
)
def test_a_change_that_needs_what_the_checkpoint_lacks_is_refused(small, run, flags, what):
    done = train(small, run, "--resume", *flags, "--allow-change", "algorithm", "--allow-change", "critic")
    assert done.code == 2, done.out
    assert f"holds no {what}, which this config needs" in done.err


# ---- another dataset ------------------------------------------------------------------------------------------------


@pytest.fixture
def other_data(small, tmp_path):
    lines = (small.folder / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "other.jsonl").write_text("".join(reversed(lines[:64])))
    return tmp_path / "other.jsonl"


def test_other_prompts_begin_with_their_first_row_and_only_when_asked_for(small, run, other_data):
    flags = ("--num-steps", "3", "--resume", "--data.path", other_data)
    refused = train(small, run, *flags, "--allow-change", "trainer")
    assert refused.code == 2
    assert "go on with the new prompts from their first row with --allow-change data" in refused.err
    done = train(small, run, *flags, "--allow-change", "data")
    assert done.code == 0, done.err
    assert "warning: the data begin anew, with the first row of their first pass." in done.out
    rows = [[r["prompt_row"] for r in read_lines(run / f"rollouts/step_{n:06d}.jsonl")] for n in (1, 3)]
    assert rows[0] == rows[1]  # the same order of rows, of other prompts
    assert [row["option"] for row in read_lines(run / "changes.jsonl")] == ["data"]


def test_the_same_prompts_go_on_where_they_stopped_although_others_would_be_allowed(small, run, tmp_path):
    assert train(small, run, "--num-steps", "3", "--resume", "--allow-change", "data").code == 0
    assert train(small, tmp_path / "whole", "--num-steps", "3").code == 0
    assert same_weights(run / "model", tmp_path / "whole/model")
    assert not (run / "changes.jsonl").exists()


def test_groups_that_wait_are_dropped_with_the_prompts_that_they_answer(small, tmp_path, other_data):
    keeping = ("--filter.equal_rewards", "--filter.surplus", "keep", "--rollout.prompts_per_round", "12")
    flags = (*FLAGS, *keeping, "--run.folder", tmp_path / "run")
    assert strop("train", small.train, *flags, "--num-steps", "1").code == 0
    num_waiting = int(metrics(tmp_path / "run")[0]["waiting_groups"])
    assert num_waiting > 0
    more = ("--num-steps", "2", "--resume", "--allow-change", "data", "--data.path", other_data)
    done = strop("train", small.train, *flags, *more)
    assert f"{num_waiting} groups that waited for the next step are dropped" in done.out, done.err


def test_other_demonstrations_begin_with_their_first_row_and_only_when_asked_for(tmp_path):
    folder = write_sft_small(tmp_path / "small")
    lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "other.jsonl").write_text("".join(lines[:8]))
    flags = ("--checkpoint-every-steps", "1", "--run.folder", tmp_path / "run", "--num-steps", "none")
    assert strop("sft", folder / "sft.toml", *flags).code == 0  # 18 demonstrations, 5 steps
    more = (*flags, "--data.path", folder / "other.jsonl", "--resume")
    assert "with --allow-change data" in strop("sft", folder / "sft.toml", *more).err
    done = strop("sft", folder / "sft.toml", *more, "--allow-change", "data")
    assert done.code == 0, done.err
    assert [(row["step"], row["epoch"]) for row in metrics(tmp_path / "run")][-2:] == [(6, 0.5), (7, 1.0)]
