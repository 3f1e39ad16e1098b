"""strop import-slime: launch scripts in the style of slime's examples become configs, and train."""

from functools import partial

import pytest
from commands.imported_scripts import import_launch, import_text
from commands.small_runs import metrics, same_weights, small_once, strop, strop_process
from commands.test_help import watched

MODEL = """
MODEL_ARGS=(
   --swiglu
   --num-layers 36
   --rotary-base "${BASE:-1000000}"
)
"""

SCRIPT = r"""
#!/bin/bash
# start anew
pkill -9 sglang
sleep 3
set -ex

export PYTHONBUFFERED=16
LINKS=$(nvidia-smi topo -m 2>/dev/null | grep -o 'NV[0-9]*' | wc -l)
if [ "$LINKS" -gt 0 ]; then
    HAS_LINKS=1
else
    HAS_LINKS=0
fi
echo "links: $LINKS (it's so)"

SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/small.sh"
ROOT=/data

CKPT_ARGS=(
   --hf-checkpoint ${ROOT}/model
   #--hf-checkpoint /data/other
   --ref-load "$ROOT/model_torch_dist"
   --save ${ROOT}/out/
   --save-interval 20
)

ROLLOUT_ARGS=(
   --prompt-data ${ROOT}/train.jsonl@[0:100]
   --input-key question
   --label-key answer
   --apply-chat-template
   --rm-type deepscaler
   --num-rollout 300
   --rollout-batch-size 32   # prompts
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --rollout-temperature 0.8

   --global-batch-size 128
   --balance-data
)

EVAL_ARGS=(
   --eval-interval 20
   --eval-prompt-data aime ${ROOT}/aime.parquet
   --n-samples-per-eval-prompt 16
   --eval-top-p 0.7
)

GRPO_ARGS=(
   --advantage-estimator grpo
   --use-kl-loss
   --kl-loss-coef 0.001
   --kl-loss-type low_var_kl
   --eps-clip 0.2
   --eps-clip-high 0.28
)
GRPO_ARGS+=(--eps-clip-c 3.0)

OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 2e-6
   --lr-decay-style constant
   --weight-decay 0.1
   --adam-beta2 0.98
)

WANDB_ARGS=(
   # --use-wandb
)

PERF_ARGS=(--tensor-model-parallel-size 2 --sequence-parallel --use-dynamic-batch-size --max-tokens-per-gpu 9216)

RUNTIME_ENV_JSON="{
  \"env_vars\": {\"HAS_LINKS\": \"${HAS_LINKS}\"}
}"

ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json="${RUNTIME_ENV_JSON}" \
   -- python3 train.py \
   --actor-num-nodes 1 \
   --colocate \
   ${MODEL_ARGS[@]} \
   ${CKPT_ARGS[@]} \
   "${ROLLOUT_ARGS[@]}" \
   ${OPTIMIZER_ARGS[@]} \
   ${GRPO_ARGS[@]} \
   ${WANDB_ARGS[@]} \
   ${PERF_ARGS[@]} \
   ${EVAL_ARGS[@]} \
   --sglang-mem-fraction-static=0.7 2>&1 | tee log.txt
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


@pytest.fixture
def imported(tmp_path):
    return partial(import_text, tmp_path)


@pytest.fixture
def launched(tmp_path):
    return partial(import_launch, tmp_path)


@pytest.fixture
def example(imported, tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models/small.sh").write_text(MODEL)
    return imported(SCRIPT)


# ---- a whole script -------------------------------------------------------------------------------------------------


def test_the_config_of_an_example_is_what_the_script_says(example):
    assert example.values == {
        "seed": 42,
        "model": {"path": "/data/model", "dtype": "bfloat16"},
        "data": {
            "kind": "jsonl",
            "path": "/data/train.jsonl",
            "max_prompts": 100,
            "prompt_key": "question",
            "label_key": "answer",
            "chat": "always",
            "shuffle": False,
        },
        "rollout": {"max_response_tokens": 8192, "temperature": 0.8},
        "reward": {"kind": "math"},
        "algorithm": {
            "reduction": "sequence_mean",
            "updates_per_batch": 2,
            "policy_loss": {"kind": "ppo_clip", "eps_clip_high": 0.28, "eps_clip_c": 3.0},
            "advantage": {"kind": "group"},
            "kl": {"coef": 0.001},
        },
        "trainer": {"lr": 2e-6, "beta2": 0.98, "weight_decay": 0.1, "max_tokens_per_micro_batch": 9216},
        "eval": {
            "every_steps": 20,
            "greedy": False,
            "num_samples": 16,
            "temperature": 0.8,
            "top_p": 0.7,
            "data": {
                "kind": "parquet",
                "path": "/data/aime.parquet",
                "prompt_key": "question",
                "label_key": "answer",
                "chat": "always",
            },
        },
        "run": {"folder": "/data/out/", "num_steps": 300, "checkpoint_every_steps": 20},
    }


def test_strop_explain_accepts_it(example):
    done = strop("explain", example.path)
    assert (done.code, done.err) == (0, "")
    assert "(dual clip)" in done.out


def test_the_three_groups_say_what_became_of_the_flags(example):
    assert list(example.groups)[:3] == ["maps", "at strop's default anyway", "no counterpart"]
    maps, default, without = (example.groups[name] for name in list(example.groups)[:3])
    assert "--use-kl-loss, --kl-loss-coef 0.001  ->  algorithm.kl.coef = 0.001" in "\n".join(maps)
    assert "(slime's default)  ->  data.shuffle = false" in maps
    assert '--kl-loss-type low_var_kl  (algorithm.kl.kind is "k3")' in default
    assert "--sglang-mem-fraction-static 0.7" in without
    assert "no other parallelism" in example.reason("--sequence-parallel")
    assert "config.json" in example.reason("--rotary-base")
    assert "rotary-base 1000000" in example.out  # the default of ${BASE:-1000000}


def test_the_count_beside_a_group_is_that_of_its_lines(example):
    for title in ("maps", "at strop's default anyway"):
        assert f"{title}: {len(example.groups[title])}\n" in example.out


# ---- scripts that are not as they should be -------------------------------------------------------------------------


def test_a_value_that_only_the_shell_knows_is_named_and_its_option_left_at_the_default(launched):
    found = launched(hf_checkpoint="$HOME_OF_MODELS/x", lr="$(cat rate)", save="/out/exp-`date +%s`", save_interval="5")
    assert "$HOME_OF_MODELS is not set in the script" in found.reason("--hf-checkpoint")
    assert "$(cat rate) is known only when the script runs" in found.reason("--lr")
    assert found.values["model"]["path"] == "model"
    assert found.config().trainer.lr == 1e-6
    assert found.values["run"] == {"num_steps": 10, "checkpoint_every_steps": 5}
    assert [line for line in found.path.read_text().splitlines() if line.startswith("#")][1:] == [
        "# --hf-checkpoint ${HOME_OF_MODELS}/x could not be read: set model.path.",
        "# --lr $(cat rate) could not be read: set trainer.lr.",
        "# --save /out/exp-$(date +%s) could not be read: set run.folder.",
    ]


def test_checkpoints_that_slime_retains_stay_for_good(launched):
    found = launched(save_interval="20", save_retain_interval="100")
    assert found.config().run.checkpoint_every_steps == 20
    assert found.config().run.keep_every_steps == 100
    assert "acts with --save-interval alone" in launched(save_retain_interval="100").reason("--save-retain-interval")


def test_a_default_that_is_taken_for_a_variable_is_said(launched):
    found = launched(lr="${2:-1e-5}")
    assert found.config().trainer.lr == 1e-5
    assert any("--lr 1e-5 (line 1): the value is the default of ${2:-1e-5}" in n for n in found.groups["in the script"])


def test_sums_give_the_batch_its_updates(imported):
    found = imported(
        "N=4\npython3 train.py --rollout-batch-size $N --n-samples-per-prompt $((N)) --global-batch-size $((N*N/2)) --lr 1"
    )
    assert found.config().algorithm.updates_per_batch == 2


def test_what_cannot_be_calculated_is_named_as_it_is_written(launched):
    found = launched(rollout_batch_size='"$((GPUS * 4))"')
    assert found.config().rollout.prompts_per_step == 32
    assert "$((GPUS * 4)) is known only when the script runs" in found.reason("--rollout-batch-size")


@pytest.mark.parametrize("flags", ["--recompute-granularity full --recompute-num-layers 1", "--gradient-checkpointing"])
def test_what_slime_computes_again_strop_does_too(imported, flags):
    found = imported(f"python3 train.py --hf-checkpoint m --prompt-data d.jsonl {flags}")
    assert found.config().trainer.activation_checkpointing
    if "layers" in flags:
        assert "every layer again, or none" in found.reason("--recompute-num-layers")


@pytest.mark.parametrize(
    "text, flag, where",
    [
        ("if x; then A=(--lr 1); else A=(--lr 2); fi", "--lr 2 (line 1)", "if of line 1 that strop does not follow"),
        ("if false; then A+=(--lr 2); fi", "--lr 2 (line 1)", "if of line 1"),
        ("M=a\ncase $M in\nb) A+=(--lr 2) ;;\nesac", "--lr 2 (line 3)", "case of line 2"),
        ("case $M in\na) A+=(--lr 1) ;;\nb) A+=(--lr 2) ;;\nesac", "--lr 2 (line 3)", "case of line 1"),
        ("[ -n '' ] && A+=(--lr 2)", "--lr 2 (line 1)", "behind a && of line 1"),
        ("true || A+=(--lr 2)", "--lr 2 (line 1)", "behind a || of line 1"),
        ("for x in; do A+=(--lr 2); done", "--lr 2 (line 1)", "the loop of line 1, which does not run"),
        ("while [ $# -gt 0 ]; do A+=(--lr 2); shift; done", "--lr 2 (line 1)", "the loop of line 1"),
        ("f() { A+=(--lr 2); }", "--lr 2 (line 1)", "in the function f (line 1), which nothing calls"),
        ("add() { A+=($@); }\nif false; then add --lr 2; fi", "--lr 2 (line 2)", "if of line 2"),
        ("if false; then E='--lr 2'; fi", "--lr 2 (line 1)", "if of line 1"),
        ("if false; then python3 train.py --lr 2 $X; fi", "--lr 2 ${X} (line 1)", "if of line 1"),
        ("python3 train.py --lr 2 --seed 3", "--lr 2 (line 1)", "at the launch of line 1, which is not the last"),
    ],
)
def test_a_flag_in_what_is_not_followed_has_a_line(imported, text, flag, where):
    found = imported(f"A=()\n{text}\npython3 train.py --seed 3 ${{A[@]}}".replace("A=()\n", "A=(); ", 1))
    lines = found.groups["not followed"]
    (place,) = [i for i, line in enumerate(lines) if flag in line]
    assert where in lines[place + 1]
    assert lines[place + 1].endswith("not imported.")


def test_a_key_in_a_branch_that_is_not_followed_is_not_printed(imported):
    found = imported(
        "if false; then A=(--wandb-key verysecret); B='--wandb-key verysecret'; fi\npython3 train.py --lr 1"
    )
    assert "--wandb-key ... (line 1)" in found.out
    assert "verysecret" not in found.out


@pytest.mark.parametrize(
    "launch",
    [
        'bash -c "python3 train.py --lr $LR"',
        "srun -N 2 bash -lc 'cd /x && python3 train.py --lr 0.5'",
        "ray job submit --address http://x -- bash -lc 'python3 train.py --lr 0.5'",
        'ssh node "x" ; docker run x /bin/sh -c "exec python3 train.py --lr 0.5 2>&1"',
    ],
)
def test_a_launch_in_the_words_of_another_shell_is_read(imported, launch):
    assert imported(f"LR=0.5\n{launch}").config().trainer.lr == 0.5


def test_the_last_round_of_a_loop_is_read_and_the_others_are_named(imported):
    found = imported("for LR in 1e-5 2e-5; do python3 train.py --lr $LR --seed 1; done")
    assert found.config().trainer.lr == 2e-5
    assert "--lr 1e-5 (line 1)" in found.groups["not followed"]


def test_an_element_of_an_array_that_cannot_be_told_is_named(imported):
    found = imported("A=(--lr 1)\nA[$X]=2\npython3 train.py ${A[@]}")
    assert "A[${X}]=2 (line 2) is not read" in "\n".join(found.groups["in the script"])


def test_words_that_nobody_knows_may_hold_flags_and_are_said_to(imported):
    found = imported("python3 train.py --lr 0.5 $MORE")
    assert found.config().trainer.lr == 0.5
    assert "flags in it are not seen" in found.reason("${MORE}")


@pytest.mark.parametrize(
    "flags, name",
    [
        ("", "grpo"),
        ("--advantage-estimator cispo", "cispo"),
    ],
)
def test_the_first_line_says_what_the_script_is(imported, flags, name):
    found = imported(f"\npython3 train.py --lr 1 {flags}")
    assert found.out.splitlines()[0] == f"run.sh is reinforcement learning with {name} (train.py, line 2)."


def test_a_script_of_fine_tuning_is_said_to_be_one(imported):
    found = imported("python3 train_async.py --hf-checkpoint /m --prompt-data /d.parquet --loss-type sft_loss")
    assert found.out.splitlines()[0] == "run.sh is fine-tuning on demonstrations (train_async.py, line 1)."


def test_an_array_that_is_not_given_to_the_launch_is_named(imported):
    found = imported("A=(--lr 1)\nB=(--eps-clip 0.5)\npython3 train.py ${A[@]}")
    assert (
        "B (line 2) is not given to the launch, so these are left out: --eps-clip 0.5." in found.groups["in the script"]
    )


@pytest.mark.parametrize(
    "text, note",
    [
        ("source /nowhere/m.sh\npython3 train.py --lr 1", "there is no such file"),
        ('source "$X/m.sh"\npython3 train.py --lr 1', "$X is not set in the script"),
        ("source run.sh\npython3 train.py --lr 1", ""),
        ("python3 train.py --lr 1 ${NO[@]}", "NO (line 1): strop does not know what is in there"),
        ('python3 train.py --lr 1 "$@"', "the script's own arguments"),
        (
            "if x; then A=(--lr 1); else A=(--lr 2); fi\npython3 train.py ${A[@]}",
            "A (line 1) is set inside a condition that strop cannot know; strop follows the first branch that may run.",
        ),
        ("A=()\n[ -n $Y ] && A+=(--lr 1)\npython3 train.py ${A[@]}", "A (line 2) is set inside a condition"),
        ("A=()\nfor x in $Y; do A+=(--lr 1); done\npython3 train.py ${A[@]}", "A (line 2) is set inside a loop"),
        (
            "A=(--seed 1)\nA=(--lr 1)\npython3 train.py ${A[@]}",
            "A is set anew in line 2, so these are left out: --seed 1.",
        ),
        (
            "A='--seed 1'\npython3 train.py --lr 1",
            "A (line 1) is not given to the launch, so these are left out: --seed 1.",
        ),
        ("python3 train.py --lr 1\npython3 train.py --lr 2", "line 1 launches train.py too"),
    ],
)
def test_what_reading_cannot_know_is_said(imported, text, note):
    assert note in "\n".join(imported(text).groups["in the script"] if note else [""])


@pytest.mark.parametrize(
    "text, line",
    [
        ("python3 train.py --lr 1 --lr 2", "--lr 1 (line 1)"),
        ("python3 train.py --lr 1 2", "2 (line 1)"),
        ("python3 train.py stray --lr 1", "stray"),
        ("python3 train.py --use-tis yes --lr 1", "yes (line 1)"),
    ],
)
def test_words_that_do_not_count_are_named(imported, text, line):
    assert line in imported(text).groups["no counterpart"]


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "has no command that runs a Python file with flags"),
        (b"# nothing\n", "has no command that runs a Python file with flags"),
        (b"echo hello\n", "has no command that runs a Python file with flags"),
        (b"\x7fELF\x00\x01\xff", "is not a shell script: it is not text in UTF-8."),
        (b"a\x00b", "is not a shell script: it is not text in UTF-8."),
        (b"A=(\n--lr '1\n)\npython3 train.py ${A[@]}", "run.sh, line 2: the quote ' is opened and never closed."),
        (b'\nX="abc\n', 'run.sh, line 2: the quote " is opened and never closed.'),
        (b"A=(--lr 1\npython3 train.py", "run.sh, line 1: the array A is opened and never closed."),
        (b"X=$(date\n", "run.sh, line 1: $( is opened and never closed."),
        (b"\n\nX=${Y\n", "run.sh, line 3: ${ is opened and never closed."),
        (b"if x; then\npython3 train.py --lr 1\n", "run.sh, line 1: if is opened and never closed."),
        (b"\nfor x in 1; do\npython3 train.py --lr 1\n", "run.sh, line 2: for is opened and never closed."),
        (b"f() {\npython3 train.py --lr 1\n", "run.sh, line 1: { is opened and never closed."),
        (b"case $X in\na) python3 train.py --lr 1\n", "run.sh, line 1: case is opened and never closed."),
        (b"cat <<END\nabc\n", "run.sh, line 1: the here-document END is opened and never closed."),
    ],
)
def test_a_script_that_cannot_be_read_is_one_clear_message(tmp_path, content, message):
    (tmp_path / "run.sh").write_bytes(content)
    done = strop("import-slime", tmp_path / "run.sh", "-o", tmp_path / "run.toml")
    assert done.code == 2
    assert message in done.err
    assert len(done.err.splitlines()) == 1
    assert not (tmp_path / "run.toml").exists()


@pytest.mark.parametrize(
    "name, message", [("no.sh", "there is no such script."), (".", "cannot be read: Is a directory.")]
)
def test_a_script_that_is_not_there_is_named(tmp_path, name, message):
    done = strop("import-slime", tmp_path / name, "-o", tmp_path / "run.toml")
    assert (done.code, done.out) == (2, "")
    assert message in done.err


def test_a_file_that_is_there_stays_unless_forced(tmp_path):
    (tmp_path / "run.sh").write_text("python3 train.py --lr 1e-5")
    (tmp_path / "run.toml").write_text("mine")
    refused = strop("import-slime", tmp_path / "run.sh", "-o", tmp_path / "run.toml")
    assert (refused.code, (tmp_path / "run.toml").read_text()) == (2, "mine")
    assert "run.toml is there already. Name another file with -o, or replace it with --force." in refused.err
    assert strop("import-slime", tmp_path / "run.sh", "-o", tmp_path / "run.toml", "--force").code == 0
    assert "lr = 1e-5" in (tmp_path / "run.toml").read_text() or "lr = 1e-05" in (tmp_path / "run.toml").read_text()


def test_without_a_name_the_config_is_called_as_the_script_is(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/run-small.sh").write_text("python3 train.py --lr 1e-5")
    done = strop_process("import-slime", "scripts/run-small.sh", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert (tmp_path / "run-small.toml").is_file()


def test_nothing_of_a_script_is_run(imported, tmp_path):
    imported(f"X=$(touch {tmp_path}/made)\n`touch {tmp_path}/made`\ntouch {tmp_path}/made\npython3 train.py --lr $X")
    assert not (tmp_path / "made").exists()


def test_a_script_is_read_without_importing_torch(tmp_path):
    (tmp_path / "run.sh").write_text("python3 train.py --lr 1e-5")
    code, heavy, _, err = watched("import-slime", tmp_path / "run.sh", "-o", tmp_path / "run.toml")
    assert (code, heavy, err) == (0, [], "")


# ---- trained --------------------------------------------------------------------------------------------------------

SMALL = """
SCRIPT_DIR="$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" &>/dev/null && pwd)"
STEPS=2
ARGS=(
   --hf-checkpoint {folder}/start
   --prompt-data {folder}/train.jsonl@[0:32]
   --input-key prompt
   --label-key label
   --rollout-shuffle
   --custom-rm-path "$SCRIPT_DIR/letters.py:score"
   --reward-key letters
   --save $SCRIPT_DIR/out
   --num-rollout $STEPS
   --rollout-batch-size 4
   --n-samples-per-prompt 4
   --global-batch-size 8
   --rollout-max-response-len 6
   --advantage-estimator cispo
   --eps-clip 1.0
   --eps-clip-high {high}
   --lr 0.05
   --letters-that-count abcd
)
python3 train.py "${{ARGS[@]}}" --tensor-model-parallel-size 2
"""

LETTERS = """
from slime.utils.types import Sample

