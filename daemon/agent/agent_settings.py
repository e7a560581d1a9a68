"""What an agent is started with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from muster.daemon.agent.failure_detector.peers import AgentIdentity
from muster.daemon.agent.launch.handover import Shown
from muster.daemon.agent.pool_jobs import PoolRequestDefaults
from muster.daemon.agent.ranks.rank_supervisor import NodeJob
from muster.daemon.host.port_range import PortRange
from muster.daemon.transport.identity import Credentials
from muster.daemon.transport.tls import Trust
from muster.v1.common_pb2 import JobSpec


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """What an agent is started with.

    listen: "host:port".
    host: the address at which other processes reach this agent.
    notice_s: seconds for which the agent waits for an order after SIGTERM.
    pool: for the jobs with which the agent asks for nodes of the shared pool.
    """

    identity: AgentIdentity
    job: NodeJob
    spec: JobSpec
    coordinator: str
    credentials: Credentials
    listen: str
    host: str
    notice_s: float
    pool: PoolRequestDefaults
    slurm_job_id: int = 0
    slurm_restart_count: int = 0
    batch_host: bool = False
    pool_serial: int = 0
    """The pool request for which this agent was started; 0: the agent belongs to the gang's own job."""
    memory_socket: str = ""
    """The socket of musterd's kept memory; empty: memory is not kept over a requeue."""
    trust: Trust | None = None
    """Whom to take for a coordinator; None: all connections are plain text."""
    encrypt_checkpoints: bool = False
    """Whether the streams of pieces use TLS, too. The digests of the pieces always come over TLS."""
    ports: PortRange | None = None
    """The site's ports for agents, if `listen` has port 0; None: any free ones."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """The environment of ranks before [env], with what Slurm says of this node."""
    hardware_socket: str = ""
    """The socket on which this node's musterd says what hardware the node has; empty: ask nobody."""
    other_children: frozenset[int] = frozenset()
    """Children of this process that are not the agent's to end."""
    shown: Shown | None = None
    """How what ranks write goes to the output of this process, too. None: it does not."""
    failure: str = ""
    """Why the job can't run on this node, for the user; empty: the job can run."""
