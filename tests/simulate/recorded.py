"""A small run as it was: twelve steps of the quickstart's model before training, 24 prompts x 8, in process CPU seconds on one
thread (benchmarks/simulate.py makes such runs). The first step is left out."""

import json
from pathlib import Path

RECORDED = json.loads(Path(__file__).with_name("recorded_run.json").read_text())
STEPS_OF_A_TEST = RECORDED["steps"][:3]
CONFIG = """
[model]
path = "start"
[data]
kind = "jsonl"
path = "train.jsonl"
[rollout]
prompts_per_step = 24
group_size = 8
max_response_tokens = 40
[reward]
kind = "exact"
"""


def write_run(folder, steps=RECORDED["steps"]):
    """A run folder with these steps, as strop train writes it."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG)
    metrics = []
    for number, step in enumerate(steps, 1):
        times = {f"seconds/{name}": value for name, value in step["seconds"].items()}
        metrics.append(json.dumps({"step": number, **times}))
        rows = [
            {"prompt_row": row, "group": row, "prompt_length": prompt, "num_response_tokens": length}
            for row, (prompt, group) in enumerate(zip(step["prompts"], step["responses"], strict=True))
            for length in group
        ]
        (folder / f"rollouts/step_{number:06d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in metrics))
    return folder


def seconds_of(step):
    return sum(step["seconds"].values())
