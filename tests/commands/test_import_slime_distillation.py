"""strop import-slime: on-policy distillation."""

from functools import partial

import pytest
from commands.imported_scripts import import_launch

TEACHER_REWARD = "slime.rollout.on_policy_distillation.reward_func"
EVAL = {"eval_prompt_data": "held /e.jsonl"}


@pytest.fixture
def launched(tmp_path):
    return partial(import_launch, tmp_path)


def test_a_teacher_of_megatron_s_is_a_folder_beside_the_rewards(launched):
    found = launched(use_opd="", opd_type="megatron", opd_teacher_load="/t", opd_kl_coef="0.5")
    assert found.values["distillation"] == {"teacher": "/t", "teacher_coef": 0.5}
    assert found.values["reward"] == {"kind": "math"}
    assert found.config().distillation.alone is False
    line = next(line for line in found.groups["maps"] if "distillation.teacher " in line)
    assert "--use-opd, --opd-type megatron, --opd-teacher-load /t" in line
    assert "must be a Hugging Face one" in line


def test_a_teacher_behind_an_address_whose_function_is_the_reward_is_listened_to_alone(launched):
    flags = {"use_opd": "", "opd_type": "sglang", "rm_url": "http://10.0.0.7:30000/generate", "opd_kl_coef": "1.0"}
    found = launched(**flags, custom_rm_path=TEACHER_REWARD, rm_type=None)
    assert found.values["distillation"] == {"teacher": "http://10.0.0.7:30000", "alone": True}
    assert found.values["reward"] == {"kind": "none"}
    assert found.config().distillation.addresses == ["http://10.0.0.7:30000"]
    assert "a vLLM server must answer there" in found.out


def test_evaluations_beside_it_need_a_scorer(launched):
    flags = {"use_opd": "", "opd_type": "sglang", "rm_url": "http://h:1/generate", "rm_type": None}
    found = launched(**flags, **EVAL, custom_rm_path=TEACHER_REWARD)
    assert found.config().reward.function == "my_reward.py:score"
    assert found.config().distillation.alone
    assert "evaluations need a scorer" in found.out


@pytest.mark.parametrize(
    "flags, flag, reason",
    [
        ({"opd_kl_coef": "1"}, "--opd-kl-coef", "acts with --use-opd alone, in slime too."),
        ({"use_opd": ""}, "--use-opd", "needs --opd-type sglang or megatron, in slime too."),
        ({"use_opd": "", "opd_type": "megatron"}, "--use-opd", "needs --opd-teacher-load, in slime too."),
        ({"use_opd": "", "opd_type": "self"}, "--opd-type", "strop has no teacher that is shown the solution (OPSD)."),
    ],
)
def test_what_has_no_counterpart_has_a_reason(launched, flags, flag, reason):
    found = launched(**flags)
    assert any(reason in line for line in found.groups["no counterpart"])
    assert found.explained(flag)
    assert "distillation" not in found.values


def test_a_server_refuses_another_temperature_and_says_so(launched):
    flags = {"use_opd": "", "opd_type": "sglang", "rm_url": "http://h:1/generate", "rollout_temperature": "0.7"}
    assert "rollout.temperature must be 1" in launched(**flags).reason("--rollout-temperature")
