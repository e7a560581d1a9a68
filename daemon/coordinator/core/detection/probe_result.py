"""From a round of probes to a finding. A pure function of who was asked and who answered.

The coordinator's own two probes (agent, musterd) are one witness, two other agents are the others. A node is called
lost only when all of them find it silent and its gang does not move; an agent that answers anyone clears it.
"""

from enum import StrEnum

from muster.daemon.coordinator.core.state.events import Silence
from muster.daemon.coordinator.core.state.observed_state import COORDINATOR, MUSTERD, Probe


class ProbeResult(StrEnum):
    """What a round of probes shows."""

    ALIVE = "alive"  # the agent answered somebody
    AGENT_ENDED = "agent ended"  # musterd answers, the agent's process has ended
    AGENT_MUTE = "agent mute"  # musterd answers, the agent does not
    HUNG = "hung"  # the kernel answers, its processes don't
    LOST = "lost"  # nothing answers
    OPEN = "open"  # answers are missing, or the gang moves: nothing follows


def evaluate(probe: Probe, moved_at: float) -> ProbeResult:
    """What `probe` shows, with `moved_at` the time at which the gang last declared a new step."""
    about_agent = [s for w, s in probe.silence_by_witness.items() if w != MUSTERD]
    if any(s is None for s in about_agent):
        return ProbeResult.ALIVE
    if not probe.complete:
        return ProbeResult.OPEN
    if moved_at > probe.asked_at:
        return ProbeResult.OPEN  # synchronous training moves only with every rank: the silence is the witnesses' own
    if probe.silence_by_witness[MUSTERD] is None:
        ended = all(s is Silence.CLOSED for s in about_agent)
        return ProbeResult.AGENT_ENDED if ended else ProbeResult.AGENT_MUTE
    return ProbeResult.HUNG if Silence.KERNEL_ONLY in probe.silence_by_witness.values() else ProbeResult.LOST


def process_ended(closed: set[str], others: int) -> bool:
    """The agent's process has ended for certain: the node's own kernel closed its connections to the coordinator and to
    two other agents (fewer only where there are fewer), so its ranks have ended with it."""
    return COORDINATOR in closed and len(closed - {COORDINATOR}) >= min(2, others)
