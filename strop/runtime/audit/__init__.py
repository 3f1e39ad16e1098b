"""`strop audit`: turn every option of a config, one at a time, and see what that moves in a small run."""

from strop.runtime.audit.audit import FAILURES, Finding, audit, check_only

__all__ = ["FAILURES", "Finding", "audit", "check_only"]
