"""Runs on a Ray cluster: ranks and samplers as actors. Ray is imported when a run asks for it, and in no other case."""

from strop.runtime.cluster.driver import run_on_cluster

__all__ = ["run_on_cluster"]
