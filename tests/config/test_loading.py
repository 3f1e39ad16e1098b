"""From a TOML file and overrides to a config: what is refused, in which words, and what a loaded config remembers."""

import os
import re
import subprocess
import sys

import pytest
from pydantic import ValidationError

from strop.config import TrainConfig, load_config, make_config, tree
from strop.config.overrides import parse_flags
from strop.types import ConfigError

MINIMAL = """
[model]
path = "models/tiny"

[data]
kind = "jsonl"
path = "data/train.jsonl"

[reward]
kind = "exact"
"""


@pytest.fixture
def load(tmp_path):
    """Load MINIMAL and more TOML, with overrides as a dict or as command-line flags."""

    def call(more="", overrides=None, *, flags=(), text=MINIMAL, command="train"):
        path = tmp_path / "run.toml"
        path.write_text(text + more, encoding="utf-8")
        return load_config(path, overrides or parse_flags(TrainConfig, flags), command=command)

    return call


@pytest.fixture
def refusal(load):
    """The message of the ConfigError that loading ends in."""

    def call(*args, **kwargs):
        with pytest.raises(ConfigError) as caught:
            load(*args, **kwargs)
        return str(caught.value)

    return call


# ---- names ----------------------------------------------------------------------------------------------------------


def test_a_minimal_file_loads(load):
    config = load()
    assert config.model.path == "models/tiny"
    assert config.algorithm.policy_loss.kind == "ppo_clip"
    assert config.algorithm.policy_loss.eps_clip == 0.2


@pytest.mark.parametrize(
    "more, key, nearest",
    [
        ("[algorithm.policy_loss]\neps_clp = 0.3", "algorithm.policy_loss.eps_clp", "algorithm.policy_loss.eps_clip"),
        ("[run]\nnum_step = 3", "run.num_step", "run.num_steps"),
        ("[traner]\nlr = 0.1", "traner", "trainer"),
        # two tables have a temperature: the one meant is the one at hand
        ("[rollout]\ntemperatur = 1.0", "rollout.temperatur", "rollout.temperature"),
        ("[eval]\ntemperatur = 1.0", "eval.temperatur", "eval.temperature"),
        ("[algorithm.kll]\ncoef = 0.1", "algorithm.kll", "algorithm.kl"),
        # a hyphen for an underscore, in the key and in the name of a table
        ("[run]\nnum-steps = 3", "run.num-steps", "run.num_steps"),
        ("[algorithm.policy-loss]\nkind = 'cispo'", "algorithm.policy-loss", "algorithm.policy_loss"),
        # right name, wrong table
        ("[algorithm]\neps_clip = 0.2", "algorithm.eps_clip", "algorithm.policy_loss.eps_clip"),
        ("[trainer]\ngroup_size = 4", "trainer.group_size", "rollout.group_size"),
        ("[guards]\nlr = 4", "guards.lr", "trainer.lr"),
        ("[eval]\nnum_steps = 4", "eval.num_steps", "run.num_steps"),
    ],
)
def test_an_unknown_key_is_refused_with_the_right_one(refusal, more, key, nearest):
    message = refusal(more)
    assert message.count("\n") == 0
    assert message.startswith(f"{key} is not an option here.")
    assert re.search(rf"\b{re.escape(nearest)}[.\s]", message)


def test_an_unknown_key_at_the_top_is_refused(refusal):
    assert "learning_rate is not an option" in refusal(text="learning_rate = 1\n" + MINIMAL)


def test_an_option_of_another_kind_says_where_it_exists(refusal):
    message = refusal('[algorithm.policy_loss]\nkind = "cispo"\neps_clip_c = 3.0')
    assert message.startswith("algorithm.policy_loss.eps_clip_c is not an option here.")
    assert 'eps_clip_c belongs to kind = "ppo_clip"; cispo has no lower branch to cap.' in message


def test_an_option_of_another_kind_names_every_kind_that_has_it(refusal):
    message = refusal(text=MINIMAL.replace('kind = "exact"', 'kind = "exact"\ntolerance = 0.5'))
    assert 'tolerance belongs to kind = "number".' in message


def test_an_unknown_kind_is_refused_with_the_kinds_there_are(refusal):
    message = refusal(text=MINIMAL.replace("exact", "exakt"))
    assert message.startswith(
        "reward.kind must be one of exact, number, math, code, dataset, function, slime, none, got 'exakt'."
    )


