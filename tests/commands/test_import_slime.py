"""strop import-slime: launch scripts in the style of slime's examples become configs, and every flag has its line."""

import re
import tomllib

import pytest
from commands.small_runs import metrics, same_weights, small_once, strop, strop_process
from commands.test_help import watched

from strop.compat.import_slime import KNOWN
from strop.config import load_config

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

# What a launch cannot do without, in one line.
LEAST = {
    "--hf-checkpoint": "/m",
    "--prompt-data": "/d.jsonl",
    "--rm-type": "math",
    "--num-rollout": "10",
    "--rollout-batch-size": "4",
    "--n-samples-per-prompt": "4",
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


class Written:
    """What the command printed, group by group, and the config that it wrote."""

    def __init__(self, done, path):
        assert done.code == 0, done.err
        self.out, self.path = done.out, path
        self.values = tomllib.loads(path.read_text())
        self.groups, title = {}, ""
        for line in done.out.splitlines():
            if line.startswith(" "):
                self.groups[title].append(line.strip())
            else:
                title = line.rpartition(":")[0]
                self.groups.setdefault(title, [])

    def config(self):
        return load_config(self.path)

    def explained(self, flag):
        """Whether a flag stands in one of the groups, and not only in the words about another."""
        lines = (line for line in self.out.splitlines() if line.startswith("  -"))
        return any(flag in re.split(r"  (?:->|\()", line)[0].replace(",", " ").split() for line in lines)

    def reason(self, flag):
        """The line below a flag without counterpart."""
        lines = self.groups["no counterpart"]
        (place,) = [i for i, line in enumerate(lines) if flag in line.replace(",", "").split()]
        return lines[place + 1]


@pytest.fixture
def imported(tmp_path):
    """Imports a script, given as text."""

    def run(text, *more):
        script, config = tmp_path / "run.sh", tmp_path / "run.toml"
        script.write_text(text)
        return Written(strop("import-slime", script, "-o", config, "--force", *more), config)

    return run


@pytest.fixture
def launched(imported):
    """Imports a launch of a few flags on top of what every launch has; None takes a flag away."""

    def run(**flags):
        flags = LEAST | {f"--{name.replace('_', '-')}": value for name, value in flags.items()}
        words = (f"{name} {value}" for name, value in flags.items() if value is not None)
        return imported(f"python3 train.py {' '.join(words)}\n")

    return run


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
    assert "no tensor, pipeline" in example.reason("--sequence-parallel")
    assert "config.json" in example.reason("--rotary-base")
    assert "rotary-base 1000000" in example.out  # the default of ${BASE:-1000000}


def test_the_count_beside_a_group_is_that_of_its_lines(example):
    for title in ("maps", "at strop's default anyway"):
        assert f"{title}: {len(example.groups[title])}\n" in example.out


# ---- every flag -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", KNOWN)
@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus", "ppo"])
def test_every_known_flag_is_mapped_default_or_explained(flag, estimator, tmp_path, imported):
    flags = LEAST | {"--advantage-estimator": estimator} | {flag: LEAST.get(flag, "1")}
    found = imported(f"python3 train.py {' '.join(f'{name} {value}' for name, value in flags.items())}")
    assert found.config()
    for name in flags:
        assert found.explained(name), f"{name}:\n{found.out}"
    assert "not a flag of slime" not in found.out


@pytest.mark.parametrize("flag", KNOWN)
def test_a_known_flag_without_a_value_does_not_stop_the_import(flag, imported):
    flags = {name: value for name, value in LEAST.items() if name != flag}
    found = imported(f"python3 train.py {' '.join(f'{n} {v}' for n, v in flags.items())} {flag}")
    assert found.config()
    assert found.explained(flag), found.out


@pytest.mark.parametrize(
    "flag", ["--sglang-mem-fraction-static", "--wandb-project", "--use-wandb", "--moe-router-topk", "--tb-project-name"]
)
def test_families_of_flags_have_a_reason(flag, launched):
    assert "not a flag" not in launched(**{flag[2:]: "1"}).reason(flag)


def test_an_unknown_flag_is_said_to_be_one(launched):
    assert launched(made_up="3").reason("--made-up") == "not a flag of slime that strop knows."


def test_a_key_of_wandb_is_neither_printed_nor_written(launched, tmp_path):
    found = launched(wandb_key="verysecret", custom_rm_path="a.b")
    assert "--wandb-key ..." in found.out
    assert "verysecret" not in found.out + found.path.read_text()


# ---- what differs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "estimator, loss, advantage",
    [
        ("grpo", {"kind": "ppo_clip"}, {"kind": "group"}),
        ("gspo", {"kind": "gspo", "eps_clip": 0.2, "eps_clip_high": 0.2}, {"kind": "group"}),
        ("cispo", {"kind": "cispo", "eps_clip": 0.2, "eps_clip_high": 0.2}, {"kind": "group"}),
        ("reinforce_plus_plus", {"kind": "ppo_clip"}, {"kind": "reinforce_plus_plus"}),
        ("reinforce_plus_plus_baseline", {"kind": "ppo_clip"}, {"kind": "reinforce_plus_plus_baseline"}),
        ("ppo", {"kind": "ppo_clip"}, {"kind": "group"}),
    ],
)
def test_each_estimator_has_slime_s_bounds_and_its_advantage(launched, estimator, loss, advantage):
    """slime's default of 0.2 holds for all of them, strop's defaults are those of the papers."""
    found = launched(advantage_estimator=estimator, global_batch_size="8")
    assert found.values["algorithm"].get("policy_loss", {"kind": "ppo_clip"}) == loss
    assert found.values["algorithm"].get("advantage", {"kind": "group"}) == advantage
    if estimator == "ppo":
        assert "no critic" in found.reason("--advantage-estimator")


