"""Rules for slime's flags of SGLang servers that are there already."""

from __future__ import annotations

from strop.compat.import_slime.draft import Draft, Given
from strop.config.addresses import is_host_and_port

_FLAGS = ("--rollout-external", "--rollout-external-engine-addrs")


def servers(given: Given, draft: Draft) -> None:
    """Servers that slime is given become those of the engine sglang; without them the run samples by the engine torch."""
    flags = tuple(flag for flag in _FLAGS if given.has(flag))
    if not flags:
        return
    named = [word for word in given.flags[_FLAGS[1]].values if word] if given.has(_FLAGS[1]) else []
    addresses = [word if "://" in word else f"http://{word}" for word in named]
    if not addresses or any(not is_host_and_port(address) for address in addresses):
        for flag in flags:
            draft.without(flag, "names no servers as host:port; the run samples by the engine torch.")
        return
    words = "start them with --enable-deterministic-inference, or set engine.deterministic to false"
    draft.set("engine.kind", "sglang", *flags)
    draft.set("engine.addresses", addresses, *flags, words=words)


RULES = {servers: " ".join(_FLAGS)}
