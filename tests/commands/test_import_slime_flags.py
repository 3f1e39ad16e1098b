"""strop import-slime: what becomes of each flag of slime, and where its meaning differs from strop's."""

from functools import partial

import pytest
from commands.imported_scripts import LEAST, import_launch, import_text

from strop.compat.import_slime.targets import MAPPED
from strop.compat.import_slime.without import WITHOUT


@pytest.fixture
def imported(tmp_path):
    return partial(import_text, tmp_path)


@pytest.fixture
def launched(tmp_path):
    return partial(import_launch, tmp_path)


# ---- every flag -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", MAPPED)
@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus", "ppo"])
def test_every_mapped_flag_is_mapped_default_or_explained(flag, estimator, imported):
    flags = LEAST | {"--advantage-estimator": estimator} | {flag: LEAST.get(flag, "1")}
    found = imported(f"python3 train.py {' '.join(f'{name} {value}' for name, value in flags.items())}")
    assert found.config()
    for name in flags:
        assert found.explained(name), f"{name}:\n{found.out}"
    assert "not a flag of slime" not in found.out


@pytest.mark.parametrize("value", ["1", ""])
def test_every_flag_without_counterpart_has_a_reason(value, imported):
    launch = " ".join(f"{name} {value}" for name in WITHOUT)
    found = imported(f"python3 train.py {' '.join(f'{n} {v}' for n, v in LEAST.items())} {launch}")
    assert found.config()
    assert [flag for flag in WITHOUT if not found.explained(flag)] == []
    assert "not a flag of slime" not in found.out


@pytest.mark.parametrize("flag", MAPPED)
def test_a_mapped_flag_without_a_value_does_not_stop_the_import(flag, imported):
    flags = {name: value for name, value in LEAST.items() if name != flag}
    found = imported(f"python3 train.py {' '.join(f'{n} {v}' for n, v in flags.items())} {flag}")
    assert found.config()
    assert found.explained(flag), found.out


@pytest.mark.parametrize(
    "flag", ["--sglang-mem-fraction-static", "--wandb-project", "--use-wandb", "--moe-router-topk", "--tb-project-name"]
)
def test_families_of_flags_have_a_reason(flag, launched):
    assert "not a flag" not in launched(**{flag[2:]: "1"}).reason(flag)


@pytest.mark.parametrize(
    "flag, word",
    [
        ("--optimizer-cpu-offload", "moments"),
        ("--use-precision-aware-optimizer", "moments"),
        ("--overlap-cpu-optimizer-d2h-h2d", "moments"),
        ("--start-rollout-id", "--resume"),
        ("--use-slime-router", "engine.router"),
        ("--sglang-router-ip", "engine.router"),
        ("--sglang-mem-fraction-static", "engine.server_args"),
        ("--accumulate-allreduce-grads-in-fp32", "sums gradients"),
        ("--deterministic-mode", "bit for bit"),
        ("--use-fault-tolerance", "no health"),
        ("--lr-wsd-decay-style", "schedules"),
        ("--enable-mtp-training", "several tokens"),
        ("--loss-mask-type", "sampled"),
        ("--fp8-format", "8 bits"),
    ],
)
def test_a_reason_is_about_what_the_flag_does(launched, flag, word):
    assert word in launched(**{flag[2:]: "1"}).reason(flag)


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
        ("ppo", {"kind": "ppo_clip"}, {"kind": "gae", "whiten": False}),
    ],
)
def test_each_estimator_has_slime_s_bounds_and_its_advantage(launched, estimator, loss, advantage):
    """slime's default of 0.2 holds for all of them, strop's defaults are those of the papers."""
    found = launched(advantage_estimator=estimator, global_batch_size="8")
    assert found.values["algorithm"].get("policy_loss", {"kind": "ppo_clip"}) == loss
    assert found.values["algorithm"].get("advantage", {"kind": "group"}) == advantage


