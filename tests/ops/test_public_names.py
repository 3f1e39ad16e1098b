"""`strop.ops` as others import it: every public function under one name, with torch alone."""

import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

from strop import ops

# Shared pieces, public between the files of the room and of no use outside it.
INSIDE = {"checked", "checked_band", "clamped_log_ratio"}
INSIDE |= {"checked_sequences", "sequence_sum", "sequence_mean", "zero_where_masked", "GroupStatistics"}
INSIDE |= {"discounted_sums", "next_values", "VocabularyPart", "summary", "merged", "outcome", "log_softmax_", "add_at"}


def public_names():
    """Functions and classes without an underscore, of every file of the room."""
    for module in pkgutil.walk_packages(ops.__path__, "strop.ops."):
        for name, value in vars(importlib.import_module(module.name)).items():
            is_own = (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module.name
            if is_own and not name.startswith("_"):
                yield name, value


def test_every_public_function_is_a_name_of_strop_ops():
    found = {name: value for name, value in public_names() if name not in INSIDE}
    assert len(found) > 30
    assert {name for name, value in found.items() if vars(ops).get(name) is not value} == set()
    assert set(found) | {"DEFAULT_MAX_DIVERGENCE", "MAX_LOG_RATIO"} == set(ops.__all__)


def test_strop_ops_needs_torch_alone():
    script = """
import sys

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("transformers", "pydantic", "safetensors", "tokenizers"):
            raise ImportError(name)

sys.meta_path.insert(0, Refusing())
import torch
import strop.ops
print(round(strop.ops.reinforce(torch.tensor([-0.5]), torch.tensor([2.0])).loss.item(), 3))
try:
    import pydantic
except ImportError:
    print("refused")
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root, timeout=120)
    assert done.stdout.split() == ["1.0", "refused"], done.stderr
