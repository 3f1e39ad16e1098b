"""Faults planted in a copy of strop: options that nothing reads, that are only checked, choices that do what others do, and
options that the audit has no value for. The founding case: they are in no list; the audit finds them in the tree."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands.small_runs import small_once

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]
LR = "    lr: float = Field(default=1e-6"
SCHEDULE = 'lr_schedule: Literal["constant", '
# Option of [trainer] as it is declared, and what the audit must say of it.
OF_TRAINER = {
    "boldness: float = Field(default=0.5, ge=0)": "DEAD",
    "is_bold: bool = Field(default=False)": "DEAD",
    "words: tuple[str, ...] = Field(default=())": "DEAD",
    "free: str = Field(default='ab')": "DEAD",
    "checked: str = Field(default='plain')": "not tried",
    "code: str = Field(default='ab', pattern='^[a-z]{2}$')": "not tried",
    "strange: frozenset[int] = Field(default=())": "not tried",
}
EDITS = [
    ("config/training.py", LR, "".join(f"    {line}\n" for line in OF_TRAINER) + LR),
    ("trainers/torch_trainer.py", "        self.options = options\n", "        self.options = checked(options)\n"),
    # a word that is taken and does what another does
    ("config/training.py", SCHEDULE, SCHEDULE + '"inverse_sqrt", '),
    ("trainers/schedule.py", 'schedule == "constant"', 'schedule in ("constant", "inverse_sqrt")'),
    (
        "config/policy_loss.py",
        '["cispo"] = "cispo"\n',
        '["cispo"] = "cispo"\n    is_bold: bool = Field(default=False)\n',
    ),
    # the binding of options to functions refuses it even earlier: let it pass there
    ("algorithms/binding.py", '- {"kind"}', '- {"kind", "is_bold"}'),
    (
        "config/sampling.py",
        "    prompts_per_step",
        "    is_bold: bool = Field(default=False)\n    prompts_per_step",
    ),
    ("config/data.py", "    batch_size: int", "    is_bold: bool = Field(default=False)\n    batch_size: int"),
    # a choice whose condition has gone
    ("runtime/learning.py", "[not algorithm.mask_truncated or ", "[True or "),
]
CHECKED = """

def checked(options):
    if options.checked != "plain":
        raise UserError("trainer.checked must be plain.")
    return options


from strop.types import UserError
"""
AUDITS = """
import sys
from strop.cli import main
from strop.config import load_config
from strop.runtime.audit import audit

train, sft = sys.argv[1:3]
cispo = {"algorithm.policy_loss.kind": "cispo"}
for only in sys.argv[3:]:
    command = "sft" if only.startswith("data.") else "train"
    config = load_config(sft if command == "sft" else train, cispo if command == "train" else {}, command=command)
    for f in audit(config, only=only):
        print("found:", f.path, "=", f.verdict, "=", f.reason)
sys.argv = ["strop", "audit", train, "--only", "trainer.is_bold"]
main()
"""
OPTIONS = {f"trainer.{line.partition(':')[0]}": verdict for line, verdict in OF_TRAINER.items()} | {
    "trainer.lr_schedule": "DEAD",
    "algorithm.policy_loss.is_bold": "DEAD",
    "algorithm.mask_truncated": "DEAD",
    "rollout.is_bold": "DEAD",
    "data.is_bold": "DEAD",
}


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Option to verdict and reason; and what the command left."""
    small, folder = small_once(tmp_path_factory), tmp_path_factory.mktemp("planted")
    shutil.copytree(ROOT / "strop", folder / "strop", ignore=shutil.ignore_patterns("__pycache__"))
    for name, before, after in EDITS:
        path = folder / "strop" / name
        assert path.read_text().count(before) == 1, (name, before)
        path.write_text(path.read_text().replace(before, after))
    with (folder / "strop/trainers/torch_trainer.py").open("a") as file:
        file.write(CHECKED)
    (folder / "audits.py").write_text(AUDITS)
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "audits.py", str(small.train), str(small.sft), *OPTIONS]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    lines = [line.removeprefix("found: ") for line in done.stdout.splitlines() if line.startswith("found: ")]
    return {path: rest.split(" = ") for path, rest in (line.split(" = ", 1) for line in lines)}, done


@pytest.mark.parametrize("option", OPTIONS)
def test_a_planted_fault_is_found(planted, option):
    found, done = planted
    assert option in found, done.stderr
    assert found[option][0] == OPTIONS[option]


def test_the_command_names_what_moves_nothing_and_fails(planted):
    _, done = planted
    assert done.returncode == 1
    assert "stopped: these options move nothing: trainer.is_bold\n" in done.stderr


def test_choices_that_do_the_same_are_named(planted):
    assert planted[0]["trainer.lr_schedule"][1] == "constant and inverse_sqrt do the same"


def test_what_could_not_be_tried_says_what_the_audit_can_vary(planted):
    assert "it can vary whole numbers, numbers, " in planted[0]["trainer.strange"][1]
    assert "trainer.checked must be plain" in planted[0]["trainer.checked"][1]