def test_ppo_s_critic_is_mapped_with_the_optimizer_that_it_shares_with_the_policy(launched):
    found = launched(
        advantage_estimator="ppo",
        lr="2e-6",
        lr_decay_style="cosine",
        weight_decay="0.2",
        num_rollout="50",
        gamma="0.99",
        lambd="0.95",
        normalize_advantages="",
        value_clip="0.5",
        critic_lr="5e-6",
        critic_lr_warmup_iters="3",
        num_critic_only_steps="4",
        critic_load="/models/critic",
        kl_coef="0.01",
    )
    config = found.config()
    assert found.values["algorithm"]["advantage"] == {
        "kind": "gae",
        "gamma": 0.99,
        "lam": 0.95,
    }  # whiten is true anyway
    assert config.algorithm.advantage.whiten
    critic = config.critic
    assert (critic.lr, critic.lr_schedule, critic.weight_decay, critic.beta2) == (5e-6, "cosine", 0.2, 0.999)
    assert (critic.warmup_steps, critic.only_first_steps, critic.eps_clip_value) == (3, 4, 0.5)
    assert critic.path == "/models/critic"
    assert (config.algorithm.kl.coef, config.algorithm.kl.place) == (0.01, "reward")
    assert "a Hugging Face folder" in found.out


def test_without_a_rate_of_its_own_slime_s_critic_has_the_policy_s(launched):
    assert launched(advantage_estimator="ppo", lr="3e-6").config().critic.lr == 3e-6


def test_flags_of_the_critic_are_said_to_be_idle_without_one(launched):
    found = launched(advantage_estimator="grpo", critic_lr="5e-6", lambd="0.9")
    assert "acts with --advantage-estimator ppo alone" in found.reason("--critic-lr")
    assert "acts with --advantage-estimator ppo alone" in found.reason("--lambd")


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
        launched(lr="fast").reason("--lr") == "trainer.lr must be a number, got 'fast'. "
        "So trainer.lr = 1e-06, strop's default, stands."
    )


def test_a_number_without_end_has_the_reason_of_its_option(launched):
    found = launched(rollout_batch_size="9" * 5000, global_batch_size="4")
    assert "rollout.prompts_per_step must be" in found.out
    assert "prompts_per_step" not in found.values.get("rollout", {})


def test_the_value_that_stands_for_a_refused_one_is_said_and_the_batch_is_counted_with_it(launched):
    """1 sample is refused, 8 stand: 4 x 8 sequences in updates of 16."""
    found = launched(n_samples_per_prompt="1", global_batch_size="16")
    reason = found.reason("--n-samples-per-prompt")
    assert "rollout.group_size must be 2 or more" in reason
    assert reason.endswith("So rollout.group_size = 8, strop's default, stands.")
    options = found.config()
    assert (options.rollout.group_size, options.algorithm.updates_per_batch) == (8, 2)
    assert "4 prompts x 8 samples in 2 updates" in found.out
    assert not any("updates_per_batch" in line for line in found.groups["at strop's default anyway"])


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
        ({"eval_prompt_data": "a /a.jsonl", "eval_interval": "5"}, ("/a.jsonl", False, 1, 1.0)),
        (
            {"eval_prompt_data": "/a.jsonl", "eval_interval": "5", "eval_temperature": "0.6"},
            ("/a.jsonl", False, 1, 0.6),
        ),
        (
            {"eval_prompt_data": "a /a.jsonl", "eval_interval": "5", "eval_temperature": "0", "eval_top_p": "0.7"},
            ("/a.jsonl", True, 0, 1.0),
        ),
    ],
)
def test_evaluation_answers_as_slime_does(launched, flags, shown):
    options = launched(**flags).config().eval
    assert (options.data.path, options.greedy, options.num_samples, options.temperature) == shown


def test_without_an_interval_nothing_is_evaluated_as_in_slime(launched):
    found = launched(eval_prompt_data="a /a.jsonl", n_samples_per_eval_prompt="4", eval_top_p="0.7")
    assert "eval" not in found.values
    for flag in ("--eval-prompt-data", "--n-samples-per-eval-prompt", "--eval-top-p"):
        assert "Add --eval-interval to the script" in found.reason(flag)


