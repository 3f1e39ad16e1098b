"""`strop audit`: turn every option of a config, one at a time, and see what that moves in a small run."""

from strop.runtime.audit.audit import audit, check_only
from strop.runtime.audit.finding import FAILURES, Finding

__all__ = ["FAILURES", "Finding", "audit", "check_only"]