def test_canonical_cispo_is_mapped_in_full(launched):
    found = launched(advantage_estimator="cispo", eps_clip="1.0", eps_clip_high="4.0", global_batch_size="8")
    loss = found.config().algorithm.policy_loss
    assert (loss.kind, loss.eps_clip, loss.eps_clip_high) == ("cispo", 1.0, 4.0)


def test_a_bound_that_strop_refuses_has_strop_s_reason_and_the_config_loads(launched):
    found = launched(eps_clip="0.3")
    assert "algorithm.policy_loss.eps_clip = 0.3" in found.reason("--eps-clip")
    assert "eps_clip" not in found.values["algorithm"].get("policy_loss", {})
    assert found.config().algorithm.updates_per_batch == 1


def test_a_cap_of_dual_clip_is_refused_where_the_loss_has_none(launched):
    found = launched(advantage_estimator="cispo", eps_clip_c="3", global_batch_size="8")
    assert 'eps_clip_c belongs to kind = "ppo_clip"' in found.reason("--eps-clip-c")


def test_a_number_that_is_none_has_the_reason_of_its_option(launched):
    assert (
        launched(lr="fast").reason("--lr")
        == "trainer.lr must be a valid number, unable to parse string as a number, got 'fast'."
    )


@pytest.mark.parametrize("given, reduction", [({}, "sequence_mean"), ({"calculate_per_token_loss": ""}, "token_mean")])
def test_the_loss_is_averaged_per_sequence_unless_the_flag_says_otherwise(launched, given, reduction):
    assert launched(**given).config().algorithm.reduction == reduction


@pytest.mark.parametrize(
    "flags, updates",
    [
        ({"global_batch_size": "16"}, 1),
        ({"global_batch_size": "4"}, 4),
        ({"num_steps_per_rollout": "2"}, 2),
        ({"num_steps_per_rollout": "2", "global_batch_size": "8"}, 2),
        ({}, 1),
    ],
)
def test_updates_of_a_batch_are_its_sequences_over_the_global_batch(launched, flags, updates):
    assert launched(**flags).config().algorithm.updates_per_batch == updates


@pytest.mark.parametrize(
    "flags, reason",
    [
        ({"global_batch_size": "5"}, "does not divide the 4 x 4 sequences"),
        ({"global_batch_size": "2"}, "must divide rollout.prompts_per_step, got 8 and 4"),
    ],
)
def test_a_batch_that_cannot_be_cut_so_is_explained(launched, flags, reason):
    assert reason in launched(**flags).reason("--global-batch-size")


