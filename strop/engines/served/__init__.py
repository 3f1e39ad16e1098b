"""Servers as an engine, whatever they run: what vLLM's and SGLang's have in common."""
