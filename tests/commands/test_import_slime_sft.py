"""strop import-slime on launches that fine-tune: a config of strop sft, and a line for every flag."""

import re

import pytest
from commands.imported_scripts import import_text
from commands.small_runs import strop

from strop.compat.import_slime import KNOWN
from strop.config import load_config

LEAST = """--hf-checkpoint /m --prompt-data /d.parquet --input-key messages --loss-type sft_loss --num-epoch 3
    --rollout-batch-size 128 --global-batch-size 128"""

# As scripts/run-qwen3-4B-base-sft.sh of slime.
LAUNCH = """
CKPT_ARGS=(--hf-checkpoint /root/Qwen3-4B-Base/ --load /root/Qwen3-4B-Base_slime/ --save /root/out/ --save-interval 1000)
SFT_ARGS=(
   --rollout-function-path slime.rollout.sft_rollout.generate_rollout
   --prompt-data /root/openhermes2_5.parquet
   --input-key messages
   --rollout-shuffle
   --num-epoch 3
   --rollout-batch-size 128
   --global-batch-size 128
   --loss-type sft_loss
   --loss-mask-type qwen3
   --calculate-per-token-loss
   --disable-compute-advantages-and-returns
   --debug-train-only
)
OPTIMIZER_ARGS=(--optimizer adam --lr 1e-5 --lr-decay-style cosine --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95)
python3 train_async.py ${CKPT_ARGS[@]} ${SFT_ARGS[@]} ${OPTIMIZER_ARGS[@]} --use-dynamic-batch-size --max-tokens-per-gpu 9216
"""


def launched(folder, more="", least=LEAST):
    return import_text(folder, f"python3 train_async.py {' '.join(least.split())} {more}\n")


def sft_config(found):
    return load_config(found.path, command="sft")


def test_a_launch_that_fine_tunes_becomes_a_config_of_sft(tmp_path):
    found = import_text(tmp_path, LAUNCH)
    config = sft_config(found)
    assert (config.model.path, config.model.dtype) == ("/root/Qwen3-4B-Base/", "bfloat16")
    data = config.data
    assert (data.kind, data.path, data.messages_key) == ("parquet", "/root/openhermes2_5.parquet", "messages")
    assert (data.batch_size, data.shuffle) == (128, True)
    assert (config.run.num_epochs, config.run.num_steps, config.run.folder) == (3, None, "/root/out/")
    assert (config.run.checkpoint_every_steps, config.loss.reduction, config.seed) == (1000, "token_mean", 42)
    trainer = config.trainer
    assert (trainer.lr, trainer.lr_schedule, trainer.weight_decay, trainer.beta2) == (1e-5, "cosine", 0.1, 0.95)
    assert trainer.max_tokens_per_micro_batch == 9216
    for flag in set(re.findall(r"--[a-z][\w-]+", LAUNCH)):
        assert found.explained(flag), flag
    assert "for strop sft. strop explain --sft" in found.out
    assert (
        "Made from run.sh, a launch script of slime, by strop import-slime. It is a config of strop sft."
        in found.path.read_text()
    )
    assert strop("explain", "--sft", found.path).code == 0


def test_the_rollout_function_alone_says_that_it_is_fine_tuning(tmp_path):
    least = LEAST.replace("--loss-type sft_loss", "--rollout-function-path slime.rollout.sft_rollout.generate_rollout")
    assert sft_config(launched(tmp_path, least=least)).run.num_epochs == 3


def test_what_the_script_leaves_out_is_slime_s_default(tmp_path):
    config = sft_config(launched(tmp_path, least=LEAST.replace("--input-key messages", "")))
    assert (config.data.messages_key, config.data.shuffle, config.loss.reduction) == ("input", False, "sequence_mean")
    assert (config.trainer.lr_schedule, config.trainer.beta2, config.trainer.weight_decay) == ("linear", 0.999, 0.01)


def test_rollouts_are_counted_in_optimizer_steps(tmp_path):
    """10 batches of 128, each in two steps of 64; slime ignores epochs beside them."""
    least = LEAST.replace("--global-batch-size 128", "--global-batch-size 64")
    found = launched(tmp_path, "--num-rollout 10 --lr-warmup-fraction 0.1", least=least)
    config = sft_config(found)
    assert (config.run.num_steps, config.data.batch_size, config.trainer.warmup_steps) == (20, 64, 2)
    assert found.reason("--num-epoch") == "slime ignores it beside --num-rollout."


def test_the_first_rows_of_a_file_are_its_first_rows(tmp_path):
    config = sft_config(launched(tmp_path, least=LEAST.replace("/d.parquet", "/d.jsonl@[0:500]")))
    assert (config.data.kind, config.data.path, config.data.max_rows) == ("jsonl", "/d.jsonl", 500)
    found = launched(tmp_path, least=LEAST.replace("/d.parquet", "/d.jsonl@[5:9]"))
    assert "data.max_rows takes the first rows alone" in found.out


@pytest.mark.parametrize("flag", KNOWN)
def test_every_known_flag_is_mapped_default_or_explained(flag, tmp_path):
    found = launched(tmp_path, "" if flag in LEAST.split() else f"{flag} 1")
    assert sft_config(found)
    assert found.explained(flag), found.out
    assert "not a flag of slime" not in found.out


@pytest.mark.parametrize("flag", ["--eps-clip", "--rm-type", "--eval-prompt-data", "--rollout-temperature"])
def test_flags_of_reinforcement_learning_have_a_reason(flag, tmp_path):
    said = "is of sampling, rewards or reinforcement learning, which strop sft has none of."
    assert launched(tmp_path, f"{flag} 1").reason(flag) == said