@pytest.mark.parametrize(
    "flags, kl",
    [
        ({"use_kl_loss": "", "kl_loss_coef": "0.1", "kl_loss_type": "low_var_kl"}, {"coef": 0.1}),
        ({"use_kl_loss": "", "kl_loss_coef": "0.1", "kl_loss_type": "k2"}, {"coef": 0.1, "kind": "k2"}),
        ({"use_kl_loss": "", "kl_loss_coef": "0.1", "kl_loss_type": "k1"}, {"coef": 0.1}),
        (
            {"use_kl_loss": "", "kl_loss_coef": "0.1", "kl_loss_type": "k1", "use_unbiased_kl": ""},
            {"coef": 0.1, "kind": "k1", "unbiased": True},
        ),
        (
            {"advantage_estimator": "reinforce_plus_plus", "kl_coef": "0.01", "ref_update_interval": "3"},
            {"coef": 0.01, "kind": "k1", "place": "reward", "refresh_steps": 3},
        ),
        ({"kl_coef": "0.01"}, None),
        ({"kl_loss_coef": "0.1", "kl_loss_type": "k2"}, None),
        ({"use_kl_loss": "", "kl_loss_coef": "0.00", "kl_loss_type": "low_var_kl"}, None),
    ],
)
def test_the_kl_is_where_slime_has_it(launched, flags, kl):
    assert launched(**flags).values["algorithm"].get("kl") == kl


def test_k1_in_the_loss_without_a_type_of_its_own_is_strop_s_k3_with_the_reason(launched):
    """slime's default type is k1, whose gradient in a loss is noise."""
    found = launched(use_kl_loss="", kl_loss_coef="0.1")
    assert found.config().algorithm.kl.kind == "k3"
    assert "algorithm.kl.kind must not be k1 in the loss" in found.out


def test_a_kl_coefficient_that_slime_does_not_read_is_said_to_be_one(launched):
    assert "slime's grpo does not read it" in launched(kl_coef="0.01").reason("--kl-coef")


@pytest.mark.parametrize(
    "flags, correction",
    [
        ({"use_tis": ""}, {"kind": "truncate"}),
        (
            {"use_tis": "", "tis_clip": "3", "tis_clip_low": "0.5"},
            {"kind": "truncate", "max_ratio": 3.0, "min_ratio": 0.5},
        ),
        ({"tis_clip": "3"}, None),
    ],
)
def test_tis_is_a_truncated_correction(launched, flags, correction):
    assert launched(**flags).values["algorithm"].get("correction") == correction


def test_opsm_and_the_sampler_s_log_probabilities_are_mapped(launched):
    options = (
        launched(use_opsm="", opsm_delta="0.01", use_rollout_logprobs="", global_batch_size="8").config().algorithm
    )
    assert (options.opsm_delta, options.old_logprobs) == (0.01, "rollout")
    assert launched(use_opsm="", global_batch_size="8").config().algorithm.opsm_delta == 1e-4


def test_what_the_script_leaves_to_megatron_s_defaults_is_written_where_strop_s_differ(launched):
    options = launched().config()
    assert (options.trainer.lr_schedule, options.trainer.beta2, options.trainer.weight_decay) == ("linear", 0.999, 0.01)
    assert (options.data.prompt_key, options.data.chat, options.data.shuffle, options.seed) == (
        "input",
        "never",
        False,
        42,
    )


@pytest.mark.parametrize(
    "flags, steps",
    [
        ({"lr_warmup_iters": "3"}, 3),
        ({"lr_warmup_fraction": "0.1"}, 1),
        ({"lr_warmup_fraction": "0.1", "global_batch_size": "4"}, 4),
        ({"lr_warmup_iters": "10"}, 0),
        ({"lr_warmup_fraction": "0.1", "num_rollout": None}, 0),
    ],
)
def test_warm_up_counts_optimizer_steps(launched, flags, steps):
    found = launched(**flags)
    assert found.config().trainer.warmup_steps == steps
    assert steps or found.reason(f"--{next(iter(flags)).replace('_', '-')}")


