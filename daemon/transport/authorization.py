"""What a proved caller may do: the one place where that is answered.

    who                                      may
    root, Slurm's user, the site's operators everything
    the coordinator's own user               everything (`muster run --local`: one user, one machine)
    the owner of a job                       read and steer that job, register it
    a node's own daemon                      attach as that node: root, calling from an address of that node
    an agent                                 attach to a job: its owner's uid, as a node of that job
                                             or of a small job that its gang has asked for

An agent's address is compared with nothing. It calls from whichever of its node's interfaces leads to the coordinator,
which need not be the one that the node's name stands for, and a refusal would keep a whole job from training. Nor would
it keep anybody out: whoever has the owner's uid may run what they like on the job's own nodes.

Functions answer yes or no and know no I/O: the caller looks up owners and addresses (Slurm knows them). The full matrix
of rights, and proof of a node by something stronger than its address, belong here too.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, field

from muster.daemon.transport.identity import Caller

ROOT = 0


@dataclass(frozen=True, slots=True)
class Rights:
    """Rights at one coordinator. `operators`: uids of Slurm's user and of the site's operators; `own_uid`: its own."""

    operators: frozenset[int]
    own_uid: int = field(default_factory=os.getuid)

    def is_operator(self, caller: Caller) -> bool:
        """May see and steer everything."""
        return caller.uid in (ROOT, self.own_uid) or caller.uid in self.operators

    def may_read(self, caller: Caller, owner_uid: int) -> bool:
        """May see the gang of `owner_uid`: its state, events, logs."""
        return caller.uid == owner_uid or self.is_operator(caller)

    def may_steer(self, caller: Caller, owner_uid: int) -> bool:
        """May cancel or flush the gang of `owner_uid`."""
        return caller.uid == owner_uid or self.is_operator(caller)

    def may_register(self, caller: Caller, owner_uid: int) -> bool:
        """May register a gang for a Slurm job of `owner_uid`. Operators may not: a gang is run by its owner."""
        return caller.uid == owner_uid

    def is_node_daemon(self, caller: Caller, addresses: Collection[str]) -> bool:
        """Is the daemon of the node that has these IP addresses."""
        return caller.uid in (ROOT, self.own_uid) and caller.address in addresses

    def is_agent(self, caller: Caller, owner_uid: int) -> bool:
        """Is an agent of a gang, or job, of `owner_uid`. That its node belongs to the job, whoever calls this asks
        Slurm."""
        return caller.uid == owner_uid
