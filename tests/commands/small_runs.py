"""Runs small enough for tests: a model of two layers and width 32 with a letter tokenizer, the quickstart's prompts, and
the commands of strop, called in this process or in one of their own."""

import contextlib
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "300"}

# Varies from sample to sample even for a model with random weights, so that groups differ and there is something to learn.
REWARD = """
import time

def score(rollout):
    return sum(letter in "abcd" for letter in rollout.text) / 8 + 0.5 * (rollout.finish_reason == "stop")

def slow(rollout):
    time.sleep(0.01)
    return score(rollout)

def equal(rollout):
    return 0.35

def raises(rollout):
    if rollout.sample == 1:
        raise KeyError("no such tool")
    return score(rollout)

def too_few(rollouts):
    return [1.0] * (len(rollouts) - 1)

def too_many(rollouts):
    return [1.0] * (len(rollouts) + 1)
"""

HELD = """
import time
from pathlib import Path

def score(rollout):
    while rollout.group_id >= {group} and not Path({go!r}).exists():
        time.sleep(0.01)
    return sum(letter in "abcd" for letter in rollout.text) / 8 + 0.5 * (rollout.finish_reason == "stop")
"""

TRAIN = """
[model]
path = "{folder}/start"
[data]
kind = "jsonl"
path = "{folder}/train.jsonl"
max_prompts = 64
[rollout]
prompts_per_step = 4
group_size = 4
max_response_tokens = 6
[reward]
kind = "function"
function = "{folder}/reward.py:score"
[algorithm]
updates_per_batch = 2
[trainer]
lr = 0.01
num_threads = 1
[run]
num_steps = 3
"""

SFT = """
[model]
path = "{folder}/start"
[data]
path = "{folder}/demonstrations.jsonl"
batch_size = 8
[trainer]
lr = 0.01
num_threads = 1
[run]
num_steps = 3
"""


@dataclass(frozen=True)
class Small:
    """A folder with start/ (the model), prompts, demonstrations, reward.py and configs of three steps."""

    folder: Path

    @property
    def start(self):
        return self.folder / "start"

    @property
    def train(self):
        return self.folder / "train.toml"

    @property
    def exact(self):
        """As train, with the reward of kind exact."""
        return self.folder / "exact.toml"

    @property
    def sft(self):
        return self.folder / "sft.toml"

    @property
    def eval_flags(self):
        """Eight held-out prompts."""
        path = f"{self.folder}/held_out.jsonl"
        return ("--eval.data.kind", "jsonl", "--eval.data.path", path, "--eval.data.max_prompts", "8")

    def reward(self, name):
        return f"{self.folder}/reward.py:{name}"


def held(folder, step):
    """A reward like `score` that waits in a step of Small.train until the file is there: its function, and that file."""
    go = folder / "go"
    (folder / "held.py").write_text(HELD.format(group=4 * (step - 1), go=str(go)))
    return f"{folder}/held.py:score", go


@dataclass(frozen=True)
class Done:
    """What a command left: its exit code and what it wrote."""

    code: int
    out: str
    err: str


def small_once(tmp_path_factory):
    """The small folder of this session, made by whoever asks first."""
    folder = tmp_path_factory.getbasetemp() / "small"
    return Small(folder) if (folder / "sft.toml").exists() else write_small(folder)


def write_small(folder):
    """Fill a folder with the quickstart's task, a model of width 32 in place of its own, a reward and configs."""
    spec = importlib.util.spec_from_file_location("quickstart_task", ROOT / "examples/quickstart/task.py")
    task = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(task)
    task.write_task(folder, seed=0)
    write_model(folder / "start", vocab_size=3 + len(task.LETTERS))
    demonstrations = (folder / "demonstrations.jsonl").read_text().splitlines(keepends=True)
    (folder / "demonstrations.jsonl").write_text("".join(demonstrations[:64]))
    (folder / "reward.py").write_text(REWARD)
    (folder / "train.toml").write_text(TRAIN.format(folder=folder))
    exact = TRAIN.replace('kind = "function"\nfunction = "{folder}/reward.py:score"', 'kind = "exact"')
    (folder / "exact.toml").write_text(exact.format(folder=folder))
    (folder / "sft.toml").write_text(SFT.format(folder=folder))
    return Small(folder)


def write_model(folder, *, vocab_size, **changes):
    """A Llama-shaped model with weights large enough that it prefers some tokens; id 0 pads, id 1 ends."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=vocab_size,
        initializer_range=0.1,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=True,
        **{**shape, "max_position_embeddings": 128, **changes},
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def write_tokenizer(folder, characters):
    """One token a character; id 0 pads, id 1 ends, the characters follow. Returns the size of the vocabulary."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    return len(vocabulary)


def strop(*arguments):
    """A command of strop in this process, as its entry point runs it. What it does not catch is raised here."""
    from strop.cli import main

    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    sys.argv = ["strop", *map(str, arguments)]
    code = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.argv = before
        for number, handler in handlers.items():  # a command that was stopped ignores them from then on
            signal.signal(number, handler)
    return Done(code, out.getvalue(), err.getvalue())


def command_line(*arguments):
    return [sys.executable, "-m", "strop.cli", *map(str, arguments)]


def strop_process(*arguments, cwd):
    """A command of strop in a process of its own, as a user runs it."""
    done = subprocess.run(command_line(*arguments), cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True)
    return Done(done.returncode, done.stdout, done.stderr)


@cache
def weights(folder):
    """The weights of a model folder by name."""
    from safetensors.torch import load_file

    return load_file(Path(folder) / "model.safetensors")


def same_weights(one, other):
    """True where two model folders hold the same weights bit for bit."""
    one, other = weights(one), weights(other)
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def read_lines(path):
    """The rows of a JSONL file."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def without_times(rows):
    """Lines of metrics.jsonl without what differs from run to run."""
    return [{k: v for k, v in row.items() if not k.startswith("seconds/") and k != "tokens_per_second"} for row in rows]


def metrics(run):
    """metrics.jsonl of a run folder, without times."""
    return without_times(read_lines(Path(run) / "metrics.jsonl"))


def refusing(tmp_path):
    """A function that runs a command that must be refused, and returns its message. The folder runs/ must stay absent."""

    def run(command, config, *flags):
        folder = tmp_path / "runs"
        done = strop(command, config, *flags, "--run.folder", folder)
        assert done.code == 2, done
        assert done.err.startswith("error: "), done.err
        assert "Traceback" not in done.err
        assert len(done.err.splitlines()) == 1, done.err
        assert not folder.exists(), [p.name for p in folder.iterdir()]
        return done.err

    return run
