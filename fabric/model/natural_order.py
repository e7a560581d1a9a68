"""The order in which people count names that end in numbers."""

from __future__ import annotations

import re
from functools import lru_cache


@lru_cache(maxsize=65_536)  # all nodes of a large site: they are sorted often
def natural_order(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key under which n2 comes before n10. Numbers may have any length."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return tuple(_number(part) if part[0] in "0123456789" else (1, 0, part) for part in parts)


def _number(digits: str) -> tuple[int, int, str]:
    # Of two numbers without leading zeros, the one with more digits is larger. Python refuses to read very long ones.
    digits = digits.lstrip("0")
    return 0, len(digits), digits
