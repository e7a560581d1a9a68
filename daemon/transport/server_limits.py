"""What each server of Muster accepts from its callers: sizes of messages, connections, calls, times.

Every limit is larger than what Muster's own processes need, and small enough that callers without a credential cost
little, and that one user takes no place of others. `channel.make_server` applies the limits. docs/operations/limits.md
lists those that operators meet, docs/SECURITY.md says what one user can hold at most.
"""

from __future__ import annotations

from dataclasses import dataclass

from muster.daemon.transport import job_limits
from muster.daemon.transport.calls.call_share import CallShare

KIB, MIB = 1024, 1024 * 1024

SMALL_MESSAGE_BYTES = 64 * KIB
"""A probe or a heartbeat and their answers: each has less than 1 KiB."""
ORDER_BYTES = 64 * MIB
"""What the coordinator answers to an agent or a user. An order for 250,000 ranks has 20 MB (measured)."""
SHARD_MESSAGE_BYTES = 16 * MIB
"""Between agents. An offer names each piece: 9 MiB for a shard of 1 TiB."""

SPEC_MESSAGE_BYTES = job_limits.MAX_SPEC_CHARS + 64 * KIB
"""A message with the spec of a job. A spec has no more bytes on the wire than characters in the journal."""
HELD_BYTES = SPEC_MESSAGE_BYTES
"""Messages of one user that wait for Slurm, for example. They take 15 times as much memory (measured: an environment or
a command of empty words)."""

METADATA_BYTES = 8 * KIB
"""The headers of one call. A munge credential has less than 1 KiB."""