def test_each_set_of_held_out_prompts_keeps_its_name_and_its_columns(launched):
    names = "aime /a.jsonl math.500 /m.parquet@[0:100]"
    flags = {"eval_interval": "5", "eval_prompt_data": names}
    found = launched(**flags, eval_label_key="answer", n_samples_per_eval_prompt="16", eval_top_p="0.7")
    options = found.config().eval
    assert options.data is None
    assert {name: own.data.path for name, own in options.sets.items()} == {"aime": "/a.jsonl", "math-500": "/m.parquet"}
    assert [own.data.kind for own in options.sets.values()] == ["jsonl", "parquet"]
    assert [own.data.max_prompts for own in options.sets.values()] == [None, 100]
    assert {own.data.label_key for own in options.sets.values()} == {"answer"}
    assert (options.num_samples, options.top_p, options.greedy) == (16, 0.7, False)
    assert "[eval.sets.math-500.data]" in found.path.read_text()
    odd = launched(eval_interval="5", eval_prompt_data="a /a.jsonl b /b.jsonl c")
    assert list(odd.config().eval.sets) == ["a", "b"]
    assert "c is left out" in odd.out


def test_slime_s_evaluation_before_training_can_be_skipped(launched):
    flags = {"eval_prompt_data": "a /a.jsonl", "eval_interval": "5"}
    assert launched(**flags).config().eval.at_start
    assert not launched(**flags, skip_eval_before_train="").config().eval.at_start


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


# ---- dynamic sampling -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", ["slime", "miles"])
def test_slime_s_own_dynamic_filter_is_strop_s(launched, package):
    path = f"{package}.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    found = launched(dynamic_sampling_filter_path=path, over_sampling_batch_size="8")
    assert found.values["filter"] == {"equal_rewards": True}
    assert found.values["rollout"]["prompts_per_round"] == 8
    assert found.explained("--dynamic-sampling-filter-path")
    assert found.explained("--over-sampling-batch-size")


def test_a_dynamic_filter_of_the_user_s_runs_as_slime_s_with_all_flags_to_read(launched):
    found = launched(dynamic_sampling_filter_path="my.filters.keep")
    table = dict(found.values["filter"])
    assert table.pop("group_args")["rollout_batch_size"] == 4
    assert table == {"group": "my.filters:keep", "group_kind": "slime"}


def test_over_sampling_without_a_filter_has_strop_s_reason(launched):
    assert "is only used with a filter" in launched(over_sampling_batch_size="8").reason("--over-sampling-batch-size")


@pytest.mark.parametrize(
    "flag, reason",
    [
        ("rollout_sample_filter_path", "filter.rollout sees one rollout at a time"),
        ("buffer_filter_path", "there is no buffer to choose from"),
        ("rollout_all_samples_process_path", "there is no hook for the others"),
    ],
)
def test_hooks_of_slime_s_that_have_no_counterpart_say_why(launched, flag, reason):
    assert reason in launched(**{flag: "my.f"}).reason(f"--{flag.replace('_', '-')}")


def test_servers_that_are_there_already_are_those_of_the_engine_sglang(launched):
    found = launched(rollout_external="", rollout_external_engine_addrs="10.0.0.2:30000 http://10.0.0.3:30000")
    addresses = ["http://10.0.0.2:30000", "http://10.0.0.3:30000"]
    assert found.values["engine"] == {"kind": "sglang", "addresses": addresses}
    assert found.config().engine.deterministic
    assert "start them with --enable-deterministic-inference" in found.out


@pytest.mark.parametrize("flags", [{"rollout_external": ""}, {"rollout_external_engine_addrs": "somewhere:0"}])
def test_servers_without_an_address_leave_the_engine_torch(launched, flags):
    found = launched(**flags)
    assert found.config().engine.kind == "torch"
    assert "names no servers as host:port" in found.reason(f"--{next(iter(flags)).replace('_', '-')}")


def test_a_launch_that_samples_a_batch_ahead_does_so_here(tmp_path):
    flags = " ".join(f"{flag} {value}" for flag, value in LEAST.items())
    found = import_text(tmp_path, f"python3 train_async.py {flags} --num-steps-per-rollout 2\n")
    config = found.config()
    assert (config.rollout.max_off_policy_steps, config.algorithm.updates_per_batch) == (2, 2)
    assert config.algorithm.old_logprobs == "rollout"
    assert any("train_async.py samples a batch ahead" in line for line in found.groups["maps"])
    assert import_text(tmp_path, f"python3 train.py {flags}\n").config().rollout.max_off_policy_steps == 0
