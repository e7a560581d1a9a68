"""Long JSON is read without blocking the event loop."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.slurm.client.parsing.json_stream import RECORDS_PER_STEP, records

VALUES = st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3))


async def read(text: str, key: str) -> list[Any]:
    return [record async for record in records(text, key)]


@given(before=VALUES, jobs=st.lists(VALUES), indent=st.none() | st.integers(0, 4))
def test_gives_what_json_loads_gives(before: Any, jobs: list[Any], indent: int | None) -> None:
    document = {"before": before, "jobs": jobs, "after": {"jobs": [1]}}
    assert asyncio.run(read(json.dumps(document, indent=indent), "jobs")) == jobs


@pytest.mark.parametrize("text", ["", "  ", "[]", "{}", '{"jobs": 3}', '{"jobs": [1, 2', "slurm says no"])
async def test_another_json_value_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"JSON|Expecting"):
        await read(text, "jobs")


async def test_other_tasks_run_meanwhile() -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    await read(json.dumps({"jobs": list(range(RECORDS_PER_STEP * 10))}), "jobs")
    task.cancel()
    assert turns >= 10
