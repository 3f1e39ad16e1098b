"""What tests against a real vLLM share: a model folder, other weights for it, options of servers, and how far they are."""

import asyncio
import re
import urllib.request
from contextlib import suppress
from pathlib import Path

import torch
from commands.small_runs import write_model, write_tokenizer
from transformers import AutoModelForCausalLM

from strop.config import VLLMEngineOptions
from strop.types import GenerateRequest, Sampling

LETTERS = "abcdefgh0123456789 +-*/=?.,:;()<>"
AGREES = 1e-3  # nats
REWARD = """
def score(rollout):
    return sum(letter in "aeinot 0123" for letter in rollout.text) / 24
"""


def write_real_model(folder):
    """A model that vLLM takes (its attention wants heads of 32 or more), with a head that is tied to its embedding."""
    shape = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 512}
    write_model(folder, vocab_size=write_tokenizer(folder, LETTERS), **shape)
    return folder


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def moved(model, by, seed=0):
    """Every weight a little elsewhere, relative to its size; in place."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by * parameter.abs().mean() * torch.randn_like(parameter))
    return model


def scored(config):
    """Flags of a run that is scored."""
    return ("--reward.kind", "function", "--reward.function", f"{config.parent}/reward.py:score")


def options(python, addresses=(), **changes):
    given = {"addresses": tuple(addresses), **changes}
    return VLLMEngineOptions(python=str(python), **given) if not addresses else VLLMEngineOptions(**given)


def requests(model, *, num_prompts=4, samples=2, length=12, temperature=1.0):
    """Prompts of random ids, of several lengths."""
    draw = torch.Generator().manual_seed(1)
    top = model.config.vocab_size
    return [
        GenerateRequest(
            tuple(torch.randint(2, top, (5 + 9 * place,), generator=draw).tolist()),
            tuple(range(10 * place, 10 * place + samples)),
            Sampling(max_response_tokens=length, temperature=temperature),
        )
        for place in range(num_prompts)
    ]


@torch.no_grad()
def logprobs_of(model, prompt, tokens, temperature=1.0):
    """The trainer's view of sampled tokens."""
    ids = torch.tensor([[*prompt, *tokens]])
    rows = (model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)
    return rows.gather(-1, torch.tensor(tokens)[:, None]).squeeze(-1).tolist()


def largest_gap(model, asked, answers, temperature=1.0):
    """Between the log-probabilities that came with samples and those of a model."""
    gaps = [
        abs(a - b)
        for request, completions in zip(asked, answers, strict=True)
        for c in completions
        for a, b in zip(c.logprobs, logprobs_of(model, request.prompt_tokens, c.tokens, temperature), strict=True)
    ]
    assert len(gaps) > 20
    return max(gaps)


def tokens_sampled(address):
    """By a server since its start, as it says itself."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as answer:
        return sum(
            map(float, re.findall(r"^vllm:generation_tokens_total\{.*\} (\S+)$", answer.read().decode(), re.MULTILINE))
        )


async def until_sampled(address, num_tokens, *, holds=False):
    """Wait until a server has sampled so many since its start; `holds`: it goes no further then until somebody resumes it."""
    while await asyncio.to_thread(tokens_sampled, address) < num_tokens:
        await asyncio.sleep(0.005)
    if holds:
        hold = urllib.request.Request(f"{address}/pause?mode=keep", method="POST")
        await asyncio.to_thread(lambda: urllib.request.urlopen(hold, timeout=30).close())


def servers_below(pid):
    """The ids of all processes of vLLM servers that a process started."""
    children = {}
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):  # it ends meanwhile
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(place.name))
    return {
        below
        for child in children.get(pid, [])
        if "ends_with_stdin.py" in _command(child)
        for below in _all_of(child, children)
    }


def _all_of(pid, children):
    return [pid, *(below for child in children.get(pid, []) for below in _all_of(child, children))]


def _command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    except OSError:
        return ""
