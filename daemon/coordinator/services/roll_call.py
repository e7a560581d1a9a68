"""The roll call: health, leaf switch and jobs of every node that Slurm has or that Muster has heard from. Pure.

A node of Slurm is UNHEARD if no musterd of it was ever heard: Muster gets no hardware signals from the node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from muster.daemon.coordinator.core import resuming
from muster.daemon.coordinator.core.detection import failure_rate
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.limits import Limits
from muster.daemon.coordinator.core.state.observed_state import ObservedGang, ObservedState
from muster.daemon.coordinator.services.views import ever_heard, jobs_of, node_view, role_of
from muster.daemon.coordinator.slurm.roster import SlurmRoster
from muster.daemon.coordinator.slurm.watch import node_seen
from muster.node_health import RESUMABLE, NodeHealth
from muster.slurm.client.states import NodeState
from muster.slurm.client.types import GONE, Gone, Node
from muster.v1 import api_pb2

UNHEARD = "UNHEARD"
"""Shown in place of FIT for a node whose musterd was never heard."""


def roll_call(
    state: DurableState,
    observed: ObservedState,
    roster: SlurmRoster,
    gangs: Iterable[Gang],
    now: float,
    limits: Limits,
    *,
    of_all_jobs: bool = False,
    of_all_nodes: bool = True,
    only: str = "",
) -> Iterator[api_pb2.NodeView]:
    """One view per node, ordered by name. The views show the jobs of `gangs`. `now` is the core's time in seconds.
    `limits`: those of the site's policy. `of_all_jobs`: show the node checks of all jobs, also of those that have
    ended; otherwise of `gangs`. `of_all_nodes`: show all nodes; otherwise those that `gangs` hold.
    `only`: this node alone, if it is one of them; empty: all.

    Durable state, observed state and roster may change between two views.
    """
    listed = list(gangs)
    jobs, leaves, roles = _jobs_leaves_and_roles(listed, observed)
    readable_jobs = None if of_all_jobs else {job for gang in listed for job in jobs_of(gang)}
    names = {*known_nodes(state, observed, roster), *jobs} if of_all_nodes else set(jobs)
    if only:
        names &= {only}
    for name in sorted(names, key=lambda name: (len(name), name)):
        view = node_view(state, observed, name, now, readable_jobs)
        view.lemon = failure_rate.is_lemon(view.failures, limits.lemon_after)
        view.pod = observed.pod(name)
        if limits.resume_after_check and view.verdict in RESUMABLE:
            why_not = resuming.why_not(state, observed, limits, state.node(name), now)
            resumes = f"Muster does not resume it: {why_not}" if why_not else "Muster resumes it once it passes a check"
            view.reason = "; ".join(filter(None, (view.reason, resumes)))
        view.leaf = observed.leaf(name) or leaves.get(name, "")
        view.slurm_job_ids.extend(sorted(jobs.get(name, ())))
        view.role = roles.get(name, "absent")
        if shown_health(state, observed, name) == UNHEARD:
            view.verdict = UNHEARD
            unheard = f"no musterd was ever heard; {node_seen(name, roster.nodes.get(name, GONE)).text}"
            view.reason = "; ".join(filter(None, (view.reason, unheard)))
        elif not view.musterd_attached and (power := _power_words(roster.nodes.get(name, GONE))):
            view.reason = "; ".join(filter(None, (view.reason, power)))
        yield view


def _power_words(found: Node | Gone) -> str:
    """That Slurm has powered the node down, or powers it up: its daemon is not missed; empty: neither."""
    states = found.states if isinstance(found, Node) else ()
    if NodeState.POWERING_UP in states:
        return "Slurm powers it up"
    return "powered down by Slurm" if {NodeState.POWERED_DOWN, NodeState.POWERING_DOWN} & set(states) else ""


def known_nodes(state: DurableState, observed: ObservedState, roster: SlurmRoster) -> set[str]:
    """The nodes that Slurm has, and those that Muster has heard from."""
    heard = (
        name for name, seen in observed.nodes.items() if seen.incarnation
    )  # an answer of Slurm creates an entry, too
    return {*state.nodes, *heard, *roster.nodes}


def shown_health(state: DurableState, observed: ObservedState, name: str) -> str:
    """The health of a node, whatever jobs it carries; UNHEARD in place of FIT if no musterd of it was ever heard."""
    node = state.node(name)
    unheard = node.health is NodeHealth.FIT and not ever_heard(node, observed.nodes.get(name))
    return UNHEARD if unheard else node.health.value


def _jobs_leaves_and_roles(
    gangs: Iterable[Gang], observed: ObservedState
) -> tuple[Mapping[str, Collection[int]], Mapping[str, str], Mapping[str, str]]:
    """By node: the jobs of `gangs` that hold the node now, the leaf switch that its agents know, and what it does in
    these jobs."""
    jobs: dict[str, set[int]] = {}
    leaves: dict[str, str] = {}
    roles: dict[str, str] = {}
    for gang in gangs:
        leaves.update({member.node: member.leaf for member in gang.roster.members.values() if member.leaf})
        seated = {seat.node for seat in gang.roster.seats}
        for name, job in _nodes_held_by(gang, observed.gangs.get(gang.id, ObservedGang())):
            jobs.setdefault(name, set()).add(job)
            roles[name] = role_of(gang.roster.members.get(name), seated)
    return jobs, leaves, roles


def _nodes_held_by(gang: Gang, seen: ObservedGang) -> Iterator[tuple[str, int]]:
    """The nodes of the gang's job, as Slurm reports them, and of its pool jobs, as their agents report them."""
    if gang.slurm.job_over or seen.job_ended:
        return
    if not seen.job_pending:
        yield from ((name, gang.slurm.job) for name in seen.job_nodes or gang.slurm.job_nodes)
    yield from ((m.node, m.job) for m in gang.roster.members.values() if m.job != gang.slurm.job and not m.removed)
