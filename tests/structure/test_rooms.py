"""The two measured habits of a codebase that stays readable: rooms import one way only, and nothing grows without end.

The rooms, lowest first: products, layers, types, config, ops, algorithms, data, compat, rewards, rollout, then engines and
trainers (which never meet), observe, simulate, runtime, cli. The checker reads imports with ast and is itself checked on
planted code.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ["strop", "tests", "examples", "tools", "benchmarks"]
MAX_FILE_LINES, MAX_BODY_LINES = 600, 80

_MATHEMATICS = {"types", "config", "ops", "algorithms"}
_EVERYTHING = _MATHEMATICS | {
    "products",
    "layers",
    "data",
    "rewards",
    "rollout",
    "engines",
    "trainers",
    "observe",
    "runtime",
    "compat",
}
MAY_IMPORT = {
    "products": set(),
    "layers": {"products"},
    "types": set(),
    "config": {"types"},
    "ops": {"products"},
    "interrupts": set(),
    "algorithms": {"config", "types", "ops"},
    "data": _MATHEMATICS,
    "compat": {"types", "config", "ops"},
    "rewards": _MATHEMATICS | {"data", "compat"},
    "rollout": _MATHEMATICS | {"data", "rewards", "compat"},
    "engines": {"types", "config", "data", "products"},
    "trainers": _MATHEMATICS | {"data", "products"},
    "observe": {"types", "config"},
    "simulate": {"types", "config", "observe"},
    "runtime": _EVERYTHING | {"interrupts"},
    "cli": _EVERYTHING | {"interrupts", "simulate"},
}
FREE = {"", "__main__"}  # strop/__init__.py and python -m strop: the front door
HEAVY = {"vllm", "sglang", "ray", "megatron", "wandb"}
TORCH = {"torch", "transformers", "numpy"}


def room_of(path, package):
    """The room that a file of the package lives in, "" for the package's own __init__."""
    parts = path.relative_to(package).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


def imported(node, path, package):
    """Dotted names of modules that an import statement names, relative ones made absolute."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        here = (package.name, *path.relative_to(package).parent.parts)
        base = ".".join((*here[: len(here) - node.level + 1], *([base] if base else [])))
    # `from strop import ops` names a room by its alias
    return [f"{base}.{alias.name}" for alias in node.names] if base == package.name else [base]


def is_type_checking(node):
    test = node.test if isinstance(node, ast.If) else None
    return isinstance(test, ast.Name | ast.Attribute) and ast.unparse(test).endswith("TYPE_CHECKING")


def imports(tree, *, at_import_time):
    """Import statements: all that run, or only those that run when the module is imported."""
    waiting = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif is_type_checking(node):
            waiting += node.orelse
        elif not (at_import_time and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
            waiting += ast.iter_child_nodes(node)


def wrong_imports(package):
    """What breaks the direction, one sentence each. Imports for type checkers alone (TYPE_CHECKING) do not count."""
    found = []
    for path in sorted(package.rglob("*.py")):
        room, tree = room_of(path, package), ast.parse(path.read_text())
        name = path.relative_to(package.parent)
        for node in imports(tree, at_import_time=False):
            for module in imported(node, path, package):
                top, _, rest = module.partition(".")
                other = rest.partition(".")[0]
                if top != package.name or room in FREE or other in ("", room, "__version__"):
                    continue
                if room not in MAY_IMPORT:
                    found.append(f"{name}: {room} is not a room of the table")
                elif other not in MAY_IMPORT[room]:
                    found.append(f"{name}:{node.lineno}: {room} imports {other}")
        for node in imports(tree, at_import_time=True):
            for top in {module.partition(".")[0] for module in imported(node, path, package)}:
                if top in HEAVY:
                    found.append(f"{name}:{node.lineno}: {top} is imported at module level")
                if top in TORCH and room in ("types", "config", "", "cli"):
                    found.append(f"{name}:{node.lineno}: {room or 'strop'} imports {top} at run time")
    return found


def too_long(folder):
    """Files and function bodies over the limit. A docstring is no part of a body."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        text, name = path.read_text(), path.relative_to(folder.parent)
        if len(text.splitlines()) > MAX_FILE_LINES:
            found.append(f"{name}: {len(text.splitlines())} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) is not None else node.body
                length = body[-1].end_lineno - body[0].lineno + 1 if body else 0
                if length > MAX_BODY_LINES:
                    found.append(f"{name}:{node.lineno}: {node.name} has {length} lines")
    return found


# ---- the codebase ---------------------------------------------------------------------------------------------------


def test_rooms_import_only_rooms_below_them():
    assert wrong_imports(ROOT / "strop") == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_file_and_no_function_is_too_long(folder):
    assert too_long(ROOT / folder) == []


def test_the_table_of_rooms_has_no_circle():
    done = set()
    while len(done) < len(MAY_IMPORT):
        ready = {room for room, below in MAY_IMPORT.items() if below - {room} <= done and room not in done}
        assert ready, f"these rooms need one another: {set(MAY_IMPORT) - done}"
        done |= ready


def test_the_mathematics_works_with_nothing_but_torch():
    program = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in set("pydantic transformers click rich tomlkit safetensors pyarrow jinja2".split()):
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Block())
import torch
before = set(sys.modules)
import strop.ops
zero = torch.zeros(1)
assert strop.ops.ppo_clip(zero, zero, zero + 1, eps_clip=0.2).loss.item() == -1
new = {name.partition(".")[0] for name in set(sys.modules) - before}
assert new - set(sys.stdlib_module_names) <= {"strop", "torch"}, new
assert not {n for n in sys.modules if n.startswith("strop.") and not n.startswith(("strop.ops", "strop.products"))}
try:
    import pydantic
