"""What this agent says of its version, and what follows from what others say of theirs."""

from __future__ import annotations

from collections.abc import Callable

from muster import compatibility
from muster.daemon.transport.fencing_timeouts import FENCING_TIMEOUTS_S
from muster.v1.common_pb2 import Release


class VersionCheck:
    """Compares this agent on `node` with the coordinator and the other agents. `found` is called with each misfit."""

    def __init__(self, node: str, found: Callable[[str], None]) -> None:
        self._side = compatibility.own_side(f"the agent on {node}", FENCING_TIMEOUTS_S)
        self._found = found
        self.release = compatibility.to_wire(self._side)

    def meet_coordinator(self, release: Release) -> None:
        """The coordinator has sent its first message. An older one says nothing of its version."""
        self._meet(compatibility.read("the coordinator", release))

    def meet_agent(self, node: str, release: Release) -> None:
        """The first ping of the agent on `node`, or its first answer, has come."""
        self._meet(compatibility.read(f"the agent on {node}", release))

    def _meet(self, theirs: compatibility.Side) -> None:
        if reason := compatibility.misfit(self._side, theirs):
            self._found(reason)
