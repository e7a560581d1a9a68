"""What jobs leave behind on the nodes once they are over: users' processes, and memory files of Muster's.

Looked at from this machine, through each container's own /proc: two `find` a node, a tenth of a second for ten, and
nothing is started inside. A node that can't be looked at is an error: it never counts as clean.
"""

from __future__ import annotations

from dataclasses import dataclass

from muster.slurm.cluster.cluster import CONTROLLER, Cluster
from muster.slurm.cluster.waiting import WaitTimeout, wait_until
from muster.slurm.image.engine import EngineError

# For each NODE=/ITS/PROC: "NODE seen" where its first process is, "NODE process PID NAME of UID" for each process of an
# ordinary user (2001 is the first), "NODE memory PID FILE" for each memory file of which anybody has a descriptor.
# find complains of whatever ends meanwhile.
_LOOK = r"""
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
    """One line each, by node."""

    processes: tuple[str, ...] = ()
    memory: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether anything is left."""
        return bool(self.processes or self.memory)

    def __str__(self) -> str:
        """All of it, for a message."""
        return "\n".join([*self.processes, *self.memory])


def leftovers(cluster: Cluster) -> Leftovers:
    """What is left on any node; one that is down has nothing.

    Raises:
        EngineError: a node could not be looked at.
    """
    seen = {node: proc for node in cluster.nodes if (proc := cluster.proc(node))}
    said = cluster.engine.host("sh", "-c", _LOOK, "look", *(f"{node}={proc}" for node, proc in seen.items()))
    lines = sorted(set(said.checked().splitlines()))
    blind = [node for node in seen if f"{node} seen" not in lines and cluster.proc(node) == seen[node]]
    if blind:
        raise EngineError(f"the processes of {', '.join(blind)} can't be looked at")
    return Leftovers(*(tuple(line for line in lines if f" {kind} " in line) for kind in ("process", "memory")))


def queue(cluster: Cluster) -> str:
    """The jobs that Slurm has not let go of, one a line; one that is COMPLETING is there."""
    return cluster.sh(CONTROLLER, "squeue -h -o '%i %u %T %N'")


def wait_nothing_left(cluster: Cluster, timeout: float, in_queue: bool = False) -> None:
    """Until no process and no memory of a job is left on any node; with `in_queue` no job in the queue either.

    Raises:
        WaitTimeout: something is left after `timeout` seconds; it is in the message.
    """

    def left() -> str:
        return "\n".join(filter(None, [str(leftovers(cluster)), queue(cluster) if in_queue else ""]))

    try:
        wait_until(lambda: not left(), timeout, "nothing is left of any job", every=0.2)
    except WaitTimeout as error:
        raise WaitTimeout(f"{error}:\n{left()}") from error