except ImportError:
    print("fine")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "fine", done.stderr


# ---- the checker itself ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file, code, complaint",
    [
        ("ops/kl.py", "from strop.config import KLOptions", "ops imports config"),
        ("config/load.py", "import strop.ops.kl", "config imports ops"),
        ("types.py", "from strop import config", "types imports config"),
        ("engines/torch.py", "from strop.trainers.torch import Trainer", "engines imports trainers"),
        ("trainers/torch.py", "def f():\n    from strop.engines import Engine", "trainers imports engines"),
        ("engines/torch.py", "from ..trainers import Trainer", "engines imports trainers"),
        ("engines/torch.py", "from .. import trainers", "engines imports trainers"),
        ("engines/torch.py", "try:\n    import strop.ops\nexcept ImportError:\n    pass", "engines imports ops"),
        ("data/batch.py", "class A:\n    import strop.rewards", "data imports rewards"),
        ("observe/report.py", "from strop.runtime.loop import run", "observe imports runtime"),
        ("runtime/loop.py", "from strop.cli import main", "runtime imports cli"),
        ("trackers/wandb.py", "import strop.types", "trackers is not a room of the table"),
        ("engines/vllm.py", "import vllm", "vllm is imported at module level"),
        ("runtime/ray.py", "from ray.util import placement_group", "ray is imported at module level"),
        ("observe/wandb.py", "if True:\n    import wandb.sdk", "wandb is imported at module level"),
        ("config/base.py", "import torch", "config imports torch at run time"),
        ("types.py", "from torch import Tensor", "types imports torch at run time"),
        ("cli.py", "import transformers", "cli imports transformers at run time"),
    ],
)
def test_a_planted_wrong_import_is_caught(tmp_path, file, code, complaint):
    path = tmp_path / "strop" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code + "\n")
    assert [line.partition(": ")[2] for line in wrong_imports(tmp_path / "strop")] == [complaint]


@pytest.mark.parametrize(
    "file, code",
    [
        ("types.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor"),
        ("config/a.py", "import typing\nif typing.TYPE_CHECKING:\n    import torch\nfrom strop.config.b import c"),
        ("engines/vllm.py", "def start():\n    import vllm\n    return vllm"),
        ("cli.py", "def train():\n    import torch\n    from strop.runtime import run"),
        ("ops/kl.py", "import torch\nfrom .policy_loss import MAX"),
        ("__init__.py", "from strop.runtime import train"),
    ],
)
def test_a_right_import_is_not_complained_of(tmp_path, file, code):
    path = tmp_path / "strop" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code + "\n")
    assert wrong_imports(tmp_path / "strop") == []


@pytest.mark.parametrize(
    "header, lines, caught",
    [
        ("def f():", 80, False),
        ("def f():", 81, True),
        ("async def f():", 81, True),
        ('def f():\n    """' + "word\n    " * 50 + '"""', 80, False),  # a docstring is no part of the body
        ("class A:\n  def f(self):", 81, True),
        ("def outer():\n  def f(self):", 81, True),
    ],
)
def test_a_planted_long_function_is_caught(tmp_path, header, lines, caught):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text(header + "\n" + "    x = 1\n" * lines)
    assert bool(too_long(tmp_path / "code")) == caught


@pytest.mark.parametrize("lines, caught", [(600, False), (601, True)])
def test_a_planted_long_file_is_caught(tmp_path, lines, caught):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("x = 1\n" * lines)
    assert bool(too_long(tmp_path / "code")) == caught
