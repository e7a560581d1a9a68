"""Which nodes a gang holds at a moment, and what they do: carry ranks, wait as spares, or wait to be taken away."""

from __future__ import annotations

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.goodput.intervals import Fault

Roles = tuple[frozenset[str], frozenset[str], tuple[tuple[str, Fault | None], ...]]
"""The nodes with ranks, the spares, and the nodes that the gang has left, with the reason."""


class HeldNodes:
    """The nodes of one gang that Slurm holds for it."""

    def __init__(self) -> None:
        self._job = 0
        self._own: frozenset[str] = frozenset()
        self._pool: dict[str, int] = {}
        self._pool_jobs: dict[int, int] = {}
        self._seats: frozenset[str] | None = None
        self._left: dict[str, Fault] = {}
        self._roles: Roles | None = None

    @property
    def allocated(self) -> bool:
        """Some node is held."""
        return bool(self._own or self._pool)

    @property
    def seats(self) -> frozenset[str] | None:
        """The nodes of the newest generation of this run; None: there was none."""
        return self._seats

    def roles(self) -> Roles:
        """What the nodes do. Before the first generation of a run, and after the last one, all of them carry it."""
        if self._roles is None:
            held = self._own | self._pool.keys()
            carrying = held if self._seats is None else held & self._seats
            left = tuple((node, self._left[node]) for node in sorted(held - carrying) if node in self._left)
            self._roles = carrying, held - carrying - {node for node, _ in left}, left
        return self._roles

    def begin_run(self, job: int) -> None:
        """A run of this job begins, and the one before is over."""
        self.release()
        self._job = job

    def release(self) -> None:
        """No node is held."""
        self._own, self._pool, self._pool_jobs, self._seats, self._left = frozenset(), {}, {}, None, {}
        self._roles = None

    def carry(self, seats: frozenset[str]) -> None:
        """These nodes carry ranks from now on."""
        self._seats, self._roles = seats, None
        self._left = {node: fault for node, fault in self._left.items() if node not in seats}

    def carry_all(self) -> None:
        """No generation of this run follows."""
        self._seats, self._roles = None, None

    def change_job(self, nodes: tuple[str, ...]) -> None:
        """The job has these nodes."""
        self._own, self._roles = frozenset(nodes), None

    def join(self, fact: facts.MemberJoined) -> None:
        """A node joins the gang. Slurm may not have been asked yet for the nodes of the job."""
        self._left.pop(fact.node, None)
        if fact.job == self._job:
            self._own |= {fact.node}
        else:
            self._pool[fact.node] = fact.job
        self._roles = None

    def leave(self, fact: facts.MemberRemoved, fault: Fault) -> None:
        """The gang leaves a node, or hears more of one that it has left. Slurm may still hold it."""
        self._left.setdefault(fact.node, fault)
        if fact.left_job:
            self._own -= {fact.node}
            self._pool.pop(fact.node, None)
        self._roles = None

    def queue_pool_job(self, fact: facts.PoolJobQueued) -> None:
        """A pool job answers a request."""
        self._pool_jobs[fact.serial] = fact.job

    def close_pool_request(self, serial: int) -> None:
        """The request is over, and its node is given back."""
        job = self._pool_jobs.pop(serial, None)
        self._pool = {node: of for node, of in self._pool.items() if of != job}
        self._roles = None
