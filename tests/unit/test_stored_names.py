"""Stored names: what the journal stores does not change when a class or a field gets a new name.

`golden/stored_names.txt` holds one line for each fact, for the durable state and for each event: the stored class name,
and the JSON with every field set. It was written before any class or field was renamed. A new field is added to its
line; nothing else of a line ever changes. The fields of a gang may come in another order: its records do.
"""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from muster.daemon.coordinator.core.state import durable_state, events, facts, gang, generations, roster, slurm_jobs
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.stored_names import STORED_CLASSES, STORED_FIELDS, stored_class, stored_field

LINES = (Path(__file__).parent / "golden" / "stored_names.txt").read_text().splitlines()
EVENTS: dict[str, type[events.Event]] = {stored_class(kind): kind for kind in events.Event.__args__}
CLASSES = {
    name: kind
    for module in (events, facts, durable_state, gang, generations, roster, slurm_jobs)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and is_dataclass(kind)
}


@pytest.mark.parametrize("line", LINES, ids=[line.split(" ", 1)[0] for line in LINES])
def test_what_was_stored_is_read_and_stored_the_same(line: str) -> None:
    name, text = line.split(" ", 1)
    if name in facts.FACTS:
        assert facts.encode(facts.decode(name, text)) == (name, text)
    elif name == "DurableState":
        assert json.loads(DurableState.load(text).dump()) == json.loads(text)
    else:
        event = TypeAdapter(EVENTS[name]).validate_json(text)
        assert events.stored_text(event) == line


def test_every_stored_class_has_a_line() -> None:
    assert {line.split(" ", 1)[0] for line in LINES} == {*facts.FACTS, "DurableState", *EVENTS}


def test_every_row_of_the_table_is_of_use() -> None:
    """Its class and field exist, and the stored name stands in a line."""
    stored = "\n".join(LINES)
    for name, stored_name in STORED_CLASSES.items():
        assert name != stored_name
        assert name in CLASSES
        assert f"\n{stored_name} " in f"\n{stored}"
    for name, renamed in STORED_FIELDS.items():
        present = {field.name for field in fields(CLASSES[name])}
        for field, alias in renamed.items():
            assert field != alias
            assert field in present
            assert alias not in present
            assert f'"{alias}":' in stored


def test_a_gang_has_records_of_a_bearable_size_that_share_no_stored_name() -> None:
    """A snapshot holds the fields of all records side by side."""
    kinds = [gang.Gang, *durable_state.RECORDS.values()]
    assert max(len(fields(kind)) for kind in kinds) <= 25
    stored = [stored_field(kind, one.name) for kind in kinds for one in fields(kind)]
    assert sorted(stored) == sorted(set(stored))
