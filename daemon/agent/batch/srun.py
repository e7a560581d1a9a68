"""Start srun, and find the nodes on which srun could start nothing.

A node may die after Slurm has given it to a job and before the step is launched. srun then finds no slurmd on that
node, reports it, and ends the whole step. The batch process starts srun again without that node.

The batch host itself may be cut off from slurmctld at that moment. srun then launches nothing and reports that it can't
reach slurmctld. The batch process starts srun again on the same nodes once the coordinator answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from muster.slurm.client.parsing import hostlist
from muster.v1.api_pb2 import BatchRef
from muster.v1.common_pb2 import JobSpec

log = logging.getLogger(__name__)

_LAUNCH_FAILURE = re.compile(rb"Task launch for \S+ failed on node ([^\s:]+)")
_CONTROLLER_UNREACHABLE = re.compile(
    rb"Unable to contact slurm controller|Socket timed out on send/recv operation|Zero Bytes were transmitted"
)
"""Slurm's errors of a call to slurmctld that failed on the network (src/common/slurm_errno.c of Slurm)."""
_TASK_FAILURE = re.compile(rb"srun: error: (\S+): tasks? \S+ Exited with exit code (\d+)")
_MOST_OWN_CODE = 128
"""Above it, a signal has ended a task: srun may have ended the whole step."""
_CHUNK = 65536
_OUTPUT_BYTES = 4096
"""What srun writes at least while it carries output of ranks. While it waits for a dead node it only wakes itself."""
_OUTPUT_DRAIN_S = 2.0
"""Seconds for which srun's remaining output is read after srun has ended. A child of srun may keep the pipe open for
ever."""
REQUEUE_TIMEOUT_S = 60.0
SIGNAL_S = 5.0
"""Seconds for each call that sends a signal to a step."""
MAX_REQUEUES = 5
"""A job whose launch fails is requeued at most this often."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """What Slurm gave to the job.

    job_id: the Slurm job.
    node_count, min_nodes: nodes of the job, and how many of them the gang needs.
    may_requeue: Slurm may requeue the job.
    batch_host: the node on which the batch script runs.
    restart_count: how often Slurm has restarted the job.
    scontrol: the command that requeues the job, and shows its steps.
    scancel: the command that sends a signal to a step.
    nodes: all of the job, as Slurm writes them.
    segment: how many of them `--segment` asked for in one block; 0: none.
    """

    job_id: int = 0
    node_count: int = 0
    min_nodes: int = 0
    may_requeue: bool = False
    batch_host: str = ""
    restart_count: int = 0
    scontrol: str = "scontrol"
    scancel: str = "scancel"
    nodes: str = ""
    segment: int = 0

    @classmethod
    def of(cls, spec: JobSpec, job_id: int, restart_count: int, environ: Mapping[str, str]) -> Allocation:
        """What Slurm's variables in `environ` say of a job."""
        count, host = int(environ.get("SLURM_JOB_NUM_NODES", 0)), environ.get("SLURMD_NODENAME", "")
        nodes, needed = environ.get("SLURM_JOB_NODELIST", ""), spec.min_nodes or spec.nodes
        return cls(job_id, count, needed, spec.requeue, host, restart_count, nodes=nodes, segment=segment_of(environ))

    def command(self, srun: Sequence[str], lost: Sequence[str]) -> list[str]:
        """srun's command line for all nodes except `lost`."""
        if not lost:
            return list(srun)
        left = self.node_count - len(lost)
        return [srun[0], f"--nodes={left}", f"--ntasks={left}", f"--exclude={','.join(lost)}", *srun[1:]]


def segment_of(environ: Mapping[str, str]) -> int:
    """The `--segment` of the job whose environment this is; 0: it has none, or this Slurm does not say it."""
    words = environ.get("SLURM_JOB_SEGMENT_SIZE", "")
    return int(words) if words.isascii() and words.isdigit() and len(words) < 6 else 0


ALL_LAUNCHED = BatchRef()
"""What the coordinator is told of a launch of which there is nothing to tell. Nobody changes it."""


