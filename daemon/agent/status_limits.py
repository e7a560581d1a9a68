"""An agent's status must fit into one message, also if very many ranks end at once."""

from collections.abc import Iterable

from muster.daemon.transport.job_limits import MAX_STDERR_BYTES
from muster.v1.agent_pb2 import RankStatus


def limit_stderr(ranks: Iterable[RankStatus], most_bytes: int = MAX_STDERR_BYTES) -> None:
    """Remove the stderr of the ranks after the first `most_bytes` of it. The first ranks explain what happened."""
    left = most_bytes
    for rank in ranks:
        left -= len(rank.stderr_tail.encode())
        if left < 0:
            rank.stderr_tail = ""