async def score(args, sample: Sample, **kwargs):
    found = sum(letter in args.letters_that_count for letter in sample.response)
    return {"letters": found / 8 + 0.5 * (sample.status == Sample.Status.COMPLETED), "text": sample.response}
"""


def test_an_imported_script_trains_with_the_user_s_own_reward_function(small, tmp_path):
    (tmp_path / "letters.py").write_text(LETTERS)
    for high in ("4.0", "0.01"):
        (tmp_path / "run.sh").write_text(SMALL.format(folder=small.folder, high=high))
        imported = strop("import-slime", tmp_path / "run.sh", "-o", tmp_path / "run.toml", "--force")
        assert imported.code == 0, imported.err
        folder = tmp_path / f"out-{high}"
        done = strop("train", tmp_path / "run.toml", "--num-threads", "1", "--run.folder", folder)
        assert done.code == 0, done.err
    rows = metrics(tmp_path / "out-4.0")
    assert len(rows) == 2
    assert 0 < rows[0]["reward"] < 1.5
    assert rows[0]["grad_norm"] > 0
    # --eps-clip-high reaches the loss: a narrow bound gives other weights
    assert not same_weights(tmp_path / "out-4.0/model", tmp_path / "out-0.01/model")


# ---- slime's names on strop's own command line ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "estimator, kind",
    [
        ("grpo", "ppo_clip"),
        ("gspo", "gspo"),
        ("cispo", "cispo"),
        ("reinforce_plus_plus", "ppo_clip"),
        ("reinforce_plus_plus_baseline", "ppo_clip"),
        ("ppo", "ppo_clip"),
    ],
)
def test_slime_s_estimators_are_taken_on_strop_s_command_line(small, estimator, kind, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    flags = ("--advantage-estimator", estimator, "--eps-clip", "0.125", "--eps-clip-high", "4.0")
    done = strop("explain", small.train, *flags)
    assert done.code == 0, done.err
    rows = {line.split()[0]: line.split()[1] for line in done.out.splitlines() if line.startswith("algorithm.")}
    assert rows["algorithm.policy_loss.kind"] == kind
    assert (rows["algorithm.policy_loss.eps_clip"], rows["algorithm.policy_loss.eps_clip_high"]) == ("0.125", "4.0")


def test_canonical_cispo_is_taken_on_strop_s_command_line(small):
    done = strop(
        "explain", small.train, "--advantage-estimator", "cispo", "--eps-clip", "1.0", "--eps-clip-high", "4.0"
    )
    assert done.code == 0, done.err
    assert "clip(r_t, 0, 5)" in done.out
