"""A soak test: many steps of the quickstart while the run, and what scores for it, is killed, its disk filled and its scorer
slow or stuck, again and again.

python tools/soak.py [--steps 300] [--faults 40] [--seed N]

What is compared at the end: the metrics and the weights of the tormented run with those of one that nobody disturbed, bit
for bit; and whether the memory of a process grows with its steps. Exit code 1 if anything differs, or a fault did not come
about.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import resource
import shutil
import signal
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).parents[1]
KILLS = ("start", "sample", "score", "train", "checkpoint")  # where a process is killed; at the start by time alone
SCORER_FAULTS = ("worker", "slow", "stuck")  # its process is killed; its calls take long; one call never ends
# The quickstart's exact match as a reward function, in workers; a variable of the environment says what ails it.
SCORER = """
import os, time

AILMENT = os.environ.get("SOAK_SCORER")

def score(rollout):
    if AILMENT == "slow" and rollout.sample == 0:
        time.sleep(0.02)
    if AILMENT == "stuck" and int.from_bytes(os.urandom(2)) % 200 == 0:
        time.sleep(1e6)
    return float(rollout.text == rollout.prompt.label and rollout.finish_reason == "stop")
"""
MORE_STEPS = 5  # of a run that goes on in spite of what its scorer met, which is killed then
_ENDINGS = {
    "full disk": (2,),
    "scorer: worker": (2, -9),
    "scorer: stuck": (2,),
}  # exit codes by fault; -9 of all others
_PAGE = resource.getpagesize()


@dataclass
class Account:
    """What was done to a run, and what it said of its memory."""

    faults: Counter[str] = field(default_factory=Counter)
    num_processes: int = 0
    steps_lost: list[int] = field(default_factory=list)  # made, and not in a checkpoint when a fault came
    num_orphans: int = 0  # processes of a scorer that outlived their run
    rss_bytes: list[int] = field(default_factory=list)  # after each step of the last process


def train_in_fork(config: object, out: TextIO, *, max_file_bytes: int | None, ailment: str = "") -> None:
    """In a process of its own: go on with a run, saying every phase and step. Never returns."""
    os.environ["SOAK_SCORER"] = ailment
    import strop
    from strop.observe.console import QuietConsole
    from strop.types import StropError

    class Telling(QuietConsole):
        @contextmanager
        def phase(self, name: str, total: int, *, is_idle: bool = False) -> Iterator[None]:
            print(name, file=out, flush=True)
            with super().phase(name, total, is_idle=is_idle):
                yield

        def step(self, step: int, num_steps: int, metrics: object) -> None:
            rss = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
            print("step", step, rss, file=out, flush=True)
            super().step(step, num_steps, metrics)  # type: ignore[arg-type]

    code = 1
    try:
        if max_file_bytes is not None:  # what a full disk does: a write fails in the middle of a file
            resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
        strop.train(config, resume="auto", console=Telling())  # type: ignore[arg-type]
        code = 0
    except StropError as error:
        print("error", str(error).replace("\n", " "), file=out, flush=True)
        code = 2
    except BaseException:  # noqa: BLE001 - shown, and told by the exit code
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        out.flush()
        os._exit(code)


def load_libraries(config: object) -> None:
    """What every process would import by itself comes with the fork: a model is loaded and an optimizer made, once."""
    import torch

    from strop.runtime.models import load_model

    model = load_model(config.model).model  # type: ignore[attr-defined]
    torch.optim.AdamW(model.parameters()).zero_grad()


def attempt(
    config: object, account: Account, *, fault: str | None, rng: random.Random, max_file_bytes: int | None = None
) -> int:
    """Go on with a run in a forked process, which meets a fault: it is killed in the named phase, or its scorer ails; returns
    its exit code, -9 where it was killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        train_in_fork(config, os.fdopen(writer, "w"), max_file_bytes=max_file_bytes, ailment=fault or "")
    os.close(writer)
    account.num_processes += 1
    account.rss_bytes.clear()
    left, workers, last_step = rng.randint(1, 3), set[int](), MORE_STEPS if fault == "slow" else 0
    phase = rng.choice(("sample", "score")) if fault == "worker" else fault
    if fault == "start":
        time.sleep(rng.uniform(0, 0.4))
        os.kill(child, signal.SIGKILL)
    with os.fdopen(reader) as lines:
        for line in lines:
            words = line.split()
            if words[0] == "step":
                account.rss_bytes.append(int(words[2]))
                if len(account.rss_bytes) == last_step:
                    os.kill(child, signal.SIGKILL)
            elif words[0] == phase:
                left -= 1
                if left == 0:
                    time.sleep(rng.uniform(0, 0.02))  # into the phase, or past it
                    now = _children(child)
                    workers |= now
                    last_step = len(account.rss_bytes) + MORE_STEPS if now else 0
                    for process in now if fault == "worker" else (child,):
                        with suppress(ProcessLookupError):
                            os.kill(process, signal.SIGKILL)
            workers |= _children(child)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    account.num_orphans += _num_left(workers)
    return code


