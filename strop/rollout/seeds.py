"""Seeds of samples: a function of what is sampled, never of when or beside what."""

from __future__ import annotations

_MASK = (1 << 64) - 1


def mix_seed(*parts: int) -> int:
    """One 63-bit seed from several integers; different parts give unrelated seeds.

    >>> mix_seed(0, 1) == mix_seed(0, 1), mix_seed(0, 1) == mix_seed(1, 0)
    (True, False)
    """
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = _splitmix(state ^ (part & _MASK))
    return state >> 1


def _splitmix(x: int) -> int:
    """One step of SplitMix64 (Steele et al. 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
