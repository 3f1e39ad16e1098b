"""Runs on a Ray cluster: ranks and samplers as actors. Ray is imported when a run asks for it, and in no other case."""