def test_a_gradient_that_is_never_clipped_has_norm_inf(launched):
    assert launched(clip_grad="0.0").config().trainer.max_grad_norm == float("inf")


def test_stop_ids_are_a_list(launched):
    assert launched(rollout_stop_token_ids="3 4").config().rollout.stop_token_ids == (3, 4)


def test_rows_that_strop_cannot_select_are_said(launched):
    found = launched(prompt_data="/d.parquet@[10:20]")
    assert (found.config().data.kind, found.config().data.max_prompts) == ("parquet", None)
    assert "takes the first rows alone" in found.out


@pytest.mark.parametrize(
    "flags, shown",
    [
        ({"eval_prompt_data": "a /a.jsonl b /b.jsonl", "eval_interval": "5"}, ("/a.jsonl", False, 1, 1.0)),
        ({"eval_prompt_data": "/a.jsonl", "eval_temperature": "0.6"}, ("/a.jsonl", False, 1, 0.6)),
        ({"eval_prompt_data": "a /a.jsonl", "eval_temperature": "0", "eval_top_p": "0.7"}, ("/a.jsonl", True, 0, 1.0)),
    ],
)
def test_evaluation_answers_as_slime_does(launched, flags, shown):
    options = launched(**flags).config().eval
    assert (options.data.path, options.greedy, options.num_samples, options.temperature) == shown


def test_options_of_an_evaluation_without_data_have_strop_s_reason(launched):
    assert "cannot act without eval.data" in launched(eval_interval="5").reason("--eval-interval")


@pytest.mark.parametrize("kind", ["gpqa", "remote_rm", "ifbench"])
def test_a_scorer_that_strop_has_not_leaves_a_place_for_the_user_s_own(launched, kind):
    found = launched(rm_type=kind, rm_url="http://x")
    assert found.values["reward"] == {"kind": "slime", "function": "my_reward.py:score"}
    assert kind in found.reason("--rm-type")


def test_a_script_without_model_or_data_names_what_to_fill_in(imported):
    found = imported("python3 train.py --lr 1e-6")
    assert found.config().model.path == "model"
    assert "the script has no --hf-checkpoint: put your model's folder there." in found.groups["no counterpart"]
    assert "the script has no --prompt-data: put your file there." in found.groups["no counterpart"]


def test_a_function_gets_the_flags_as_attributes(launched):
    found = launched(custom_rm_path="my.rewards.score", group_rm="", reward_key="acc", eps_clip="0.2", rm_type=None)
    reward = found.config().reward
    assert (reward.kind, reward.function, reward.batched, reward.reward_key) == (
        "slime",
        "my.rewards:score",
        True,
        "acc",
    )
    wanted = {"num_rollout": 10, "eps_clip": 0.2, "group_rm": True, "custom_rm_path": "my.rewards.score"}
    assert {name: reward.args[name] for name in wanted} == wanted


# ---- scripts that are not as they should be -------------------------------------------------------------------------


def test_a_variable_that_only_the_shell_knows_is_named(launched):
    found = launched(hf_checkpoint="$HOME_OF_MODELS/x", lr="$RATE")
    assert found.values["model"]["path"] == "${HOME_OF_MODELS}/x"
    assert "$HOME_OF_MODELS is not set in the script" in found.out
    assert "$RATE is not set in the script" in found.out


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
            "A (line 1) is set inside a condition",
        ),
        ("A=()\n[ -n $Y ] && A+=(--lr 1)\npython3 train.py ${A[@]}", "A (line 2) is set inside a condition"),
        ("python3 train.py --lr 1\npython3 train.py --lr 2", "line 2 launches train.py too"),
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


def test_the_estimator_that_needs_a_critic_is_refused_with_those_there_are(small):
    done = strop("explain", small.train, "--advantage-estimator", "ppo")
    assert done.code == 2
    assert "algorithm.preset must be one of grpo, " in done.err
