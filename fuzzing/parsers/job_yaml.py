"""A job in YAML. It is refused with its place, or gives plain values: none is shared or larger than its text."""

from __future__ import annotations

import json
from typing import Any

from muster.daemon.host import toml_text
from muster.launcher.spec.yaml_text import YamlError, loads


def check(data: bytes) -> None:
    """`data` as the text of a job.yaml."""
    text = data.decode(errors="replace")
    try:
        table = loads(text)
    except YamlError as error:
        assert str(error)
        assert len(str(error)) <= 400
        return
    inner = list(_containers(table, 0))
    assert len({id(value) for value in inner}) == len(inner)
    assert len(json.dumps(table, allow_nan=True)) <= 100 + 30 * len(text)


def _containers(value: Any, level: int) -> list[Any]:
    """All tables and lists in `value`, itself too. Other values are of the kinds that TOML and YAML agree on."""
    assert level <= toml_text.MAX_LEVELS
    if isinstance(value, dict):
        assert all(isinstance(key, str) for key in value)
        parts = list(value.values())
    elif isinstance(value, list):
        parts = value
    else:
        assert value is None or type(value) in (bool, int, float, str)
        return []
    return [value, *(found for part in parts for found in _containers(part, level + 1))]