@dataclass(slots=True)
class Srun:
    """A running srun. Its standard error is copied to ours."""

    process: asyncio.subprocess.Process
    failed_nodes: set[str] = field(default_factory=set)
    """Nodes on which srun could start nothing."""
    exit_codes: dict[str, int] = field(default_factory=dict)
    """Nodes on which a task has failed by itself, and its exit code."""
    controller_unreachable: bool = False
    """srun has reported that it can't reach slurmctld."""
    _reader: asyncio.Task[None] | None = None

    @staticmethod
    async def start(argv: Sequence[str], group: int | None = None) -> Srun:
        """Start srun in a process group: 0 for one of its own, None for that of this process.

        Raises:
            OSError: the program can't be started.
        """
        # Use a pipe of our own. With asyncio's pipe, wait() returns only after srun's last child has closed the pipe.
        ours, theirs = os.pipe()
        try:
            # srun holds the end that is read, too: where this process is killed, a broken pipe would make srun kill its
            # tasks at the next message.
            srun = Srun(
                await asyncio.create_subprocess_exec(*argv, stderr=theirs, process_group=group, pass_fds=(ours,))
            )
        except OSError:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        srun._reader = asyncio.create_task(srun._read(ours))
        return srun

    async def wait(self) -> int:
        """Wait until srun has ended and its output is read; return its exit status."""
        status = await self.process.wait()
        if self._reader is not None:
            await asyncio.wait([self._reader], timeout=_OUTPUT_DRAIN_S)
            self._reader.cancel()
        return status

    async def ends_within(self, within: float) -> bool:
        """Wait at most `within` seconds for srun to end; return whether it has ended."""
        return await _process_ends_within(self.process, within)

    async def ends_or_is_silent(self, within: float) -> bool:
        """Wait for srun to end for as long as it carries output of ranks; return whether it has ended. `within`:
        seconds in which it writes nothing.
        """
        before = self.written
        while not await self.ends_within(within):
            now = self.written
            if now - before < _OUTPUT_BYTES:
                return False
            before = now
        return True

    @property
    def written(self) -> int:
        """The bytes that it has written so far; 0: not known."""
        try:
            found = re.search(r"^wchar: (\d+)$", Path(f"/proc/{self.process.pid}/io").read_text(), re.M)
        except OSError:
            return 0
        return int(found[1]) if found else 0

    async def _read(self, ours: int) -> None:
        stderr = asyncio.StreamReader()
        with os.fdopen(ours, "rb") as pipe:
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(stderr), pipe
            )
            try:
                await self._copy_stderr(stderr)
            finally:
                transport.close()

    async def _copy_stderr(self, stderr: asyncio.StreamReader) -> None:
        partial_line = b""
        while words := await stderr.read(_CHUNK):
            with contextlib.suppress(OSError):  # a full disk must not block srun: srun waits until its output is read
                sys.stderr.buffer.write(words)
                sys.stderr.buffer.flush()
            *lines, partial_line = (partial_line + words).split(b"\n")
            partial_line = partial_line[-_CHUNK:]
            for line in lines:
                self._note_exit(line)
                self.failed_nodes.update(name.decode(errors="replace") for name in _LAUNCH_FAILURE.findall(line))
                self.controller_unreachable |= _CONTROLLER_UNREACHABLE.search(line) is not None

    def _note_exit(self, line: bytes) -> None:
        if (found := _TASK_FAILURE.match(line)) and 0 < (code := int(found[2])) <= _MOST_OWN_CODE:
            with contextlib.suppress(ValueError):  # somebody else has written this line
                self.exit_codes |= dict.fromkeys(hostlist.expand(found[1].decode(errors="replace")), code)


async def _process_ends_within(process: asyncio.subprocess.Process, within: float) -> bool:
    ended = asyncio.ensure_future(process.wait())
    try:
        await asyncio.wait([ended], timeout=within)
        return ended.done()
    finally:
        ended.cancel()


async def requeue(allocation: Allocation, within: float = REQUEUE_TIMEOUT_S) -> str:
    """Ask Slurm to requeue the job. Return an empty string, or the reason why Slurm refused or gave no answer within
    `within` seconds."""
    status, _, words = await call_slurm(within, allocation.scontrol, "requeue", str(allocation.job_id))
    return words if status else ""


