"""Addresses of servers among the options."""

from __future__ import annotations

from urllib.parse import urlsplit


def is_address(place: str) -> bool:
    """True for the address of an engine, false for a model folder or name."""
    return place.lower().startswith(("http://", "https://"))


def is_host_and_port(address: str) -> bool:
    """True for http://host:port without user, path or query."""
    try:
        parts = urlsplit(address)
        return (
            bool(parts.hostname)
            and not parts.username
            and parts.port != 0
            and not (parts.path.strip("/") or parts.query or parts.fragment)
        )
    except ValueError:  # a port that is no number
        return False
