"""`ops.linear_logprobs` against what else one can do: all logits at once, chunks under torch.utils.checkpoint, and Liger's
fused loss where it is installed (`pip install --no-deps liger-kernel`; of its losses those in chunks need no GPU).

    .venv/bin/python benchmarks/head.py [--repeats 5] [--threads 2]

Forward and backward of log-probability and entropy, of log-probability alone beside Liger's loss, which has no entropy; hidden
size 576, float32. Memory is what the process grew by, gradients of the head and of the hidden states among it.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from importlib.util import find_spec

from contest import machine, report, run_in_turn
from rich.console import Console
from rich.table import Table

HIDDEN = 576
SIZES = [(49152, 1024), (49152, 4096), (151936, 2048)]  # V, T
CHUNK = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="turns of each (default 5)")
    parser.add_argument("--threads", type=int, default=2, help="of each process (default 2)")
    parser.add_argument("--contestant", choices=list(CONTESTANTS), help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.contestant:
        compute(CONTESTANTS[given.contestant], *given.size)
        return
    table = Table("V", "T", "", "s", "time", "grew by MB", "memory", title="log-probabilities of the head")
    for vocab, tokens in SIZES:
        words = [__file__, "--size", str(vocab), str(tokens), "--contestant"]
        found = run_in_turn({name: [*words, name] for name in CONTESTANTS}, given.repeats, given.threads)
        naive = found["naive"]
        for name, m in found.items():
            alike = found["naive" if name in WITH_ENTROPY else "linear_logprobs, no entropy"]["gradient"]
            assert abs(m["gradient"] - alike) < 1e-3 * alike, "all compute the same gradient"
            cells = (f"{m['seconds']:.1f}", f"{m['seconds'] / naive['seconds']:.2f}x", f"{m['grew_mb']:.0f}")
            table.add_row(str(vocab), str(tokens), name, *cells, f"{m['grew_mb'] / naive['grew_mb']:.2f}x")
    console = Console()
    console.print(table)
    console.print(f"hidden {HIDDEN}, float32, {given.threads} threads; {machine('torch')}")


def compute(loss_of: Callable[..., object], vocab: int, tokens: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).requires_grad_()
    weight = (torch.randn(vocab, HIDDEN, generator=generator) / HIDDEN**0.5).requires_grad_()
    targets = torch.randint(vocab, (tokens,), generator=generator)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    loss = loss_of(hidden, weight, targets)
    loss.backward()  # type: ignore[attr-defined]
    seconds = time.perf_counter() - start
    grew = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    report(seconds=seconds, grew_mb=grew, gradient=float(hidden.grad.norm()))  # type: ignore[union-attr]


def naive(hidden, weight, targets):
    log_p = (hidden @ weight.T).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return (log_p.gather(-1, targets[:, None]).squeeze(-1) + 0.1 * entropy).sum()


def checkpointed(hidden, weight, targets):
    from torch.utils.checkpoint import checkpoint

    parts = zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)
    return sum(checkpoint(naive, part, weight, wanted, use_reentrant=False) for part, wanted in parts)


def linear_logprobs(hidden, weight, targets):
    from strop import ops

    found = ops.linear_logprobs(hidden, weight, targets, with_entropy=True)
    return (found.logprobs + 0.1 * found.entropy).sum()


def without_entropy(hidden, weight, targets):
    from strop import ops

    return ops.linear_logprobs(hidden, weight, targets).logprobs.sum()


def liger(hidden, weight, targets):
    """GRPO's loss of sequences of 256 tokens at ratio 1, scaled: its gradient is that of the sum of log-probabilities."""
    import torch
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    rows = len(targets) // CHUNK
    loss = LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False, loss_type="grpo")
    mask, advantages = torch.ones(rows, CHUNK), torch.full((rows,), -float(len(targets)))
    return loss(hidden.view(rows, CHUNK, -1), weight, targets.view(rows, CHUNK), mask, advantages)[0]


WITH_ENTROPY = {"naive": naive, "checkpoint": checkpointed, "linear_logprobs": linear_logprobs}
CONTESTANTS = WITH_ENTROPY | {"linear_logprobs, no entropy": without_entropy}
if find_spec("liger_kernel") is not None:
    CONTESTANTS |= {"liger, no entropy": liger}

if __name__ == "__main__":
    main()
