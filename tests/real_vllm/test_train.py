"""strop train and strop eval with a real vLLM: whole runs, a server that is killed on the way, and a teacher at an address."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from commands.small_runs import ENVIRONMENT, command_line, read_lines, strop
from real_model import AGREES, load, moved, scored, servers_below


def served(config, python):
    """The same, with servers of its own."""
    return (
        *scored(config),
        "--engine.kind",
        "vllm",
        "--engine.python",
        python,
        "--engine.server_args",
        '["--max-model-len", "512"]',
    )


def test_a_run_of_five_steps_agrees_at_every_step_though_its_server_is_killed(config, python, tmp_path):
    run = tmp_path / "run"
    command = command_line("train", config, "--run.folder", run, *served(config, python))
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env=ENVIRONMENT, stdout=log, stderr=log)
    killed = []
    while process.poll() is None:
        rows = read_lines(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []
        if len(rows) >= 2 and not killed:
            killed = servers_below(process.pid)
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
    said = (tmp_path / "log").read_text()
    print(said)
    assert process.returncode == 0, said
    rows = read_lines(run / "metrics.jsonl")
    print(
        [
            {name: row[name] for name in ("logprob_gap_max", "engine_restarts", "weights_bytes", "seconds/weights")}
            for row in rows
        ]
    )
    assert killed
    assert "is lost" in said
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert sum(row["engine_restarts"] for row in rows) == 1
    assert max(row["logprob_gap_max"] for row in rows) < AGREES
    assert len({row["loss"] for row in rows}) > 1
    assert (run / "model/model.safetensors").exists()
    assert [pid for pid in killed if os.path.exists(f"/proc/{pid}")] == []


def test_a_teacher_at_an_address_gives_what_its_folder_gives(config, address, folder, tmp_path):
    student = tmp_path / "student"
    moved(load(folder), 0.1).save_pretrained(student)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if Path(folder, name).exists():
            (student / name).write_bytes(Path(folder, name).read_bytes())
    found = {}
    for place in (address, folder):
        run = tmp_path / f"run{len(found)}"
        done = strop(
            "train",
            config,
            "--run.folder",
            run,
            "--model.path",
            student,
            "--num-steps",
            "2",
            "--reward.kind",
            "none",
            "--distillation.alone",
            "--distillation.teacher",
            place,
            "--rollout.group_size",
            "1",
        )
        assert done.code == 0, done.err
        found[place] = read_lines(run / "metrics.jsonl")
    print([[row["reverse_kl"] for row in rows] for rows in found.values()])
    for by_server, own in zip(found[address], found[folder], strict=True):
        assert by_server["reverse_kl"] == pytest.approx(own["reverse_kl"], abs=AGREES)
        assert by_server["reverse_kl"] > 10 * AGREES


def test_servers_end_with_a_run_that_is_killed(config, python, tmp_path):
    command = command_line(
        "train", config, "--run.folder", tmp_path / "run", "--num-steps", "1000", *served(config, python)
    )
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env=ENVIRONMENT, stdout=log, stderr=log)
    while not (tmp_path / "run/metrics.jsonl").exists():
        assert process.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.2)
    servers = servers_below(process.pid)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 15
    while any(os.path.exists(f"/proc/{pid}") for pid in servers) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert servers
    assert [pid for pid in servers if os.path.exists(f"/proc/{pid}")] == []