@pytest.mark.parametrize("table", ["model", "data", "reward"])
def test_a_missing_table_is_refused(refusal, table):
    without = re.sub(rf"\[{table}\]\n(.+\n)+", "", MINIMAL)
    assert refusal(text=without).startswith(f"{table} must be given.")


def test_a_missing_option_is_refused(refusal):
    assert refusal(text=MINIMAL.replace('path = "models/tiny"', "")).startswith("model.path must be given.")


@pytest.mark.parametrize("value", ["3", '"exact"', "[]", "true"])
def test_a_value_where_a_table_belongs_is_refused(refusal, value):
    text = MINIMAL.replace('[reward]\nkind = "exact"', "")
    assert refusal(text=f"reward = {value}\n{text}").startswith("reward must be a table, got ")


def test_a_table_where_a_value_belongs_is_refused(refusal):
    assert refusal("[run.num_steps]\na = 1").startswith("run.num_steps must be ")


def test_a_value_where_a_table_belongs_is_refused_also_when_a_flag_sets_an_option_of_that_table(refusal):
    assert "algorithm must be a table, got 3" in refusal(
        text="algorithm = 3\n" + MINIMAL, flags=["--algorithm.kl.coef=0.1"]
    )


def test_all_problems_come_at_once(refusal):
    message = refusal(
        '[algorithm.policy_loss]\nkind = "cispo"\neps_clip_c = 3.0\n'
        "[rollout]\ngroup_size = 0\n[foo]\n[run]\nfolder = 3",
        {"no_such_option": 1, "path": "x"},
    )
    for key in (
        "algorithm.policy_loss.eps_clip_c",
        "rollout.group_size",
        "foo",
        "run.folder",
        "no_such_option",
        "--path",
    ):
        assert any(line.startswith(key) for line in message.splitlines()), key
    assert len(message.splitlines()) == 6


