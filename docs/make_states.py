"""Writes docs/STATES.md from the coordinator's tables: python docs/make_states.py > docs/STATES.md"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from enum import StrEnum

from muster.daemon.coordinator.core.state.state_tables import EARLY_ENDS, FINAL, GANG_TRANSITIONS, Phase
from muster.node_health import NODE_TRANSITIONS, NodeHealth

_MEMBER = re.compile(r'^ +(\w+) = "\w+"(?:  # (.*))?$', re.MULTILINE)

HEAD = """# States

`docs/make_states.py` makes this page from `daemon/coordinator/core/state/state_tables.py` and
`src/muster/node_health.py`. A transition that is not listed here is a bug: the coordinator refuses it.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    parts += _section("A gang", Phase, GANG_TRANSITIONS, start=Phase.SUBMITTED)
    parts += _section("A node", NodeHealth, NODE_TRANSITIONS, start=NodeHealth.FIT)
    return "\n".join(parts)


def _section(
    title: str, states: type[StrEnum], moves: Mapping[StrEnum, frozenset[StrEnum]], start: StrEnum
) -> Iterator[str]:
    yield f"## {title}\n"
    yield "| state | means |"
    yield "| --- | --- |"
    words = dict(_MEMBER.findall(inspect.getsource(states)))
    for state in states:
        yield f"| {state} | {words[state.name] or ('final' if state in FINAL else 'no fault is known')} |"
    yield "\n```mermaid"
    yield "stateDiagram-v2"
    yield f"    [*] --> {start}"
    for state in states:
        for after in states:
            # Every gang may be cut short at any moment: one line of text says so for all states.
            if after in moves[state] and after not in EARLY_ENDS:
                yield f"    {state} --> {after}"
    yield "```\n"
    if states is Phase:
        yield f"Every state that is not final also leads to: {', '.join(sorted(EARLY_ENDS))}.\n"


if __name__ == "__main__":
    print(page(), end="")
