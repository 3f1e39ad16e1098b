"""A whole GRPO step against TRL's GRPOTrainer: same model, prompts, samples, lengths and optimizer.

    make bench                                                        # this and the others
    .venv/bin/python benchmarks/grpo_step.py [--model FOLDER] [--repeats 5] [--threads 2]

Without --model, the quickstart's (.41M weights). 8 prompts x 8 samples; end tokens are switched off on both sides, so that
every response has the same length. A step is sampling, scoring, one update by AdamW; the first steps are not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from contest import machine, report, run_in_turn
from rich.console import Console
from rich.table import Table

PROMPTS, SAMPLES, LR = 8, 8, 1e-5
ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face folder; default: the quickstart's model, made here")
    parser.add_argument("--tokens", type=int, default=None, help="length of a response (default 24, with --model 64)")
    parser.add_argument("--steps", type=int, default=None, help="steps that count (default 10, with --model 1)")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each (default 5)")
    parser.add_argument("--threads", type=int, default=2, help="of each process (default 2)")
    parser.add_argument("--contestant", choices=["strop", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args()
    tokens, steps = given.tokens or (64 if given.model else 24), given.steps or (1 if given.model else 10)
    if given.contestant:
        {"strop": strop_steps, "trl": trl_steps}[given.contestant](given.model, Path(given.folder), tokens, steps)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or quickstart_model(Path(folder))
        write_prompts(Path(folder), is_small=given.model is None)
        common = [__file__, "--model", model, "--folder", folder, "--tokens", str(tokens), "--steps", str(steps)]
        contestants = {name: [*common, "--contestant", name] for name in ("strop", "trl")}
        show(run_in_turn(contestants, given.repeats, given.threads), tokens, given.threads)


def quickstart_model(folder: Path) -> str:
    sys.path.insert(0, str(ROOT / "examples/quickstart"))
    from task import write_task

    write_task(folder / "task", 0)
    return str(folder / "task/start")


def write_prompts(folder: Path, *, is_small: bool) -> None:
    """The same rows for both."""
    if is_small:
        rows = [json.loads(line) for line in (folder / "task/train.jsonl").read_text().splitlines()[:64]]
        texts = [row["prompt"] for row in rows]
    else:
        texts = [f"What is {a} plus {b}? Answer with the number alone." for a in range(10, 18) for b in range(20, 28)]
    lines = [json.dumps({"prompt": text, "label": ""}) for text in texts]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")


def score(text: str) -> float:
    """Anything that differs between samples."""
    return len(set(text)) / 8


def strop_steps(model: str, folder: Path, tokens: int, steps: int) -> None:
    from strop.config import TrainConfig, make_config
    from strop.observe.console import QuietConsole
    from strop.runtime.train import opened, run

    (folder / "scorer.py").write_text("def score(rollout):\n    return len(set(rollout.text)) / 8\n")
    values = {
        "model": {"path": model},
        "data": {"kind": "jsonl", "path": str(folder / "prompts.jsonl"), "chat": "never"},
        "rollout": {"prompts_per_step": PROMPTS, "group_size": SAMPLES, "max_response_tokens": tokens},
        "reward": {"kind": "function", "function": f"{folder}/scorer.py:score"},
        "algorithm": {"preset": "grpo", "kl": {"coef": 0.0}},
        "trainer": {"lr": LR, "beta2": 0.999},
        "run": {"num_steps": steps + 1, "folder": f"{folder}/run", "overwrite": True, "save_rollouts": False},
    }
    config = make_config(TrainConfig, values, {}, file="bench.toml")
    with opened(config, QuietConsole()) as session:
        session.engine.stop_token_ids = frozenset()  # type: ignore[attr-defined]
        run(session)
    assert all(step["response_tokens"] == tokens for step in session.history), "every response is as long as asked"
    seconds = [sum(step[f"seconds/{p}"] for p in ("sample", "score", "logprobs", "train")) for step in session.history]
    report(seconds=statistics.median(seconds[1:]), products_s=seconds_of_products(session.trainer.model, tokens))  # type: ignore[attr-defined]


def seconds_of_products(model: Any, tokens: int) -> float:
    """What the products of the responses with the weights alone take at this machine's rate: two operations a weight and
    token to sample, six to learn. Prompts and attention are not counted."""
    import torch

    from strop.products import linear

    weights = [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)]
    widest = max(weights, key=torch.Tensor.numel).detach()
    x, turns = torch.randn(2048, widest.shape[1]), []
    for _ in range(20):
        start = time.perf_counter()
        linear(x, widest)
        turns.append(time.perf_counter() - start)
    rate = 2 * len(x) * widest.numel() / min(turns)
    return 8 * sum(weight.numel() for weight in weights) * PROMPTS * SAMPLES * tokens / rate


def trl_steps(model: str, folder: Path, tokens: int, steps: int) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Clock(TrainerCallback):
        ends: list[float] = []  # noqa: RUF012

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.perf_counter())

    lengths: list[int] = []

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.extend(map(len, completion_ids))
        return [score(text) for text in completions]

    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=tokens,
        max_steps=steps + 1,
        learning_rate=LR,
        lr_scheduler_type="constant",
        adam_beta2=0.999,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="grpo",
        temperature=1.0,
        top_k=0,
        gradient_checkpointing=False,
        generation_kwargs={"eos_token_id": None},
        logging_steps=10_000,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    between = [later - earlier for earlier, later in zip(Clock.ends, Clock.ends[1:], strict=False)]
    report(seconds=statistics.median(between))


def show(found: dict[str, dict[str, float]], tokens: int, threads: int) -> None:
    table = Table("", "s a step", "response tokens/s", "speed", "peak MB", "memory", title="a whole GRPO step")
    reference = found["trl"]
    for name, m in found.items():
        rate = PROMPTS * SAMPLES * tokens / m["seconds"]
        cells = (f"{m['seconds']:.3f}", f"{rate:.0f}", f"{reference['seconds'] / m['seconds']:.2f}x")
        table.add_row(name, *cells, f"{m['peak_mb']:.0f}", f"{m['peak_mb'] / reference['peak_mb']:.2f}x")
    console = Console()
    console.print(table)
    console.print(
        f"{PROMPTS} prompts x {SAMPLES} samples x {tokens} tokens, {threads} threads; "
        f"{machine('torch', 'transformers', 'trl')}. "
        f"The products with the weights alone take {found['strop']['products_s']:.3f} s at the best rate of one of them."
    )


if __name__ == "__main__":
    main()
