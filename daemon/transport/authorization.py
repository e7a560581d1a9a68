"""What a caller with a proved identity may do. Only this module and its table answer that.

`muster.daemon.transport.authority_table` says which kind of caller may call which method. This module finds out of
which kinds a caller is:

    caller                                   kinds
    every uid                                another user
    root, Slurm's user, the site's operators an operator, if the call comes from a management host
    the coordinator's own user               the same (`muster run --local`: one user, one machine)
    the owner of a job, an agent of the job  the owner
    an agent of another job of the owner     an agent of the owner's other job, where the message names its job
    whom the owner has named in job.toml     a reader
    a node's own daemon                      root of the node: root, calling from an address of that node

A site names its management hosts (`management_hosts` of muster.toml). Without that setting every host is one, so root
of any host is an operator.

A node has several addresses. An agent calls from the interface that leads to the coordinator, which may not be the one
that the node's name resolves to. So an agent's address is compared with all addresses that the node's daemon has
reported. So is the address at which an agent says that others reach it. Where no daemon has reported any, neither
address is checked: a refusal would stop a whole job.

A server asks `refusal` before it reads a call's message. A service asks `allows` once it knows what the call concerns.
The functions answer without I/O. The caller of `allows` looks up owners and addresses in Slurm. More detailed rights,
and a stronger proof of a node than its address, belong here.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, field

from muster.daemon.transport import authority_table
from muster.daemon.transport.authority_table import CallerKind
from muster.daemon.transport.identity import Caller
from muster.daemon.transport.management_hosts import ManagementHosts

ROOT = 0
_REFUSED = {
    "/muster.v1.Muster/Drain": "only root, SlurmUser and the operators in the coordinator's muster.toml may drain "
    "nodes: uid {uid} is none of them",
    "/muster.v1.NodeService/Attach": "only root of a node may report its health: uid {uid} is not root",
}
"""By method, for callers who are refused whatever they name."""


@dataclass(frozen=True, slots=True)
class Rights:
    """Rights at one server.

    Args:
        operators: uids of Slurm's user and of the site's operators.
        own_uid: the uid of the server's process.
        management_hosts: the hosts from which an operator calls.
    """

    operators: frozenset[int]
    own_uid: int = field(default_factory=os.getuid)
    management_hosts: ManagementHosts = field(default_factory=ManagementHosts)

    def refusal(self, method: str, uid: int, *, names_job: bool = True) -> str:
        """Why `uid` may not call `method` from any host; empty: it may. `names_job`: the call may name a job or a node,
        which decides later."""
        possible = {CallerKind.OTHER_USER}
        if self.is_operators(uid):
            possible.add(CallerKind.OPERATOR)
        if names_job:
            possible |= {CallerKind.OWNER, CallerKind.READER}
        if names_job and uid in (ROOT, self.own_uid):
            possible.add(CallerKind.NODE_ROOT)
        if authority_table.may_call(method, possible):
            return ""
        known = _REFUSED.get(method, "")
        return known.format(uid=uid) or f"uid {uid} may not call {method} here"

    def allows(
        self,
        method: str,
        caller: Caller,
        *,
        owner_uid: int | None = None,
        of_other_job: bool = False,
        node_addresses: Collection[str] = (),
        is_reader: bool = False,
    ) -> bool:
        """Whether `caller` may call `method` for one job or node. A call for everything names neither.

        Args:
            owner_uid: the owner of the job.
            of_other_job: the message says that its sender belongs to another job.
            node_addresses: the IP addresses of the node.
            is_reader: the owner of the job has named the caller as a reader.
        """
        kinds = {CallerKind.OTHER_USER}
        if self.is_operators(caller.uid) and self.management_hosts.includes(caller.address):
            kinds.add(CallerKind.OPERATOR)
        if caller.uid == owner_uid:
            kinds.add(CallerKind.OTHER_AGENT if of_other_job else CallerKind.OWNER)
        if caller.uid in (ROOT, self.own_uid) and caller.address in node_addresses:
            kinds.add(CallerKind.NODE_ROOT)
        if is_reader:
            kinds.add(CallerKind.READER)
        return authority_table.is_allowed(method, kinds)

    def calls_from_node(self, caller: Caller, addresses: Collection[str]) -> bool:
        """Calls from the node whose daemon has reported these IP addresses; none: the daemon has reported nothing."""
        return self.is_address_of_node(caller.address, addresses)

    @staticmethod
    def is_address_of_node(address: str, addresses: Collection[str]) -> bool:
        """Is an IP address of the node whose daemon has reported `addresses`; none: the daemon has reported nothing."""
        return not addresses or address in addresses

    def calls_from_elsewhere(self, caller: Caller) -> bool:
        """Would be an operator, if the call came from a management host."""
        return self.is_operators(caller.uid) and not self.management_hosts.includes(caller.address)

    def is_operators(self, uid: int) -> bool:
        """An operator has this uid, whatever host calls."""
        return uid in (ROOT, self.own_uid) or uid in self.operators
