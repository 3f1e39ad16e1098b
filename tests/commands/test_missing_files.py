"""What a config names on disk and is not there is refused at once, all of it, before anything heavy is imported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from strop.config import TrainConfig, make_config
from strop.config.files import check_files
from strop.types import ConfigError

WATCHED = """
import sys
from strop.cli import main
try:
    main()
finally:
    print([m for m in ("torch", "transformers", "numpy", "pyarrow") if m in sys.modules])
"""


def _refused(tmp_path, text, command="train"):
    (tmp_path / "run.toml").write_text(text)
    line = [sys.executable, "-c", WATCHED, command, str(tmp_path / "run.toml")]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2, done
    assert done.stdout.strip().endswith("[]"), "nothing heavy is imported for this"
    return done.stderr


TEXT = """
[model]
path = "./nope"
[data]
kind = "jsonl"
path = "a.jsonl"
[reward]
kind = "function"
function = "mine.py:score"
[eval.data]
kind = "parquet"
path = "b.parquet"
"""


def test_everything_that_is_missing_is_said_at_once_and_without_torch(tmp_path):
    said = _refused(tmp_path, TEXT)
    assert "4 problems" in said
    assert "model.path must be a Hugging Face folder or name, got './nope': there is no such folder." in said
    assert "data.path must be a file, got a.jsonl: there is no such file." in said
    assert "eval.data.path must be a file, got b.parquet: there is no such file." in said
    assert "reward.function must be module:function or file.py:function, got mine.py:score: there is no file" in said
    assert f"Relative paths are taken from {tmp_path}." in said


def test_an_evaluation_does_not_need_the_training_prompts(tmp_path):
    said = _refused(tmp_path, TEXT, "eval")
    assert "3 problems" in said
    assert "a.jsonl" not in said


def test_demonstrations_are_looked_for_too(tmp_path):
    assert "data.path must be a file, got d" in _refused(tmp_path, '[model]\npath = "m"\n[data]\npath = "d"\n', "sft")


def _config(tmp_path, model_config, **tables):
    (tmp_path / "m").mkdir(exist_ok=True)
    (tmp_path / "m/config.json").write_text(json.dumps(model_config))
    (tmp_path / "d.jsonl").touch()
    data = {"kind": "jsonl", "path": str(tmp_path / "d.jsonl")}
    base = {"model": {"path": str(tmp_path / "m")}, "data": data, "reward": {"kind": "exact"}}
    return make_config(TrainConfig, base | tables, {}, file="run.toml")


@pytest.mark.parametrize(
    "model_config", [{"max_position_embeddings": 64}, {"text_config": {"max_position_embeddings": 64}}]
)
def test_responses_longer_than_the_model_has_positions_are_refused_with_both_numbers(tmp_path, model_config):
    with pytest.raises(ConfigError, match=r"rollout\.max_response_tokens must be below the 64 positions .* got 64"):
        check_files(_config(tmp_path, model_config, rollout={"max_response_tokens": 64}))
    evaluates = {"data": {"kind": "jsonl", "path": str(tmp_path / "d.jsonl")}, "max_response_tokens": 70}
    small = {"max_response_tokens": 63}
    with pytest.raises(ConfigError, match=r"^eval\.max_response_tokens must be below the 64 positions"):
        check_files(_config(tmp_path, model_config, rollout=small, eval=evaluates))
    check_files(_config(tmp_path, model_config, rollout=small))


@pytest.mark.parametrize(
    "model_config", [{}, {"max_position_embeddings": 64, "alibi": True}, {"max_position_embeddings": "x"}]
)
def test_a_model_that_names_no_limit_is_left_to_find_out(tmp_path, model_config):
    check_files(_config(tmp_path, model_config, rollout={"max_response_tokens": 64}))


@pytest.mark.parametrize("path", ["HuggingFaceTB/SmolLM2-135M-Instruct", "gpt2"])
def test_a_name_of_the_hub_is_not_taken_for_a_missing_folder(tmp_path, path):
    check_files(_config(tmp_path, {}, model={"path": path}))


@pytest.mark.parametrize("path", ["", "./m", "/no/where", "a/b/c", "~/m", "m/"])
def test_what_can_only_be_a_folder_must_be_there(tmp_path, path):
    with pytest.raises(ConfigError, match=r"model\.path must be a Hugging Face folder or name"):
        check_files(_config(tmp_path, {}, model={"path": path}))


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"it has no config\.json"):
        check_files(_config(tmp_path, {}, model={"path": str(Path(tmp_path))}))