# ---- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more, key",
    [
        ("[rollout]\ngroup_size = 0", "rollout.group_size"),
        ("[rollout]\ngroup_size = 2.5", "rollout.group_size"),
        ("[trainer]\nlr = 0", "trainer.lr"),
        ("[trainer]\nlr = nan", "trainer.lr"),
        ("[trainer]\nbeta1 = 1.0", "trainer.beta1"),
        ('[model]\npath = "m"\ndtype = "float8"', "model.dtype"),
        ("[algorithm.policy_loss]\neps_clip_c = 1.0", "algorithm.policy_loss.eps_clip_c"),
        ("[algorithm.policy_loss]\neps_clip = -0.1", "algorithm.policy_loss.eps_clip"),
        ('[algorithm]\npreset = "gpro"', "algorithm.preset"),
        # true is no number: written for another option, it would pass as 1
        ("[trainer]\nlr = true", "trainer.lr"),
        ("[run]\nnum_steps = true", "run.num_steps"),
        # no number at all, and numbers that cannot be meant
        ("[algorithm]\nentropy_coef = nan", "algorithm.entropy_coef"),
        ("[algorithm]\nentropy_coef = inf", "algorithm.entropy_coef"),
        ("[algorithm.kl]\ncoef = inf", "algorithm.kl.coef"),
        ("[trainer]\nlr = inf", "trainer.lr"),
        ("[rollout]\ntemperature = inf", "rollout.temperature"),
        ("[rollout]\nstop_token_ids = [-5]", "rollout.stop_token_ids"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_its_key(refusal, more, key):
    text = MINIMAL.replace('[model]\npath = "models/tiny"', "") if "[model]" in more else MINIMAL
    message = refusal(more, text=text)
    assert message.startswith(key)
    assert " must be " in message


@pytest.mark.parametrize("seed", ["-1", "1180591620717411303424"])  # 2^70: torch takes 64 bits
def test_a_seed_that_torch_cannot_take_is_refused(refusal, seed):
    assert refusal(flags=["--seed", seed]).startswith("seed must be ")


@pytest.mark.parametrize(
    "more, flags",
    [
        (f"[rollout]\nstop_token_ids = [0x{'f' * 5000}]", []),
        ("", ["--stop-token-ids", f"[0x{'f' * 5000}]"]),
        ("", [f"--algorithm.kl={{coef = 0x{'f' * 5000}}}"]),
    ],
)
def test_a_number_too_long_to_print_is_refused_wherever_it_stands(refusal, more, flags):
    assert "must be a number of at most 64 bits, got one of 20000" in refusal(more, flags=flags)


def test_a_wrong_value_says_where_it_was_set(refusal):
    assert refusal("[rollout]\ngroup_size = 0").endswith("run.toml, line 12, column 1)")
    assert refusal(flags=["--group-size", "0"]).endswith("(command line)")


def test_none_is_written_as_a_word_and_only_where_none_may_be(load, refusal):
    config = load('[algorithm.policy_loss]\neps_clip_high = "none"\n[eval]\ndata = "none"')
    assert config.algorithm.policy_loss.eps_clip_high is None
    assert config.eval.data is None
    assert load(flags=["--eps-clip-c", "none"]).algorithm.policy_loss.eps_clip_c is None
    assert refusal(flags=["--eps-clip", "none"]).startswith("algorithm.policy_loss.eps_clip must be ")
    assert load(flags=["--model.path", "none"]).model.path == "none"  # a path may have that name


@pytest.mark.parametrize("flag", ["--max-grad-norm=inf", "--max-logprob-gap=inf"])
def test_inf_switches_off_a_limit(load, flag):
    config = load(flags=[flag])
    assert float("inf") in (config.trainer.max_grad_norm, config.guards.max_logprob_gap)


def test_bounds_of_the_logprob_gap_follow_the_dtype(load):
    assert load().max_logprob_gap == 0.001
    assert load(flags=["--dtype", "bfloat16"]).max_logprob_gap == 0.1
    assert load(flags=["--dtype", "bfloat16", "--max-logprob-gap", "0.5"]).max_logprob_gap == 0.5


# ---- rules across options -------------------------------------------------------------------------------------------


def test_updates_must_divide_the_prompts_of_a_step(refusal, load):
    message = refusal(flags=["--prompts-per-step", "6", "--updates-per-batch", "4"])
    assert message.startswith("algorithm.updates_per_batch must divide rollout.prompts_per_step, got 4 and 6.")
    assert message.endswith("it may be 1, 2, 3, 6. (command line)")
    assert load(flags=["--prompts-per-step", "6", "--updates-per-batch", "3"]).num_optimizer_steps == 300


GROUP_KINDS = ["group", "rloo", "opo", "maxrl", "gdpo", "reinforce_plus_plus_baseline"]


@pytest.mark.parametrize("kind", GROUP_KINDS)
def test_one_sample_per_prompt_is_refused_with_a_group_baseline(refusal, load, kind):
    flags = ["--group-size", "1", "--algorithm.advantage.kind"]
    assert refusal(flags=[*flags, kind]).startswith(
        f"rollout.group_size must be 2 or more with algorithm.advantage.kind = {kind}"
    )
    assert load(flags=[*flags, "reinforce_plus_plus"]).rollout.group_size == 1


# what is set, the option that is refused with its reason, and the value with which all of it is taken
IN_REWARD = {"kl.coef": 0.1, "kl.place": "reward"}
CONTRADICTIONS = [
    (IN_REWARD, "kl.place", "must be loss", "loss"),
    (IN_REWARD | {"kl.unbiased": True, "advantage.kind": "reinforce_plus_plus"}, "kl.unbiased", "must be false", False),
    ({"old_logprobs": "rollout", "correction.kind": "truncate"}, "correction.kind", "must be none", "none"),
    ({"old_logprobs": "rollout", "veto_ratio": 0.1}, "veto_ratio", "must be none", "none"),
    (
        {"correction.kind": "mask", "correction.min_ratio": 2.0, "correction.max_ratio": 1.0},
        "correction.min_ratio",
        "must be at most max_ratio, got 2 and 1",
        1.0,
    ),
    (
        {"policy_loss.kind": "clip_cov", "policy_loss.cov_low": 2.0, "policy_loss.cov_high": 1.0},
        "policy_loss.cov_low",
        "must be at most cov_high, got 2 and 1",
        1.0,
    ),
    (
        {"advantage.kind": "pass_at_k", "advantage.k": 8},
        "advantage.k",
        "must be below rollout.group_size, got 8 and 8",
        7,
    ),
    *(
        ({"whiten_advantages": True, "advantage.kind": kind}, "whiten_advantages", "must be false, got true", False)
        for kind in ("gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
    ),
]


@pytest.mark.parametrize("options, key, reason, right", CONTRADICTIONS)
def test_options_that_contradict_each_other_are_refused_until_one_is_mended(refusal, load, options, key, reason, right):
    def of_algorithm(table):
        return {f"algorithm.{name}": value for name, value in table.items()}

    message = refusal("[rollout]\ngroup_size = 8", of_algorithm(options))
    assert message.startswith(f"algorithm.{key} {reason}")
    assert message.count("\n") == 0
    load("[rollout]\ngroup_size = 8", of_algorithm(options | {key: right}))


def test_a_dual_clip_cap_inside_the_band_is_refused(refusal, load):
    flags = ["--updates-per-batch", "2", "--eps-clip-high", "0.5", "--eps-clip-c"]
    assert refusal(flags=[*flags, "1.5"]).startswith("algorithm.policy_loss.eps_clip_c must be above 1 + eps_clip_high")
    assert load(flags=[*flags, "1.6"]).algorithm.policy_loss.eps_clip_c == 1.6


def test_a_warm_up_longer_than_the_run_is_refused(refusal, load):
    assert refusal(flags=["--warmup-steps", "100"]).startswith("trainer.warmup_steps must be below the run's 100")
    assert load(flags=["--warmup-steps", "100", "--updates-per-batch", "2"]).num_optimizer_steps == 200


def test_the_scorer_of_a_dataset_needs_a_dataset_that_has_one(refusal):
    assert refusal(text=MINIMAL.replace("exact", "dataset")).startswith("reward.kind must not be dataset")


def test_an_evaluation_of_nothing_is_refused(refusal):
    text = MINIMAL + '[eval]\ngreedy = false\nnum_samples = 0\n[eval.data]\nkind = "jsonl"\npath = "x"\n'
    assert refusal(text=text).startswith("eval.num_samples must be above 0")


def test_a_huge_number_of_prompts_is_refused_at_once():
    # a prime: its divisors are looked for to the end
    program = (
        "from strop.config import TrainConfig, make_config\n"
        "tables = {'model': {'path': 'm'}, 'data': {'kind': 'jsonl', 'path': 'd'}, 'reward': {'kind': 'exact'}}\n"
        "make_config(TrainConfig, tables, {'prompts_per_step': 99991, 'updates_per_batch': 7}, file='f')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert "algorithm.updates_per_batch must divide rollout.prompts_per_step" in done.stderr


IDLE = [
    ('[algorithm.kl]\nkind = "k1"', "algorithm.kl.kind"),
    ("[algorithm.advantage]\nnormalize_std = false\nstd_eps = 0.1", "algorithm.advantage.std_eps"),
    ("[algorithm.policy_loss]\neps_clip = 0.3", "algorithm.policy_loss.eps_clip"),
    ("[algorithm.policy_loss]\neps_clip_high = 0.3", "algorithm.policy_loss.eps_clip_high"),
    ("[algorithm.policy_loss]\neps_clip_c = 3.0", "algorithm.policy_loss.eps_clip_c"),
    ('[algorithm.policy_loss]\nkind = "cispo"\neps_clip_high = 2.0', "algorithm.policy_loss.eps_clip_high"),
    ("[algorithm.kl]\nunbiased = true", "algorithm.kl.unbiased"),
    ("[algorithm.kl]\ntarget = 0.1", "algorithm.kl.target"),
    ("[algorithm.kl]\nrefresh_steps = 3", "algorithm.kl.refresh_steps"),
    ("[algorithm.kl]\ncoef = 0.1\nhorizon_steps = 3", "algorithm.kl.horizon_steps"),
    ("[algorithm]\nentropy_step = 0.1", "algorithm.entropy_step"),
    ("[algorithm]\nopsm_delta = 0.1", "algorithm.opsm_delta"),
    ('[algorithm]\nold_logprobs = "rollout"\n[algorithm.policy_loss]\nkind = "reinforce"', "algorithm.old_logprobs"),
    ("[eval]\nevery_steps = 5", "eval.every_steps"),
    ("[eval]\ngreedy = false", "eval.greedy"),
    ("[eval]\nnum_samples = 5", "eval.num_samples"),
    ("[eval]\ntemperature = 0.5", "eval.temperature"),
    ("[eval]\ntop_p = 0.5", "eval.top_p"),
    ("[eval]\ntop_k = 5", "eval.top_k"),
    ("[eval]\nmax_response_tokens = 5", "eval.max_response_tokens"),
    ('[eval]\nnum_samples = 0\ntop_k = 5\n[eval.data]\nkind = "jsonl"\npath = "x"', "eval.top_k"),
    ('[eval.data]\nkind = "jsonl"\npath = "x"\nshuffle = false', "eval.data.shuffle"),
    ("[run]\nkeep_checkpoints = 5", "run.keep_checkpoints"),
]


@pytest.mark.parametrize("more, key", IDLE)
def test_an_option_that_cannot_act_is_refused(refusal, more, key):
    message = refusal(more)
    assert message.startswith(f"{key} = ")
    assert message.count("\n") == 0


@pytest.mark.parametrize(
    "more, flags",
    [
        ('[algorithm.kl]\nkind = "k2"', ["--coef=0.1"]),
        ('[algorithm.kl]\nkind = "k1"', ["--coef=0.1", "--unbiased"]),
        ("[algorithm.advantage]\nnormalize_std = false\nstd_eps = 0.1", ["--normalize-std"]),
        ("[algorithm.policy_loss]\neps_clip = 0.3\neps_clip_high = 0.4\neps_clip_c = 3.0", ["--updates-per-batch=2"]),
        ("[run]\nkeep_checkpoints = 5", ["--checkpoint-every-steps=10"]),
        ("[eval]\ntop_k = 5", ["--eval.data.kind=jsonl", "--eval.data.path=x"]),
    ],
)
def test_the_same_option_is_taken_once_it_can_act(load, more, flags):
    load(more, flags=flags)


@pytest.mark.parametrize("kind, name", [("topr", "max_ratio"), ("dppo", "max_ratio"), ("aspo", "max_weight")])
def test_a_cap_below_1_cuts_ratios_of_1_and_is_taken_with_one_update(load, refusal, kind, name):
    table = f'[algorithm.policy_loss]\nkind = "{kind}"\n{name} = '
    assert getattr(load(table + "0.5").algorithm.policy_loss, name) == 0.5
    assert refusal(table + "1.5").startswith(f"algorithm.policy_loss.{name} = 1.5")


GAMMA = '[algorithm.advantage]\nkind = "reinforce_plus_plus"\ngamma = 0.9\n'
KL_IN_REWARD = '[algorithm.kl]\ncoef = 0.1\nplace = "reward"\n[algorithm.advantage]\nkind = "{}"\n'
VARYING = {
    "algorithm.advantage.gamma = 0.9": GAMMA,
    "algorithm.kl.place = reward": KL_IN_REWARD.format("reinforce_plus_plus"),
    "algorithm.kl.place = reward, baseline": KL_IN_REWARD.format("reinforce_plus_plus_baseline"),
}


@pytest.mark.parametrize("kind", ["gspo", "gmpo", "topr"])
@pytest.mark.parametrize("cause, tables", VARYING.items(), ids=VARYING)
def test_a_loss_of_whole_sequences_refuses_advantages_that_differ_within_one(refusal, kind, cause, tables):
    message = refusal(tables, flags=[f"--algorithm.policy_loss.kind={kind}"])
    cause = cause.removesuffix(", baseline")
    assert message.startswith(f"algorithm.policy_loss.kind must not be {kind} with {cause}, got {kind}: ")
    assert "Use gspo_token" in message
    assert message.count("\n") == 0


@pytest.mark.parametrize("kind", ["gspo_token", "ppo_clip", "reinforce"])
@pytest.mark.parametrize("tables", VARYING.values(), ids=VARYING)
def test_a_loss_of_tokens_takes_advantages_that_differ_within_a_sequence(load, kind, tables):
    load(tables, flags=[f"--algorithm.policy_loss.kind={kind}"])


@pytest.mark.parametrize("kind", ["gspo", "gmpo", "topr"])
def test_a_loss_of_whole_sequences_takes_advantages_that_are_one_per_sequence(load, kind):
    load('[algorithm.advantage]\nkind = "reinforce_plus_plus"', flags=[f"--algorithm.policy_loss.kind={kind}"])
    load("[algorithm.kl]\ncoef = 0.1", flags=[f"--algorithm.policy_loss.kind={kind}"])


def test_a_negative_entropy_weight_is_refused_with_a_target_and_taken_without(refusal, load):
    assert load("[algorithm]\nentropy_coef = -0.1").algorithm.entropy_coef == -0.1
    message = refusal("[algorithm]\nentropy_coef = -0.1\nentropy_target = 0.2")
    assert message.startswith("algorithm.entropy_coef must be >= 0 with algorithm.entropy_target, got -0.1")


def test_an_idle_option_at_its_default_is_no_mistake(load):
    load("[algorithm.advantage]\nnormalize_std = false\nstd_eps = 1e-6\n[algorithm.policy_loss]\neps_clip = 0.2")


def test_cispo_with_a_lower_bound_warns(load):
    def said(eps_clip):
        config = load(flags=["--preset=cispo", f"--eps-clip={eps_clip}", "--updates-per-batch=2"])
        return [(path, text) for path, table in tree.walk(config) for text in table.warnings()]

    [(path, text)] = said(0.2)
    assert path == "algorithm.policy_loss"
    assert "keeps a lower bound of 0.8" in text
    assert said(1.0) == []


def test_k1_in_the_loss_is_refused_with_the_reason(refusal):
    message = refusal('[algorithm.kl]\nkind = "k1"\ncoef = 0.1')
    assert message.startswith("algorithm.kl.kind must not be k1 in the loss, got k1: its expected gradient")
    assert "k2 or k3" in message
    assert message.count("\n") == 0


@pytest.mark.parametrize(
    "flags",
    [
        ["--unbiased"],  # its gradient is then that of the KL
        ["--place=reward", "--algorithm.advantage.kind=reinforce_plus_plus"],  # a reward has no gradient
    ],
)
def test_k1_is_taken_where_its_own_gradient_is_not_what_counts(load, flags):
    load('[algorithm.kl]\nkind = "k1"\ncoef = 0.1', flags=flags)


# ---- the file -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b'[model]\npath = "\xff\xfe"\n',
        b"seed = 1\nseed = 2\n",
        b"\x00",
        b"seed = " + b"1" * 5000,  # more digits than Python turns into a number
        b"seed = 0x" + b"f" * 5000,  # and one that it reads and cannot print
        b"seed = " + b"[" * 100_000,
    ],
    ids=["not utf-8", "twice", "nul", "5000 digits", "5000 hexadecimal digits", "100000 brackets"],
)
def test_an_unreadable_file_is_a_config_error_that_names_it(tmp_path, content):
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"broken\.toml"):
        load_config(path)


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.toml: there is no such config file"):
        load_config(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path))):
        load_config(tmp_path)


