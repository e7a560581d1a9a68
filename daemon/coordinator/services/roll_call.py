"""The roll call: every node that Slurm has, or that Muster has heard from: verdict, leaf switch, jobs. Pure.

A node that Slurm has and from which no musterd was ever heard is UNHEARD: Muster gets no hardware signal from it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from muster.daemon.coordinator.core.state.durable_state import DurableState, Gang
from muster.daemon.coordinator.core.state.observed_state import ObservedGang, ObservedState
from muster.daemon.coordinator.core.state.state_tables import Verdict
from muster.daemon.coordinator.services.views import node_view
from muster.daemon.coordinator.slurm.roster import SlurmRoster
from muster.daemon.coordinator.slurm.watch import node_seen
from muster.slurm.client.types import GONE
from muster.v1 import api_pb2

UNHEARD = "UNHEARD"
"""What the roll call says of a node instead of FIT where no musterd was ever heard from it."""


def roll_call(
    state: DurableState, observed: ObservedState, roster: SlurmRoster, gangs: Iterable[Gang], now: float
) -> Iterator[api_pb2.NodeView]:
    """One view a node, in the order of the names. The jobs shown are those of `gangs`. `now` is the core's time.

    Durable state, sight and roster may change between two views.
    """
    jobs, leaves = _held(gangs, observed)
    heard = (name for name, seen in observed.nodes.items() if seen.incarnation)  # Slurm's answers make entries, too
    names = {*state.nodes, *heard, *roster.nodes, *jobs}
    for name in sorted(names, key=lambda name: (len(name), name)):
        view = node_view(state, observed, name, now)
        view.leaf = roster.leaf(name) or leaves.get(name, "")
        view.slurm_job_ids.extend(sorted(jobs.get(name, ())))
        if view.verdict == Verdict.FIT and not _ever_heard(state, observed, name):
            view.verdict = UNHEARD
            view.reason = f"no musterd was ever heard; {node_seen(name, roster.nodes.get(name, GONE)).text}"
        yield view


def _ever_heard(state: DurableState, observed: ObservedState, name: str) -> bool:
    node, seen = state.node(name), observed.nodes.get(name)
    return bool(node.boot_id or node.probe_address or (seen and seen.incarnation))


def _held(gangs: Iterable[Gang], observed: ObservedState) -> tuple[Mapping[str, Collection[int]], Mapping[str, str]]:
    """By node: the jobs of `gangs` that hold it now, and its leaf switch as its agents' admission found it."""
    jobs: dict[str, set[int]] = {}
    leaves: dict[str, str] = {}
    for gang in gangs:
        leaves.update({member.node: member.leaf for member in gang.members.values() if member.leaf})
        for name, job in _held_by(gang, observed.gangs.get(gang.id, ObservedGang())):
            jobs.setdefault(name, set()).add(job)
    return jobs, leaves


def _held_by(gang: Gang, seen: ObservedGang) -> Iterator[tuple[str, int]]:
    """The nodes that the gang's job and its small jobs hold, as Slurm or, for small jobs, their agents have told."""
    if gang.job_over or seen.job_ended:
        return
    if not seen.queued:
        yield from ((name, gang.job) for name in seen.job_nodes or gang.job_nodes)
    yield from ((m.node, m.job) for m in gang.members.values() if m.job != gang.job and not m.out)
