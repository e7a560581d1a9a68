"""Agents that are killed at a named point between a snapshot and its commit. Each point has another loss to survive."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from muster.simulator.world.agent import Agent


class SnapshotPoint(StrEnum):
    """Where an agent can be killed."""

    FILLED = "its ranks have filled their slots"
    COPIED = "its shards are in their places, and it has not heard so"
    STORED = "it knows that its copies are stored, and has told nobody"
    REPORTED = "the commit leader has counted its report"
    DECIDED = "it has decided about a version, and told nobody"
    TOLD = "it has heard a decision"


@dataclass(slots=True)
class SnapshotCrash:
    """The agent that passes a point for the `passages`-th time from now on is killed there.

    `powers_off`: its node loses its power instead, and with it all copies.
    """

    gang: str
    point: SnapshotPoint
    passages: int = 1
    powers_off: bool = False


class SnapshotCrashes:
    """The crashes that have not happened yet."""

    def __init__(self) -> None:
        self._armed: list[SnapshotCrash] = []

    def arm(self, crash: SnapshotCrash) -> None:
        """Kill an agent as `crash` says."""
        self._armed.append(crash)

    def is_killed(self, agent: Agent, point: SnapshotPoint) -> bool:
        """An agent passes a point. Returns whether it ends there."""
        if not agent.is_running():
            return False
        for crash in self._armed:
            if (crash.gang, crash.point) != (agent.identity.gang, point):
                continue
            crash.passages -= 1
            if crash.passages:
                continue
            self._armed.remove(crash)
            world = agent.world
            world.coverage.count("fault", "snapshot crash")
            if crash.powers_off:
                world.note(f"FAULT: {agent.node} loses its power: {point}")
                world.power_off(agent.node, closes=False)
            else:
                world.note(f"FAULT: the agent on {agent.node} is killed: {point}")
                world.end_agent(agent)
            return True
        return False
