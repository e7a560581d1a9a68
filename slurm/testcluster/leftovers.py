"""Finds what jobs leave on the nodes after their end: processes of users, and memory files of Muster.

The search runs on this host, through each container's /proc. It needs two `find` for each node, a tenth of a second for
ten nodes, and starts nothing inside. A node that cannot be searched is an error: it never counts as clean.
"""

from __future__ import annotations

from dataclasses import dataclass

from muster.slurm.image.engine import EngineError
from muster.slurm.testcluster.cluster import CONTROLLER, Cluster
from muster.slurm.testcluster.waiting import WaitTimeout, wait_until

# For each argument NODE=PROC_PATH it prints: "NODE seen" if the first process exists; "NODE process PID NAME of UID"
# for each process of an ordinary user (uid 2001 and above); "NODE memory PID FILE" for each memory file with an open
# descriptor. Errors of `find` are ignored, because processes end during the search.
_FIND_SCRIPT = r"""
for one; do
    node=${one%%=*} proc=${one#*=}
    find "$proc" -mindepth 1 -maxdepth 1 \( -uid +2000 -o -name 1 \) -printf '%f %U\n' | while read -r pid uid; do
        [ "$pid" != 1 ] || { echo "$node seen"; continue; }
        name=gone
        read -r name <"$proc/$pid/comm"
        echo "$node process $pid $name of $uid"
    done
    find "$proc"/[0-9]*/fd -lname '/memfd:muster*' -printf "$node memory %p %l\n" | sed "s:$proc/::; s:/fd/[0-9]*::"
done 2>/dev/null
:
"""


@dataclass(frozen=True)
class Leftovers:
    """The processes and memory files that were found, one line each, sorted by node."""

    processes: tuple[str, ...] = ()
    memory: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether anything was found."""
        return bool(self.processes or self.memory)

    def __str__(self) -> str:
        """All lines, for a message."""
        return "\n".join([*self.processes, *self.memory])


def find_leftovers(cluster: Cluster) -> Leftovers:
    """Searches all nodes. A node that is down has no leftovers.

    Raises:
        EngineError: a node could not be searched.
    """
    proc_paths = {node: proc for node in cluster.nodes if (proc := cluster.proc_path(node))}
    result = cluster.engine.host(
        "sh", "-c", _FIND_SCRIPT, "look", *(f"{node}={proc}" for node, proc in proc_paths.items())
    )
    lines = sorted(set(result.checked().splitlines()))
    unsearched = [
        node for node in proc_paths if f"{node} seen" not in lines and cluster.proc_path(node) == proc_paths[node]
    ]
    if unsearched:
        raise EngineError(f"the processes of {', '.join(unsearched)} can't be searched")
    return Leftovers(*(tuple(line for line in lines if f" {kind} " in line) for kind in ("process", "memory")))


def queued_jobs(cluster: Cluster) -> str:
    """The jobs in Slurm's queue, one on each line. A COMPLETING job is in the queue."""
    return cluster.sh(CONTROLLER, "squeue -h -o '%i %u %T %N'")


def wait_nothing_left(cluster: Cluster, timeout: float, in_queue: bool = False) -> None:
    """Waits until no process and no memory file of a job remains on any node; with `in_queue`, until the queue is empty
    too.

    Raises:
        WaitTimeout: something remains after `timeout` seconds; the message lists it.
    """

    def left() -> str:
        return "\n".join(filter(None, [str(find_leftovers(cluster)), queued_jobs(cluster) if in_queue else ""]))

    try:
        wait_until(lambda: not left(), timeout, "nothing is left of any job", every=0.2)
    except WaitTimeout as error:
        raise WaitTimeout(f"{error}:\n{left()}") from error