@dataclass(slots=True)
class Step:
    """The step of a launch, and the signals that have come for it."""

    allocation: Allocation
    srun: Srun | None = None
    """A child of this process. None: the process that has started the step was killed."""
    name: str = ""
    """Of the step, as Slurm shows it, where there is no `srun`."""
    asked_to_end: set[int] = field(default_factory=set)
    """The signals of SIGTERM and SIGINT that have come for it. srun's exit code does not tell them apart."""
    beside: list[asyncio.Task[None]] = field(default_factory=list)
    """What is done while it runs: a signal is passed on, or Slurm is asked. Each starts a process."""
    interrupted: signal.Signals | None = None
    """The signal with which the user ends the launch, once that is known."""
    split_segments: str = ""
    """Which segments of `--segment` its nodes split, once Slurm has said it."""
    is_over: bool = False
    """Its end has been seen."""

    def told(self, unlaunched: Collection[str] = (), exit_codes: Mapping[str, int] | None = None) -> BatchRef:
        """What the coordinator is told of it. What is left out counts as over, so the rest is said each time."""
        return BatchRef(
            unlaunched_nodes=sorted(unlaunched),
            failed_nodes=exit_codes,
            interrupted=self.interrupted.name if self.interrupted else "",
            split_segments=self.split_segments,
        )

    @property
    def outlives_srun(self) -> bool:
        """Nobody is left who passes signals on to it."""
        return self.srun is None or (self.srun.process.returncode or 0) < 0

    async def close(self) -> None:
        """Wait until what is done beside it has ended. A task that is cancelled while it starts a process may never
        end: https://github.com/python/cpython/issues/125502.
        """
        self.is_over = True
        if self.beside:
            await asyncio.wait(self.beside, timeout=2 * SIGNAL_S)

    def signal_srun(self, number: signal.Signals) -> bool:
        """Send a signal to srun; return whether srun lives."""
        if self.srun is None or self.srun.process.returncode is not None:
            return False
        try:
            self.srun.process.send_signal(number)
        except ProcessLookupError:  # it has just ended by itself
            return False
        return True

    async def signal(self, number: signal.Signals, within: float = SIGNAL_S) -> str:
        """Send a signal to all processes of the step. Return an empty string, or the reason why that failed.

        srun itself would kill the step. Agents that are killed tell the coordinator nothing, which then ends the whole
        job. Slurm shows the process of srun also when that has ended.
        """
        allocation, job = self.allocation, str(self.allocation.job_id)
        status, steps, words = await call_slurm(within, allocation.scontrol, "--oneliner", "show", "steps", job)
        # "show steps" of an array job shows those of its other tasks, which have batch hosts of their own.
        host = re.escape(socket.gethostname().partition(".")[0])
        of_srun = rf"{host}:" if self.srun is None else rf"[^\s:]*:{self.srun.process.pid}\b"
        name = rf"Name={re.escape(self.name)} .*" if self.name else ""
        step = re.search(rf"^StepId=(\S+) .*{name}SrunHost:Pid={of_srun}", steps, re.MULTILINE)
        if status or step is None:
            return words or f"job {job} has no step of this launch"
        argv = (allocation.scancel, f"--signal={number.name.removeprefix('SIG')}", step[1])
        status, _, words = await call_slurm(within, *argv)
        return words if status else ""


async def call_slurm(within: float, *argv: str) -> tuple[int, str, str]:
    """Run a command of Slurm. Return its exit status, what it has printed, and why it has failed."""
    pipe = asyncio.subprocess.PIPE
    try:
        asked = await asyncio.create_subprocess_exec(*argv, stdout=pipe, stderr=pipe)
    except OSError as error:
        return 127, "", f"{os.path.basename(argv[0])}: {error}"
    try:
        async with asyncio.timeout(within):
            printed, words = await asked.communicate()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):  # the process has just ended by itself
            asked.kill()
        await _process_ends_within(asked, _OUTPUT_DRAIN_S)
        return 1, "", f"{os.path.basename(argv[0])}: no answer within {within:g} s"
    return asked.returncode or 0, printed.decode(errors="replace"), words.decode(errors="replace").strip()
