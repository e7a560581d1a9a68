"""What the screen knows: the newest of each kind of message, and how old it is. Pure; `receive` takes one message."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from muster.launcher.output.job_lines import by_number
from muster.launcher.output.tables import conditions
from muster.launcher.top.messages import Message
from muster.v1.api_pb2 import EventRecord, GangView, ListReply, NodesReply, NodeView, RankView

EVENTS_KEPT = 500
"""Events of a job that the screen can show. `muster events` prints all."""
_STATES = {"exited": 0, "absent": 1, "starting": 2, "running": 3}
"""Troubled first."""


class Job:
    """One view of a job, and what is computed of it once."""

    def __init__(self, view: GangView, at_s: float) -> None:
        self.view, self.at_s = view, at_s

    @cached_property
    def ranks(self) -> Sequence[RankView]:
        """The troubled first: what does not run, then the slow, then those behind."""
        return sorted(
            self.view.ranks,
            key=lambda rank: (
                _STATES.get(rank.state, 1) if rank.state != "exited" or rank.exit_code else len(_STATES),
                -rank.slower_by,
                rank.step,
                rank.rank,
            ),
        )

    @cached_property
    def conditions(self) -> Sequence[tuple[str, str]]:
        """What is unusual, each with its label."""
        return list(conditions(self.view))

    @cached_property
    def rank_states(self) -> Counter[str]:
        """How many ranks are in each state; "slow" counts stragglers."""
        return Counter(rank.state for rank in self.view.ranks) + Counter(
            slow=sum(rank.slower_by > 0 for rank in self.view.ranks)
        )


@dataclass(slots=True)
class Known:
    """All that was received, and why nothing comes now."""

    jobs: dict[str, Job] = field(default_factory=dict)
    """By gang id."""
    events: dict[str, deque[EventRecord]] = field(default_factory=dict)
    """By gang id, the newest first."""
    nodes: Sequence[NodeView] = ()
    nodes_at_s: float = 0.0
    names: dict[int, str] = field(default_factory=dict)
    """By Slurm job: the name of the gang."""
    listed: tuple[str, ...] = ()
    """The gang ids of the newest list of jobs."""
    listed_at_s: float = 0.0
    trouble: str = ""
    """Why nothing comes; empty: messages come."""
    received: int = 0
    """Messages so far."""

    def receive(self, message: Message) -> None:
        """Take a message."""
        self.received += 1
        match message.content:
            case str(words):
                self.trouble = words
                return
            case GangView() as view:
                self.jobs[view.gang_id] = Job(view, message.at_s)
            case EventRecord() as record:
                if not record.sentinel:
                    self.events.setdefault(record.gang_id, deque(maxlen=EVENTS_KEPT)).appendleft(record)
            case ListReply() as reply:
                self.jobs.update((view.gang_id, Job(view, message.at_s)) for view in reply.gangs)
                self.listed, self.listed_at_s = tuple(view.gang_id for view in reply.gangs), message.at_s
                self.names = {id: view.name for view in reply.gangs for id in view.slurm_job_ids}
            case NodesReply() as reply:
                self.nodes, self.nodes_at_s = reply.nodes, message.at_s
        self.trouble = ""

    @property
    def all_jobs(self) -> list[Job]:
        """The jobs of the newest list, those that go on first."""
        found = [self.jobs[id] for id in self.listed]
        return sorted(found, key=lambda job: by_number(job.view))

    def events_of(self, gang_id: str) -> Sequence[EventRecord]:
        """The events of a job, the newest first."""
        return list(self.events.get(gang_id, ()))

    def jobs_of(self, node: NodeView) -> str:
        """The jobs that have a node, with their names where the reader has them."""
        return " ".join(f"{id} {self.names[id]}" if id in self.names else str(id) for id in node.slurm_job_ids)
