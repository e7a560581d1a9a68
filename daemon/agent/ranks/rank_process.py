"""One rank of one generation on this node, from its start to the end of all that it has started."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass

from muster.daemon.host import packets, process_tree
from muster.v1.agent_pb2 import RankPhase, RankStatus

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankId:
    """Which rank this is."""

    rank: int
    local_rank: int
    generation: int

    @property
    def key(self) -> str:
        """Its name towards the warm process."""
        return f"rank {self.rank} of generation {self.generation}"


class RankProcess:
    """A rank as its warm process tells of it. `changed` is called after every change worth a status.

    alive: a process of it, or one that it has started, may still be there.
    forked: a warm process was told to fork it. Before that there is nothing to kill, and nothing to wait for.
    doomed: it has been (or, when its pid is known, will be) sent SIGKILL.
    refused: why it could not begin, for the user; empty: it could.
    """

    def __init__(self, identity: RankId, changed: Callable[[], None]) -> None:
        self.id = identity
        self.alive = True
        self.forked = False
        self.kill_requested = False
        self.start_error = ""
        self._changed = changed
        self._phase = RankPhase.RANK_PHASE_STARTING
        self._pid = 0
        self._exit_code = 0
        self._tail = ""

    def status(self, step: int | None) -> RankStatus:
        """Its whole status; `step` is the newest step that it has declared, None before the first."""
        return RankStatus(
            rank=self.id.rank,
            local_rank=self.id.local_rank,
            generation=self.id.generation,
            phase=self._phase,
            exit_code=self._exit_code,
            stderr_tail=self._tail,
            step=step or 0,
            progressed=step is not None,
        )

    @property
    def pid(self) -> int:
        """Its process; 0 before that is known."""
        return self._pid

    @property
    def running(self) -> bool:
        """Whether its process runs."""
        return self._phase == RankPhase.RANK_PHASE_RUNNING

    def kill(self) -> None:
        """SIGKILL it and its process group now, or as soon as its pid is known."""
        self.kill_requested = True
        if not self.forked:
            self.fail_start("ended before it was started", -signal.SIGKILL)
        elif self._pid and self.running:
            process_tree.kill(self._pid)

    def send_signal(self, signum: int) -> None:
        """Send it a signal; nothing where it does not run."""
        if self._pid and self.running:
            process_tree.send_signal(self._pid, signum)

    def handle_message(self, message: packets.Message) -> bool:
        """Take a message of the warm process; True when it speaks of this rank no more and its pid may be released."""
        match message["say"]:
            case "started":
                self._started(message["pid"], message["cold"])
            case "refused":
                self.start_error = message["words"]
            case "exit":
                self._exited(message["code"], message["tail"])
            case "gone":
                self.alive = False
                self._changed()
                return True
        return False

    def handle_zygote_exit(self) -> None:
        """Its warm process has ended, and it with it (parent-death signal); what it had started may still be there."""
        if self._phase != RankPhase.RANK_PHASE_EXITED:
            self._exited(-signal.SIGKILL, "")

    def mark_gone(self) -> None:
        """Nothing of it is left."""
        if self.alive:
            self.alive = False
            self._changed()

    def fail_start(self, words: str, code: int = 1) -> None:
        """It could not be started at all."""
        self._tail = self.start_error = words
        self._phase, self._exit_code = RankPhase.RANK_PHASE_EXITED, code
        self.mark_gone()

    def _started(self, pid: int, cold: str) -> None:
        self._pid = pid
        self._phase = RankPhase.RANK_PHASE_RUNNING
        log.info("%s runs as process %d%s", self.id.key, pid, f", started afresh: {cold}" if cold else "")
        if self.kill_requested:
            self.kill()
        self._changed()

    def _exited(self, code: int, tail: str) -> None:
        log.info("%s has ended: %s", self.id.key, _words(code))
        self._phase, self._exit_code = RankPhase.RANK_PHASE_EXITED, code
        self._tail = self.start_error or tail
        # Whoever made us kill it waits for its end, and for that of all that it had started.
        if not self.kill_requested:
            self._changed()


def _words(code: int) -> str:
    return f"exit status {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
