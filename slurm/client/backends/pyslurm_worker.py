"""A process that talks to slurmctld through pyslurm, one request after another.

    python -m muster.slurm.client.backends.pyslurm_worker

pyslurm holds the interpreter's lock during each RPC. Its import aborts the process on a host without slurm.conf. So
only this process imports pyslurm. The parent kills this process if an answer is late.

Requests and answers are JSON, one value on each line. A request on stdin is `["op", {arguments}, seconds]`. If the
answer takes longer than `seconds`, the kernel ends this process, even if the parent no longer runs (0: no limit). An
answer on stdout is any number of lines with lists of records, then one line with an object: `{}` for success,
`{"words": ...}` if Slurm refused. The first output line is such an object too. It reports whether pyslurm could be
loaded. All output of libslurm goes to stderr.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, TextIO

CONFIGURATIONS: Final = ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/run/slurm/conf/slurm.conf")
RECORDS_PER_LINE: Final = 50
"""The parent reads one line at a time, so short lines keep the parent's event loop responsive."""

Record = dict[str, Any]
Operation = Callable[..., Iterable[Record]]


class Worker:
    """The operations, named as in requests. Each operation yields records in the form of Slurm's `--json`."""

    def __init__(self, pyslurm: Any) -> None:
        self._pyslurm = pyslurm
        self.refused: type[Exception] = pyslurm.RPCError

    def jobs(self, ids: list[int] | None) -> Iterator[Record]:
        """Jobs by id, or all jobs. Unknown jobs are omitted."""
        if ids is None or len(ids) > 1:
            wanted = None if ids is None else set(ids)
            loaded = self._pyslurm.Jobs.load().values()
            yield from (_job(job) for job in loaded if wanted is None or job.id in wanted)
            return
        for id in ids:
            try:
                yield _job(self._pyslurm.Job.load(id))
            except self.refused as error:
                if "Invalid job id" not in str(error):
                    raise

    def nodes(self, names: list[str] | None) -> Iterator[Record]:
        """Nodes by name, or all nodes. Unknown nodes are omitted."""
        if names is None or len(names) > 1:
            wanted = None if names is None else set(names)
            loaded = self._pyslurm.Nodes.load().values()
            yield from (_node(node) for node in loaded if wanted is None or node.name in wanted)
            return
        for name in names:
            try:
                yield _node(self._pyslurm.Node.load(name))
            except self.refused as error:
                if "Invalid node name" not in str(error) and "does not exist" not in str(error):
                    raise

    def update_job(self, job: int, changes: dict[str, str]) -> Iterable[Record]:
        """Changes a job. `changes` uses scontrol's keys."""
        described = self._pyslurm.JobSubmitDescription()
        for key, value in changes.items():
            attribute, read = _JOB_CHANGES[key]
            setattr(described, attribute, read(value))
        self._pyslurm.Job(job).modify(described)
        return ()

    def update_node(self, node: str, state: str, reason: str) -> Iterable[Record]:
        change = self._pyslurm.Node(state=state, reason=reason) if reason else self._pyslurm.Node(state=state)
        self._pyslurm.Node(node).modify(change)
        return ()

    def requeue(self, job: int) -> Iterable[Record]:
        self._pyslurm.Job(job).requeue()
        return ()

    def release(self, job: int) -> Iterable[Record]:
        self._pyslurm.Job(job).release()
        return ()


def _now(value: str) -> str:
    """pyslurm passes words to slurm_parse_time, which accepts "now"."""
    return value


_JOB_CHANGES: Final[dict[str, tuple[str, Callable[[str], Any]]]] = {
    "NodeList": ("required_nodes", str),
    "ExcNodeList": ("excluded_nodes", str),
    "StartTime": ("begin_time", _now),
    "Requeue": ("is_requeueable", lambda value: value == "1"),
    "Comment": ("comment", str),
    "AdminComment": ("admin_comment", str),
}


def _node(node: Any) -> Record:
    return {
        "name": node.name,
        "state": [node.state],
        "address": node.address or "",
        "hostname": node.hostname or "",
        "reason": node.reason or "",
        "reason_changed_at": node.reason_time or 0,
        "boot_time": node.boot_time or 0,
        "partitions": list(node.partitions or ()),
        "gres": _gres(node),
        "real_memory": node.real_memory or 0,
    }


def _gres(node: Any) -> str:
    """The node's GRES in the form `gpu:8`, for every form that pyslurm returns."""
    configured = getattr(node, "configured_gres", None) or {}
    return ",".join(f"{name}:{count}" for name, count in configured.items()) if configured else ""


def _job(job: Any) -> Record:
    return {
        "job_id": job.id,
        "job_state": [job.state],
        "name": job.name or "",
        "user_id": job.user_id,
        "user_name": job.user_name or "",
        "partition": job.partition or "",
        "account": job.account or "",
        "state_reason": job.state_reason or "",
        "nodes": job.allocated_nodes or "",
        "batch_host": job.batch_host or "",
        "excluded_nodes": job.excluded_nodes or "",
        "restart_cnt": job.requeue_count or 0,
        "exit_code": {"return_code": job.exit_code or 0, "signal": {"id": job.exit_code_signal or 0}},
        "start_time": job.start_time or 0,
        "end_time": job.end_time or 0,
        "time_limit": job.time_limit,
        "comment": job.comment or "",
        "admin_comment": job.admin_comment or "",
        "requeue": job.is_requeueable,
        "hold": job.priority == 0,
        "current_working_directory": job.working_directory or "",
    }


def _configured() -> bool:
    """Whether slurm.conf exists. As in libslurm, SLURM_CONF replaces the default paths."""
    named = os.environ.get("SLURM_CONF")
    return any(Path(place).is_file() for place in ((named,) if named else CONFIGURATIONS))


def _write_line(out: TextIO, value: object) -> None:
    out.write(json.dumps(value) + "\n")


def _answer(worker: Worker, line: str, out: TextIO) -> None:
    """Runs one request and writes its answer."""
    name, arguments, seconds = json.loads(line)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    operation: Operation = getattr(worker, name)
    batch: list[Record] = []
    try:
        for record in operation(**arguments):
            batch.append(record)
            if len(batch) == RECORDS_PER_LINE:
                _write_line(out, batch)
                batch = []
    except worker.refused as error:
        _write_line(out, {"words": str(error)})
    else:
        _write_line(out, batch)
        _write_line(out, {})
    signal.setitimer(signal.ITIMER_REAL, 0)
    out.flush()


def main() -> None:
    """Serves requests until stdin ends."""
    if not _configured():
        sys.exit("Could not find slurm.conf: this machine is not part of a Slurm cluster")
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the parent may have ignored the signal
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # C code prints to stdout. Its output must not mix with the answers.
    import pyslurm

    worker = Worker(pyslurm)
    _write_line(out, {})
    out.flush()
    for line in sys.stdin:
        _answer(worker, line, out)


if __name__ == "__main__":
    main()