PROBE_WAIT_S = 0.1
"""`reading_wait_s` of servers that are probed."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """The limits of one server.

    Args:
        message_bytes: the largest message that is received. A caller without a valid credential gets no message in.
        unread_bytes: what a call may send before the server reads its message.
        connections: connections at the same time, on each address that the server listens on.
        calls_per_connection: calls at the same time on one connection; the client waits with more.
        calls: the calls of callers with a valid credential, unless the server has several shares.
        credential_checks: credentials that are checked or wait for their check at the same time.
        waiting_calls: calls that wait for the server to begin with them. gRPC ends further ones without a status of the
            server: the caller sees CANCELLED, and connects again.
        waiting_s: seconds that a call waits for the server to begin with it.
        handshake_s: seconds in which a new connection must speak HTTP/2.
        idle_s: seconds without a call after which a connection ends; gRPC takes up to twice as long.
        connection_age_s: seconds after which a connection ends, whatever it does; 0: never.
        keepalive: clients may send pings of HTTP/2 every 2 s.
        ping_s: seconds without a byte after which the server sends such a ping itself. A connection on which it is not
            answered within as many seconds ends, with its calls. 0: the server sends none.
    """

    message_bytes: int
    connections: int
    calls_per_connection: int
    calls: CallShare
    credential_checks: int
    unread_bytes: int = 64 * KIB
    waiting_calls: int = 1000
    waiting_s: float = 30.0
    handshake_s: float = 5.0
    idle_s: float = 60.0
    connection_age_s: float = 0.0
    keepalive: bool = False
    ping_s: float = 0.0

    def options(self) -> list[tuple[str, int]]:
        """The limits as gRPC's options, as far as gRPC enforces them."""
        return [
            ("grpc.max_receive_message_length", self.message_bytes),
            ("grpc.http2.lookahead_bytes", self.unread_bytes),
            # By default gRPC lets a connection send megabytes ahead of its reader, whoever sends.
            ("grpc.http2.bdp_probe", 0),
            ("grpc.max_allowed_incoming_connections", self.connections),
            ("grpc.max_concurrent_streams", self.calls_per_connection),
            # Both limits: between them gRPC refuses by chance.
            ("grpc.max_metadata_size", METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", METADATA_BYTES),
            # Both limits: between them gRPC ends calls by chance.
            ("grpc.server.max_pending_requests", self.waiting_calls),
            ("grpc.server.max_pending_requests_hard_limit", self.waiting_calls),
            ("grpc.server_max_unrequested_time_in_server", round(self.waiting_s)),
            ("grpc.server_handshake_timeout_ms", round(1000 * self.handshake_s)),
            ("grpc.max_connection_idle_ms", round(1000 * self.idle_s)),
            # No process of Muster compresses its messages, so no server spends time to unpack any.
            ("grpc.compression_enabled_algorithms_bitset", 1),
            *(self._age_options() if self.connection_age_s else ()),
            *(_KEEPALIVE_OPTIONS if self.keepalive else ()),
            *(self._ping_options() if self.ping_s else ()),
        ]

    def _ping_options(self) -> list[tuple[str, int]]:
        return [
            ("grpc.keepalive_time_ms", round(1000 * self.ping_s)),
            ("grpc.keepalive_timeout_ms", round(1000 * self.ping_s)),
            ("grpc.http2.ping_timeout_ms", round(1000 * self.ping_s)),
            # By default gRPC sends two pings, and then one a minute.
            ("grpc.http2.max_pings_without_data", 0),
        ]

    def _age_options(self) -> list[tuple[str, int]]:
        return [
            ("grpc.max_connection_age_ms", round(1000 * self.connection_age_s)),
            ("grpc.max_connection_age_grace_ms", 5000),
        ]


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """The limits of one stream of the coordinator, for the messages of agents and daemons, and for what clients read.

    Args:
        messages_per_s: messages that are read in a second, in the long run. An agent sends four statuses a second while
            its ranks finish steps, however short the steps are, and a ping each 0.25 s during a suspicion.
        burst: messages that are read at once.
        bytes_per_message: a message counts as one more for each of these bytes. The largest counts as 65, and the
            status of 1,024 ranks, which an agent sends four times a second, as 17 at most.
        silent_s: seconds without a message after which the stream ends. Agents and daemons send one each 5 s.
        unread_s: seconds in which a message must find room at the client, or the stream ends.
    """

    messages_per_s: float = 100.0
    burst: int = 400
    bytes_per_message: int = 64 * KIB
    silent_s: float = 60.0
    unread_s: float = 60.0


# By default the server closes a connection that sends many keepalive pings.
_KEEPALIVE_OPTIONS = [
    ("grpc.http2.min_ping_interval_without_data_ms", 2000),
    ("grpc.http2.max_ping_strikes", 0),
]

NODE_DAEMON = ServerLimits(
    message_bytes=SMALL_MESSAGE_BYTES,
    unread_bytes=4 * KIB,
    # Only coordinators probe musterd. Each probe has connections of its own, which last seconds.
    # A connection on which calls arrive as fast as they can costs 0.25 MiB (measured).
    connections=128,
    calls_per_connection=8,
    calls=CallShare(
        "probes", calls=64, user_calls=16, reading=4, all_reading=32, reading_wait_s=PROBE_WAIT_S, unread_s=10.0
    ),
    credential_checks=16,
    idle_s=10.0,
    connection_age_s=30.0,
)
"""musterd: it answers probes and nothing else. Its heartbeats leave on a connection that it opens itself."""

LOCAL_SERVER = ServerLimits(
    message_bytes=4 * KIB,
    unread_bytes=4 * KIB,
    # One call for each rank of the node at once; each client closes its connection after its call.
    connections=64,
    calls_per_connection=8,
    calls=CallShare("local", calls=64, user_calls=64, reading=64, all_reading=64, unread_s=10.0),
    credential_checks=0,
    idle_s=10.0,
    connection_age_s=30.0,
)
"""musterd's answers to NVRx, over a Unix socket. Its callers have no credential."""

API_CALLS = CallShare(
    "the public API",
    # Any number of users leave agents and node daemons their places.
    calls=16_000,
    # Those who have jobs may have more (`MOST_API_CALLS`).
    user_calls=256,
    reading=2,
    all_reading=64,
    first_message_bytes=SPEC_MESSAGE_BYTES,
    held_bytes=HELD_BYTES,
    # One of the answers is allowed, however large it is. The list of 12,500 nodes has 3 MB.
    unread_answer_bytes=16 * MIB,
)
"""The methods of `muster` and of other clients."""
MOST_API_CALLS, API_CALLS_PER_NODE = 4000, 4
"""Calls of one user who is an operator, or has so many nodes that each adds some. 1,000 jobs, each with its batch
process and two watchers, need less."""

AGENT_CALLS = CallShare(
    "agents",
    calls=17_000,
    # Until an agent is admitted. Each node of a user's jobs adds one: after a restart all agents come at once.
    user_calls=256,
    reading=2,
    all_reading=64,
    # Hello, and the first status, which is read only when Slurm has named the caller as the user of the job.
    first_messages=2,
    first_message_bytes=SPEC_MESSAGE_BYTES,
    held_bytes=HELD_BYTES,
)
"""AgentService/Attach. The streams of agents of jobs in Slurm's hands are admitted, and count for their user only once
the coordinator is done with them. An agent may have a few: links that were cut leave streams open until they are found
out."""

NODE_DAEMON_CALLS = CallShare("node daemons", calls=17_000, user_calls=17_000, reading=64, all_reading=64)
"""NodeService/Attach. Only root gets so far: all nodes are one user, and come at once after a restart."""

HEALTH_CALLS = CallShare(
    "health", calls=64, user_calls=64, reading=1, all_reading=1, first_message_bytes=SMALL_MESSAGE_BYTES
)
"""The checks of load balancers and monitors. Callers without a credential are one user, whoever they are. So these
calls share nothing with those of reflection: nobody delays a check with them."""

# Reflection is a stream, whose later messages could be half there for ever: each of them needs the reading place.
REFLECTION_CALLS = CallShare("reflection", calls=16, user_calls=16, reading=1, all_reading=1, first_messages=0)
"""Tools such as grpcurl ask for the methods of the server."""

SITE_CALLS = 4
"""Calls of one user for all nodes or all jobs at the same time. With 12,500 nodes, one takes 80 ms of processor time
(measured)."""

COORDINATOR = ServerLimits(
    # A job's spec has 1 MiB at most. A status has 1 MiB for 1,024 ranks, and 2.2 MiB more for pings to 100,000 nodes.
    message_bytes=4 * MIB,
    # Thousands of calls of one user may wait unread. More comes as soon as a message is read.
    unread_bytes=4 * KIB,
    # 12,500 nodes, each with an agent, and watchers. LimitNOFILE of the unit is larger.
    connections=50_000,
    # A call that waits for its check costs 26 KiB (measured), and nobody knows yet whose it is. Each process of Muster
    # has one or two calls on a connection. A client that watches many jobs opens a connection for each four of them.
    calls_per_connection=4,
    calls=API_CALLS,
    # Agents and node daemons give up a connection after as long (channel.RECONNECT_TIMEOUT_S).
    handshake_s=20.0,
    waiting_calls=50_000,
    waiting_s=60.0,
    # munged checks thousands of credentials a second. A node that finds no place connects again, which costs more.
    credential_checks=16_384,
    keepalive=True,
    # A client that follows an idle job sends nothing. If its host vanishes, only a ping shows that.
    ping_s=30.0,
)


def more_coordinator_calls(method: str, nodes: int, *, operates: bool) -> int:
    """Calls beyond those of every user, for one whose jobs have so many nodes, or who is an operator."""
    if coordinator_share(method) is not API_CALLS:
        return nodes
    most = MOST_API_CALLS - API_CALLS.user_calls
    return most if operates else min(most, API_CALLS_PER_NODE * nodes)


def coordinator_share(method: str) -> CallShare:
    """The share of a call of `method` at the coordinator."""
    return _OTHER_SHARES.get(method.split("/")[1], API_CALLS)


_OTHER_SHARES = {
    "muster.v1.AgentService": AGENT_CALLS,
    "muster.v1.NodeService": NODE_DAEMON_CALLS,
    "grpc.health.v1.Health": HEALTH_CALLS,
    "grpc.reflection.v1alpha.ServerReflection": REFLECTION_CALLS,
}
"""By full name of a service."""


AGENT_IDLE_S, MOST_AGENT_IDLE_S = 10.0, 600.0
"""`idle_s` of an agent in a small gang and in the largest one. While strangers hold all connections of an agent, the
next one that ends is a member's chance to connect."""
AGENT_IDLE_S_PER_MEMBER = 0.06
"""The same for each member of a large gang. Whoever had no call for so long connects again for the next snapshot. All
members do so with the agent that collects their reports, and it with them. The two handshakes with a member cost that
agent 1.2 ms of processor time (measured): 2 % of a core with these seconds."""


def agent_limits(members: int) -> ServerLimits:
    """The limits of an agent in a gang of `members` nodes, spares included. All of them report to one agent."""
    return ServerLimits(
        message_bytes=SHARD_MESSAGE_BYTES,
        connections=128 + 2 * members,
        calls_per_connection=256,
        calls=CallShare(
            "the owner",
            calls=1024 + 8 * members,
            user_calls=1024 + 8 * members,
            # Whose memory it is. All members report at the same time, and to one agent.
            reading=1024 + 8 * members,
            all_reading=1024 + 8 * members,
            first_message_s=60.0,
        ),
        credential_checks=64 + members,
        # Links are streams, which are never idle. Reports and shards go over a connection once for each snapshot.
        idle_s=min(max(AGENT_IDLE_S, AGENT_IDLE_S_PER_MEMBER * members), MOST_AGENT_IDLE_S),
    )


STRANGERS_AT_AGENT = CallShare(
    "strangers",
    calls=32,
    user_calls=8,
    # gRPC has one largest message for all methods of a server, and a shard's offer is large.
    reading=1,
    all_reading=2,
    # The answer to a Ping repeats its nonce.
    first_message_bytes=KIB,
    reading_wait_s=PROBE_WAIT_S,
    first_message_s=2.0,
    unread_s=10.0,
)
"""Calls at an agent by others than the gang's owner. They may call Ping only, which the coordinator does when it
suspects the agent. To be refused is an answer as well: the process is alive."""
