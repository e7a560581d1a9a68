"""The order in which people count names that end in numbers."""

from __future__ import annotations

import re
from functools import lru_cache


@lru_cache(maxsize=65_536)  # all nodes of a large site: they are sorted often
def natural_order(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key under which n2 comes before n10."""
    parts = re.findall(r"\d+|\D+", name)
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts)
