"""What one round of probes shows. A pure function of the witnesses and their answers.

The coordinator's own two probes (agent, musterd) are one witness. Two other agents are the other witnesses. A node is
LOST only if all of them find it silent and its gang makes no step. An agent that answers any witness is alive.
"""

from enum import StrEnum

from muster.daemon.coordinator.core.state.events import Silence
from muster.daemon.coordinator.core.state.observed_state import COORDINATOR, MUSTERD, Probe


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


def process_ended(closed: set[str], others: int) -> bool:
    """Whether the agent's process has ended for certain, and its ranks with it.

    The kernel of the node itself must have closed the agent's connections to the coordinator and to two other agents
    (to fewer only if the gang has fewer).

    Args:
        closed: witnesses whose connection was closed.
        others: number of other agents in the gang.
    """
    return COORDINATOR in closed and len(closed - {COORDINATOR}) >= min(2, others)
