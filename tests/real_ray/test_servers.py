"""Servers on the nodes of a cluster, with a program that stands for vLLM's Python: samples, new weights, lost actors."""

from pathlib import Path

from commands.small_runs import metrics, read_lines
from real_ray.cluster_runs import run

from strop.runtime.audit import engine_servers

STRIKES = """
import os
from pathlib import Path

struck = Path(__file__).with_name("struck")

def numbers(process):
    return (process / "stat").read_text().rpartition(")")[2].split()

def score(rollout):
    if rollout.group_id == 9 and rollout.sample == 0 and not struck.exists():
        servers = [p.parent for p in Path("/proc").glob("[0-9]*/cmdline") if b"{folder}/proxy.py" in p.read_bytes()]
        first = min(servers, key=lambda process: int(numbers(process)[19]))  # the one that was started first
        struck.touch()
        os.kill(int(numbers(first)[1]), 9)  # its parent, the actor
    return sum(letter in "abcd" for letter in rollout.text) / 8 + 0.5 * (rollout.finish_reason == "stop")
"""


def servers_of(folder):
    return [p for p in Path("/proc").glob("[0-9]*/cmdline") if f"{folder}/proxy.py".encode() in p.read_bytes()]


def test_servers_that_sleep_are_in_the_ranks_places(cluster, small, tmp_path):
    """Three ranks take all of the six CPUs."""
    (tmp_path / "model").symlink_to(small.start)
    flags = (
        "--cluster",
        "auto",
        "--engine.kind",
        "vllm",
        "--engine.sleep",
        "--num-threads",
        "2",
        "--num-processes",
        "3",
    )
    with engine_servers.standing(tmp_path):
        run(small, tmp_path / "run", *flags, "--engine.python", tmp_path / engine_servers.PYTHONS[0])
        (seen,) = [seen for seen in engine_servers.seen() if seen]
    assert (seen["sleep 1"], seen["wake_up"]) == (4, 4)


def test_two_servers_on_nodes_sample_what_rank_0_would_and_an_actor_that_is_lost_costs_no_sample(
    cluster, small, tmp_path
):
    (tmp_path / "model").symlink_to(small.start)
    (tmp_path / "scorer.py").write_text(STRIKES.format(folder=tmp_path))
    run(small, tmp_path / "alone")
    flags = ("--cluster", "auto", "--engine.kind", "vllm", "--num-servers", "2")
    flags = (*flags, "--reward.function", f"{tmp_path}/scorer.py:score")
    with engine_servers.standing(tmp_path):
        run(small, tmp_path / "run", *flags, "--engine.python", tmp_path / engine_servers.PYTHONS[0])
    for step in range(1, 5):
        rows = [read_lines(tmp_path / name / f"rollouts/step_{step:06d}.jsonl") for name in ("run", "alone")]
        assert [row["tokens"] for row in rows[0]] == [row["tokens"] for row in rows[1]]
    assert [row["engine_restarts"] for row in metrics(tmp_path / "run")] == [0, 0, 1, 0]
    assert servers_of(tmp_path) == []