def test_a_byte_order_mark_is_no_part_of_the_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf" + MINIMAL.encode())
    assert load_config(str(path)).model.path == "models/tiny"


def test_the_run_folder_is_called_like_the_file(load, tmp_path):
    assert str(load().folder) == os.path.join("runs", "run")
    assert load(flags=["--run.folder", f"{tmp_path}/x"]).folder == tmp_path / "x"


# ---- a loaded config ------------------------------------------------------------------------------------------------


def test_a_config_cannot_be_changed(load):
    config = load()
    for table, name in ((config, "seed"), (config.algorithm.policy_loss, "eps_clip"), (config.run, "new_name")):
        with pytest.raises(ValidationError):
            setattr(table, name, 1)


def test_loading_one_config_leaves_no_trace_in_the_next(load):
    load(flags=["--preset=cispo", "--eps-clip-high=9", "--updates-per-batch=2"])
    assert load(flags=["--preset=cispo"]).algorithm.policy_loss.eps_clip_high == 4.0
    assert load().algorithm.policy_loss.kind == "ppo_clip"


def test_importing_the_config_needs_no_torch():
    for module in ("strop.config", "strop.config.load"):
        program = f"import sys, {module}; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "[]"


def test_values_that_were_handed_in_are_left_as_they_were():
    values = {"model": {"path": "m"}, "data": {"kind": "jsonl", "path": "d"}, "reward": {"kind": "exact"}}
    values["algorithm"] = {"preset": "cispo", "policy_loss": {"eps_clip_high": 3.0}, "updates_per_batch": 2}
    before = repr(values)
    make_config(TrainConfig, values, {"eps_clip": 0.5}, file="f")
    assert repr(values) == before
