"""One rank of one generation on this node, from its start to the end of all processes that it has started."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from muster.daemon.host import clock, packets, process_tree
from muster.daemon.host.process.cgroup_memory import memory_limit, processes_killed
from muster.daemon.host.worker_threads import run_in_own_thread
from muster.v1.agent_pb2 import RankPhase, RankStatus
from muster.wording import gigabytes, listed

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankId:
    """Which rank this is."""

    rank: int
    local_rank: int
    generation: int

    @property
    def key(self) -> str:
        """The rank's name in messages to and from the zygote."""
        return f"rank {self.rank} of generation {self.generation}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a rank goes. `failed`: it has ended by itself, with another exit code than 0. `start_error`: why it could not
    start; empty: it could."""

    rank: int
    local_rank: int
    generation: int
    alive: bool
    pid: int
    exit_code: int
    failed: bool
    start_error: str = ""


class RankProcess:
    """The state of one rank, from its zygote's messages. `changed` is called after each change that a status shows.
    `count_killed`: how many processes of this cgroup the kernel has killed for want of memory.

    alive: the rank, or a process that it has started, may still exist.
    forked: a zygote was told to fork the rank. Before that there is nothing to kill or to wait for.
    kill_requested: the rank has been sent SIGKILL, or will be as soon as its pid is known.
    start_error: why the rank could not start, for the user; empty: no error.
    """

    def __init__(
        self, identity: RankId, changed: Callable[[], None], count_killed: Callable[[], int] = processes_killed
    ) -> None:
        self.id = identity
        self.alive = True
        self.forked = False
        self.kill_requested = False
        self.start_error = ""
        self._changed = changed
        self._phase = RankPhase.RANK_PHASE_STARTING
        self._pid = 0
        self._exit_code = 0
        self._failed = False
        self._ended_at: float | None = None
        self._log_tail = ""
        self._count_killed, self._killed_before = count_killed, count_killed()

    def status(self, step: int | None) -> RankStatus:
        """The whole status. `step`: the newest step that the rank has declared; None before the first."""
        return RankStatus(
            rank=self.id.rank,
            local_rank=self.id.local_rank,
            generation=self.id.generation,
            phase=self._phase,
            exit_code=self._exit_code,
            stderr_tail=self._log_tail,
            step=step or 0,
            progressed=step is not None,
            ended_ms_ago=None if self._ended_at is None else round(1000 * (clock.monotonic() - self._ended_at)),
        )

    @property
    def pid(self) -> int:
        """The rank's process; 0 while unknown."""
        return self._pid

    @property
    def running(self) -> bool:
        """Whether the rank's process runs."""
        return self._phase == RankPhase.RANK_PHASE_RUNNING

    @property
    def outcome(self) -> Outcome:
        """How the rank goes."""
        name, code = self.id, self._exit_code
        return Outcome(
            name.rank, name.local_rank, name.generation, self.alive, self._pid, code, self._failed, self.start_error
        )

    def kill(self) -> None:
        """SIGKILL the rank's process group, now or as soon as its pid is known."""
        self.kill_requested = True
        if not self.forked:
            self.fail_start("ended before it was started", -signal.SIGKILL)
        elif self._pid and self.running:
            process_tree.kill(self._pid)

    async def name_what_is_left(self) -> None:
        """If SIGKILL has not ended the rank, report which of its processes are left, and where they wait."""
        if not self.alive or not self._pid:
            return
        left = await run_in_own_thread(partial(process_tree.describe_unkilled, self._pid), "processes left")
        if self.alive and left:
            self._log_tail = listed(left, "; ")
            log.error("%s outlives SIGKILL: %s", self.id.key, self._log_tail)
            self._changed()

    def send_signal(self, signum: int) -> None:
        """Send a signal to the rank if it runs."""
        if self._pid and self.running:
            process_tree.send_signal(self._pid, signum)

    def handle_message(self, message: packets.Message) -> bool:
        """Process a message of the zygote. Return True if it is the last one about this rank, so that the pid may be
        released."""
        match message["say"]:
            case "started":
                self._mark_started(message["pid"], message["cold"])
            case "refused":
                self.start_error = message["words"]
            case "exit":
                self._mark_exited(message["code"], message["tail"])
            case "gone":
                self.alive = False
                self._changed()
                return True
        return False

    def handle_zygote_exit(self) -> None:
        """The zygote has ended, and the rank with it (parent-death signal). Processes that the rank started may still
        exist."""
        if self._phase != RankPhase.RANK_PHASE_EXITED:
            self._mark_exited(-signal.SIGKILL, "")

    def mark_gone(self) -> None:
        """No process of the rank is left."""
        if self.alive:
            self.alive = False
            self._changed()

    def fail_start(self, words: str, code: int = 1) -> None:
        """The rank could not be started."""
        self._log_tail = self.start_error = words
        self._note_end(code)
        self.mark_gone()

    def _mark_started(self, pid: int, cold: str) -> None:
        self._pid = pid
        self._phase = RankPhase.RANK_PHASE_RUNNING
        log.info("%s runs as process %d%s", self.id.key, pid, f", started by exec: {cold}" if cold else "")
        if self.kill_requested:
            self.kill()
        self._changed()

    def _mark_exited(self, code: int, tail: str) -> None:
        log.info("%s has ended: %s", self.id.key, _describe_exit(code))
        self._note_end(code)
        self._log_tail = self.start_error or tail
        if code == -signal.SIGKILL and not self.kill_requested and self._count_killed() > self._killed_before:
            self._log_tail = _out_of_memory()
        # A killed rank is reported when all its processes have ended (`mark_gone`), not here.
        if not self.kill_requested:
            self._changed()

    def _note_end(self, code: int) -> None:
        self._phase, self._exit_code, self._ended_at = RankPhase.RANK_PHASE_EXITED, code, clock.monotonic()
        self._failed = code != 0 and not self.kill_requested


def signal_name(number: int) -> str:
    """Its name, as SIGKILL. Real-time signals have none."""
    return next((one.name for one in signal.Signals if one == number), f"real-time signal {number}")


def _out_of_memory() -> str:
    """Why the kernel has killed a rank, in words for the user."""
    limit = memory_limit()
    where = f"; the narrowest limit is {limit.limit}, {gigabytes(limit.of_bytes)}" if limit else ""
    return f"out of memory, killed by the kernel{where}"


def _describe_exit(code: int) -> str:
    return f"exit status {code}" if code >= 0 else f"killed by {signal_name(-code)}"
