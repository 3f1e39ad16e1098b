"""What may stand beside a teacher, what cannot act beside it, and what the printed objective says of it."""

import pytest

from strop.algorithms import objective_formula
from strop.config import TrainConfig, make_config
from strop.types import ConfigError

VALID = {"model": {"path": "m"}, "data": {"kind": "jsonl", "path": "d"}, "reward": {"kind": "exact"}}
TEACHER = {"distillation": {"teacher": "t"}}
ALONE = {"distillation": {"teacher": "t", "alone": True}}
SERVER = {"distillation": {"teacher": "http://host:8000"}}


def config(*tables, **more):
    return make_config(TrainConfig, VALID | {k: v for t in (*tables, more) for k, v in t.items()}, {}, file="x.toml")


def refusal(*tables, **more):
    with pytest.raises(ConfigError) as found:
        config(*tables, **more)
    return str(found.value)


@pytest.mark.parametrize("kind", ["gspo", "gmpo", "topr"])
def test_a_loss_of_whole_sequences_is_refused(kind):
    message = refusal(TEACHER, algorithm={"policy_loss": {"kind": kind}})
    assert message.startswith(f"algorithm.policy_loss.kind must not be {kind} with distillation.teacher, got {kind}: ")
    assert config(algorithm={"policy_loss": {"kind": kind}})


@pytest.mark.parametrize("kind", ["ppo_clip", "cispo", "gspo_token", "reinforce"])
@pytest.mark.parametrize("advantage", ["group", "rloo", "gdpo", "reinforce_plus_plus"])
def test_every_advantage_takes_a_teacher_beside_it(kind, advantage):
    assert config(TEACHER, algorithm={"policy_loss": {"kind": kind}, "advantage": {"kind": advantage}})


@pytest.mark.parametrize(
    "algorithm, path",
    [
        ({"advantage": {"kind": "rloo"}}, "algorithm.advantage.kind = rloo"),
        ({"advantage": {"kind": "group", "std_eps": 0.1}}, "algorithm.advantage.std_eps = 0.1"),
        ({"whiten_advantages": True}, "algorithm.whiten_advantages = True"),
    ],
)
def test_alone_what_makes_advantages_of_rewards_cannot_act(algorithm, path):
    assert refusal(ALONE, algorithm=algorithm).startswith(
        f"{path} cannot act with distillation.alone = true: advantages of rewards are not computed then."
    )
    assert config(TEACHER, algorithm=algorithm)


def test_alone_a_preset_brings_advantages_that_nobody_asked_for():
    assert config(ALONE, algorithm={"preset": "rloo"})


def test_alone_a_kl_in_the_reward_is_refused():
    kl = {"kl": {"coef": 0.1, "place": "reward"}, "advantage": {"kind": "group"}}
    assert "algorithm.kl.place must be loss with distillation.alone = true, got reward" in refusal(ALONE, algorithm=kl)


def test_alone_one_sample_a_prompt_is_enough():
    assert "rollout.group_size must be 2 or more" in refusal(TEACHER, rollout={"group_size": 1})
    assert config(ALONE, rollout={"group_size": 1})


def test_no_reward_is_taken_with_a_teacher_alone_only():
    none = {"reward": {"kind": "none"}}
    assert config(ALONE, none)
    for tables in ({}, TEACHER, {"distillation": {"alone": False}}):
        assert "reward.kind must not be none without distillation.alone = true" in refusal(none, tables)
    held_out = {"eval": {"data": {"kind": "jsonl", "path": "e"}}}
    assert "reward.kind must not be none with eval.data" in refusal(ALONE, none, held_out)


@pytest.mark.parametrize(
    "name, value", [("alone", True), ("teacher_coef", 2.0), ("teacher_gamma", 0.5), ("num_retries", 1)]
)
def test_without_a_teacher_nothing_of_it_can_act(name, value):
    message = refusal(distillation={name: value})
    assert message.startswith(f"distillation.{name} = {value} cannot act without distillation.teacher")


def test_options_of_a_server_and_of_a_folder_act_with_theirs_alone():
    for name, value in (("request_timeout_s", 5.0), ("num_retries", 1)):
        assert "is only used when a teacher is the address" in refusal(distillation={"teacher": "t", name: value})
        assert config(distillation=SERVER["distillation"] | {name: value})
    for name, value in (("teacher_dtype", "bfloat16"), ("teacher_device", "cpu")):
        assert "is only used when a teacher is a model folder" in refusal(
            distillation=SERVER["distillation"] | {name: value}
        )
        assert config(distillation={"teacher": "t", name: value})


@pytest.mark.parametrize("address", ["http://host:8000/v1", "https://", "http://host:port", "http://host:1?x=1"])
def test_an_address_is_host_and_port(address):
    assert "distillation.teacher must be http://host:port with a port up to 65535 and without a path, got " in refusal(
        distillation={"teacher": address}
    )


def test_an_empty_teacher_is_refused():
    message = refusal(distillation={"teachers": {"code": " "}})
    assert message.startswith("distillation.teachers.code must be a model folder, a name or http://host:port, got ' '")


def test_a_server_scores_at_temperature_1_alone():
    message = refusal(SERVER, rollout={"temperature": 0.7})
    assert message.startswith("rollout.temperature must be 1 with distillation.teacher = http://host:8000, got 0.7")
    assert config(TEACHER, rollout={"temperature": 0.7})


def test_old_logprobs_act_where_a_teacher_is_compared_with_them():
    options = {"policy_loss": {"kind": "reinforce"}, "old_logprobs": "rollout"}
    assert "algorithm.old_logprobs = rollout cannot act" in refusal(algorithm=options)
    assert config(TEACHER, algorithm=options)


def test_a_local_teacher_is_loaded_as_the_model_is_where_nothing_is_said():
    found = config(TEACHER, model={"path": "m", "dtype": "bfloat16"}).all_derived()
    assert found["distillation.teacher_dtype"].value == "bfloat16"
    assert found["distillation.teacher_device"].source == "model.device"
    assert "distillation.teacher_dtype" not in config(SERVER).all_derived()


@pytest.mark.parametrize(
    "options, line",
    [
        ({"teacher": "t"}, "A_t += 1 d_t, after all that makes A_t of rewards"),
        ({"teacher": "t", "alone": True, "teacher_coef": 2.0}, "A_t = 2 d_t; rewards are only measured"),
        ({"teacher": "t", "teacher_gamma": 0.9}, "A_t += 1 sum over s >= t of 0.9^(s - t) d_s, after"),
        ({"teachers": {"math": "m", "code": "c"}, "teacher": "t"}, "teachers: math: m, code: c, others: t"),
    ],
)
def test_the_printed_objective_shows_the_teacher_s_term(options, line):
    formula = objective_formula(config(distillation=options))
    assert line in formula
    assert ("mean_group" in formula) == (not options.get("alone"))
    assert "as in a group whose rewards are equal" not in formula


def test_without_a_teacher_the_printed_objective_says_nothing_of_one():
    assert "teacher" not in objective_formula(config())