def _children(process: int) -> set[int]:
    found = set[int]()
    with suppress(OSError):
        for task in os.listdir(f"/proc/{process}/task"):
            found |= set(map(int, Path(f"/proc/{process}/task/{task}/children").read_text().split()))
    return found


def _num_left(processes: set[int]) -> int:
    """Those that still run a while later."""
    until = time.monotonic() + 5
    while processes and time.monotonic() < until:
        processes = {number for number in processes if _is_running(number)}
        time.sleep(0.01)
    return len(processes)


def _is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def torment(
    config: object,
    folder: Path,
    *,
    num_faults: int,
    rng: random.Random,
    max_file_bytes: int | None = None,
    faults: Sequence[str] = KILLS,
    watch: Callable[[Account], None] = lambda account: None,
) -> Account:
    """Begin a run and go on with it until it is done, with faults on the way.

    Args:
        config: of the run; it must write checkpoints.
        folder: of the run.
        num_faults: how many processes are killed, find the disk full, or have a scorer that ails.
        rng: says where and when.
        max_file_bytes: with it, every sixth fault is a disk too full for a file of this size.
        faults: of which each time one is drawn that has not been for longest.
        watch: called after each fault.

    Raises:
        RuntimeError: a checkpoint is damaged, a process ended in a way that its fault does not explain, or a fault did not
            come about before the run was done.
    """
    account, cards = Account(), list[str]()
    load_libraries(config)
    for number in range(num_faults):
        is_full = max_file_bytes is not None and number % 6 == 5
        cards = cards or rng.sample(faults, len(faults))
        fault = None if is_full else cards.pop()
        code = attempt(config, account, fault=fault, rng=rng, max_file_bytes=max_file_bytes if is_full else None)
        name = "full disk" if is_full else f"scorer: {fault}" if fault in SCORER_FAULTS else f"kill -9: {fault}"
        if code not in _ENDINGS.get(name, (-9,)):
            raise RuntimeError(
                f"fault {number + 1} of {num_faults} ({name}) did not come about: the run ended with {code}"
            )
        account.faults[name] += 1
        _check_checkpoints(folder, account)
        watch(account)
    code = attempt(config, account, fault=None, rng=rng)
    if code:
        raise RuntimeError(f"the run did not end after the last fault: exit code {code}")
    return account


def _check_checkpoints(folder: Path, account: Account) -> None:
    """No checkpoint is ever damaged; count the steps that are in none."""
    from strop.observe.metrics_file import read_metrics
    from strop.runtime.checkpoints import has_checkpoints, newest_checkpoint

    warnings: list[str] = []
    rows = read_metrics(folder / "metrics.jsonl")
    made = int(rows[-1]["step"]) if rows else 0
    saved = 0
    if has_checkpoints(folder / "checkpoints"):
        saved = newest_checkpoint(folder / "checkpoints", warn=warnings.append)[1]["step"]
    elif folder.exists():
        shutil.rmtree(folder)  # stopped before its first checkpoint: --resume auto leaves such a run to its owner
    if warnings:
        raise RuntimeError(f"a fault damaged a checkpoint: {'; '.join(warnings)}")
    account.steps_lost.append(max(0, made - saved))


def differences(one: Path, other: Path) -> list[str]:
    """What two runs did not do alike: numbers of their steps, times aside, or the model at the end."""
    from strop.observe.metrics_file import read_metrics

    def rows(folder: Path) -> list[str]:
        return [
            repr({k: v for k, v in row.items() if not k.startswith("seconds/") and k != "tokens_per_second"})
            for row in read_metrics(folder / "metrics.jsonl")
        ]

    found = [f"line {n}" for n, (a, b) in enumerate(zip(rows(one), rows(other), strict=False), 1) if a != b]
    if len(rows(one)) != len(rows(other)):
        found.append(f"{len(rows(one))} and {len(rows(other))} lines of metrics")
    model = "model/model.safetensors"
    if (one / model).read_bytes() != (other / model).read_bytes():
        found.append("the weights at the end")
    return found


