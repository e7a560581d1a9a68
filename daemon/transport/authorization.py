"""What a caller with a proved identity may do. Only this module answers that.

    caller                                   rights
    root, Slurm's user, the site's operators everything
    the coordinator's own user               everything (`muster run --local`: one user, one machine)
    the owner of a job                       read and steer that job, register it
    a node's own daemon                      attach as that node: root, calling from an address of that node
    an agent                                 attach to a job: its owner's uid, as a node of that job
                                             or of a pool job that its gang has requested, calling
                                             from an address of that node

A node has several addresses. An agent calls from the interface that leads to the coordinator, which may not be the one
that the node's name resolves to. So an agent's address is compared with all addresses that the node's daemon has
reported. Where no daemon has reported any, the address is not checked: a refusal would stop a whole job.

The functions answer yes or no without I/O. The caller looks up owners and addresses in Slurm. More detailed rights, and
a stronger proof of a node than its address, belong here.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, field

from muster.daemon.transport.identity import Caller

ROOT = 0


@dataclass(frozen=True, slots=True)
class Rights:
    """Rights at one coordinator. `operators`: uids of Slurm's user and of the site's operators. `own_uid`: the
    coordinator's uid."""

    operators: frozenset[int]
    own_uid: int = field(default_factory=os.getuid)

    def is_operator(self, caller: Caller) -> bool:
        """May read and steer everything."""
        return caller.uid in (ROOT, self.own_uid) or caller.uid in self.operators

    def may_read(self, caller: Caller, owner_uid: int) -> bool:
        """May read the gang of `owner_uid`: its state, events, logs."""
        return caller.uid == owner_uid or self.is_operator(caller)

    def may_steer(self, caller: Caller, owner_uid: int) -> bool:
        """May cancel or flush the gang of `owner_uid`."""
        return caller.uid == owner_uid or self.is_operator(caller)

    def may_register(self, caller: Caller, owner_uid: int) -> bool:
        """May register a gang for a Slurm job of `owner_uid`. Operators may not: only the owner runs a gang."""
        return caller.uid == owner_uid

    def is_node_daemon(self, caller: Caller, addresses: Collection[str]) -> bool:
        """Is the daemon of the node with these IP addresses."""
        return caller.uid in (ROOT, self.own_uid) and caller.address in addresses

    def is_agent(self, caller: Caller, owner_uid: int) -> bool:
        """Is an agent of a gang or job of `owner_uid`. The caller of this function asks Slurm whether the node belongs
        to the job."""
        return caller.uid == owner_uid

    def calls_from_node(self, caller: Caller, addresses: Collection[str]) -> bool:
        """Calls from the node whose daemon has reported these IP addresses; none: the daemon has reported nothing."""
        return not addresses or caller.address in addresses
