"""Rounds of probes: whom they ask about a suspected node, and what the answers show.

The coordinator's own two probes (agent, musterd) are one witness. Two other agents are the other witnesses. A node is
LOST only if all of them find it silent and its gang makes no step. An agent that answers any witness is alive.
"""

from enum import StrEnum

from muster.daemon.coordinator.core.state.events import Silence
from muster.daemon.coordinator.core.state.observed_state import AGENT, MUSTERD, Probe
from muster.daemon.coordinator.core.state.roster import Member
from muster.daemon.coordinator.core.turn import placement
from muster.daemon.coordinator.core.turn.turn import GangTurn, ProbeRequest

PROBE_TIMEOUT_S = 0.75
"""Seconds that a probe waits for an answer. A busy but healthy node answers in time. The wait is part of every
detection of a silent node, so it is short."""
CLOSED_PROBE_TIMEOUT_S = 0.4
"""Seconds that a probe waits if the node's own kernel has closed the agent's connections. The probe only confirms."""
LATE_ANSWER_S = 0.35
"""Seconds after the timeout of a probe in which a witness's answer may still arrive. Then the round is repeated."""


class ProbeResult(StrEnum):
    """What a round of probes shows."""

    ALIVE = "alive"  # the agent answered a witness
    AGENT_ENDED = "agent ended"  # musterd answers; the agent's process has ended
    AGENT_MUTE = "agent mute"  # musterd answers; the agent does not
    HUNG = "hung"  # the kernel answers; no process does
    LOST = "lost"  # nothing answers
    OPEN = "open"  # undecided: answers are missing, or the gang makes steps


def evaluate(probe: Probe, moved_at: float, daemon_lives: bool = False) -> ProbeResult:
    """Return what `probe` shows.

    Args:
        moved_at: when the gang last reported a new step (seconds).
        daemon_lives: the node's daemon was heard on its own stream meanwhile, whatever the probe of it has met.
    """
    about_agent = [s for w, s in probe.silence_by_witness.items() if w != MUSTERD]
    if any(s is None for s in about_agent):
        return ProbeResult.ALIVE
    if not probe.complete:
        return ProbeResult.OPEN
    if moved_at > probe.asked_at:
        return ProbeResult.OPEN  # a synchronous step needs every rank: the witnesses are cut off, not the node
    if probe.silence_by_witness[MUSTERD] is None or daemon_lives:
        ended = all(s is Silence.CLOSED for s in about_agent)
        return ProbeResult.AGENT_ENDED if ended else ProbeResult.AGENT_MUTE
    return ProbeResult.HUNG if Silence.KERNEL_ONLY in probe.silence_by_witness.values() else ProbeResult.LOST


def start_if_due(gang_turn: GangTurn, member: Member) -> None:
    """Start a round about a suspected member, unless one is under way. A witness that has not answered in the round
    before is suspected, too."""
    seen, now = gang_turn.observed, gang_turn.now
    probe = seen.probes.get(member.node)
    timeout_s = CLOSED_PROBE_TIMEOUT_S if member.node in seen.closed_by else PROBE_TIMEOUT_S
    if probe is not None:
        due = probe.asked_at + timeout_s + (0.0 if probe.complete else LATE_ANSWER_S)
        if now < due:
            gang_turn.turn.tick_at(due)
            return
        for mute in (w for w in probe.witnesses if w not in probe.silence_by_witness and w not in (AGENT, MUSTERD)):
            seen.suspected_since.setdefault(mute, now)
            gang_turn.turn.tick_at(now)  # it is probed next
    asked = (AGENT, MUSTERD, *_other_witnesses(gang_turn, member.node))
    address = gang_turn.turn.state.node(member.node).probe_address
    number = request(gang_turn, member, asked, address, timeout_s)
    seen.probes[member.node] = Probe(number, member.node, asked, now)
    gang_turn.turn.tick_at(now + timeout_s + LATE_ANSWER_S)


def _other_witnesses(gang_turn: GangTurn, node: str) -> list[str]:
    away, suspected = gang_turn.index.unattached, gang_turn.observed.suspected_since
    present = gang_turn.index.in_fabric_order(gang_turn.fabric)
    candidates = (one for one in present if one not in away and one not in suspected)
    return placement.witnesses(gang_turn.fabric, candidates, node, 2)


def request(
    gang_turn: GangTurn, member: Member, witnesses: tuple[str, ...], probe_address: str, deadline_s: float
) -> int:
    """Have the witnesses probe the node of a member. Returns the number of the probe."""
    gang_turn.turn.observed.last_probe_number += 1
    number = gang_turn.turn.observed.last_probe_number
    gang_turn.turn.outcome.probe_requests.append(
        ProbeRequest(number, gang_turn.gang.id, member.node, witnesses, member.peer_address, probe_address, deadline_s)
    )
    return number
