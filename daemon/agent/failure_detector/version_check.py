"""What this agent says of its version, and what follows from what others say of theirs.

If two agents do not fit each other, one of them may not fit the coordinator. That one carries no ranks, and the
coordinator takes its node out. The other one goes on: a node that joins a job must not end the ranks of its members.
"""

from __future__ import annotations

from collections.abc import Callable

from muster import compatibility
from muster.daemon.transport.fencing_timeouts import FENCING_TIMEOUTS_S
from muster.v1.common_pb2 import Release


class VersionCheck:
    """Compares this agent on `node` with the coordinator and the other agents. `found` is called with each misfit."""

    def __init__(self, node: str, found: Callable[[str], None]) -> None:
        self._side = compatibility.own_side(f"the agent on {node}", FENCING_TIMEOUTS_S)
        self._coordinator: compatibility.Side | None = None
        self._found = found
        self.release = compatibility.to_wire(self._side)

    def meet_coordinator(self, release: Release) -> None:
        """The coordinator has sent its first message. An older one says nothing of its version."""
        self._coordinator = compatibility.read("the coordinator", release)
        self._meet(self._coordinator)

    def meet_agent(self, node: str, release: Release) -> None:
        """The first ping of the agent on `node`, or its first answer, has come."""
        theirs = compatibility.read(f"the agent on {node}", release)
        if self._coordinator is None or not compatibility.misfit(self._coordinator, theirs):
            self._meet(theirs)

    def _meet(self, theirs: compatibility.Side) -> None:
        if reason := compatibility.misfit(self._side, theirs):
            self._found(reason)