def growth(rss_bytes: list[int]) -> tuple[float, float]:
    """Mean memory of the second tenth of the steps, and of the last tenth, in MiB."""
    tenth = max(1, len(rss_bytes) // 10)
    early, late = rss_bytes[tenth : 2 * tenth] or rss_bytes, rss_bytes[-tenth:]
    return statistics.mean(early) / 2**20, statistics.mean(late) / 2**20


def quickstart(folder: Path) -> Path:
    """The quickstart's data and its warmed-up model; returns the model's folder."""
    import strop

    spec = importlib.util.spec_from_file_location("task", ROOT / "examples/quickstart/task.py")
    assert spec is not None
    assert spec.loader is not None
    task = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(task)
    task.write_task(folder, 0)
    paths = {"model.path": str(folder / "start"), "data.path": str(folder / "demonstrations.jsonl")}
    options = {**paths, "run.folder": str(folder / "sft"), "trainer.num_threads": 1}
    return strop.sft(strop.load_config(ROOT / "examples/quickstart/sft.toml", options, command="sft")).model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="steps of the run (default 300)")
    parser.add_argument("--faults", type=int, default=40, help="faults before it may end (default 40)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of the faults")
    parser.add_argument("--folder", type=Path, default=Path("runs/soak"), help="replaced (default runs/soak)")
    given = parser.parse_args()
    sys.exit(soak(given.folder, steps=given.steps, num_faults=given.faults, seed=given.seed))


def soak(folder: Path, *, steps: int, num_faults: int, seed: int) -> int:
    """The whole test, with its figures on standard output; 0 if all is well."""
    import strop

    print(f"faults from seed {seed}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model = quickstart(folder)
    (folder / "scorer.py").write_text(SCORER)

    def config(name: str) -> object:
        options = {"model.path": str(model), "data.path": str(folder / "train.jsonl"), "trainer.num_threads": 1}
        options |= {"eval.data.path": str(folder / "held_out.jsonl"), "eval.every_steps": 50}
        options |= {
            "reward.kind": "function",
            "reward.function": f"{folder / 'scorer.py'}:score",
            "reward.timeout_s": 2,
        }
        options |= {"run.folder": str(folder / name), "run.num_steps": steps, "run.checkpoint_every_steps": 2}
        return strop.load_config(ROOT / "examples/quickstart/cispo.toml", options)

    load_libraries(config("calm"))
    calm, start = Account(), time.perf_counter()
    if attempt(config("calm"), calm, fault=None, rng=random.Random(0)):
        print("the undisturbed run failed")
        return 1
    print(f"undisturbed: {steps} steps in {time.perf_counter() - start:.0f} s", flush=True)
    early, late = growth(calm.rss_bytes)
    print(f"memory of the undisturbed process: {early:.0f} MiB early, {late:.0f} MiB late ({late / early - 1:+.1%})")
    start = time.perf_counter()
    full = (folder / "calm/model/model.safetensors").stat().st_size
    account = torment(
        config("tormented"),
        folder / "tormented",
        num_faults=num_faults,
        rng=random.Random(seed),
        max_file_bytes=full,
        faults=KILLS + SCORER_FAULTS,
    )
    print(f"tormented: {account.num_processes} processes in {time.perf_counter() - start:.0f} s")
    for what, count in sorted(account.faults.items()):
        print(f"  {what}: {count}")
    lost = account.steps_lost
    print(f"  steps made again after a fault: {statistics.mean(lost):.1f} on average, at most {max(lost)}")
    print(f"  processes of a scorer that outlived their run: {account.num_orphans}")
    found = differences(folder / "calm", folder / "tormented")
    print("rewards, all other metrics and weights: " + ("the same" if not found else f"DIFFER: {', '.join(found[:9])}"))
    is_flat = late < 1.05 * early
    if not is_flat:
        print("memory GREW by more than 5 %")
    return 1 if found or account.num_orphans or not is_flat else 0


if __name__ == "__main__":
    main()
