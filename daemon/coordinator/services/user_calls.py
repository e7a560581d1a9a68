"""How many calls of one user for all nodes or all jobs are under way: their answers are large."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from muster.daemon.coordinator.services.rpc_errors import resource_exhausted


class UserCalls:
    """Counts the calls of each user. `most`: of one user. `what`: for the message to a user who finds no place."""

    def __init__(self, most: int, what: str) -> None:
        self._most = most
        self._what = what
        self._under_way: Counter[int] = Counter()

    @contextmanager
    def one(self, uid: int) -> Iterator[None]:
        """Count one call for a block.

        Raises:
            RpcAbort: the user has as many under way as one user may.
        """
        if self._under_way[uid] >= self._most:
            raise resource_exhausted(f"uid {uid} has {self._most} {self._what} under way, the most here: try again")
        self._under_way[uid] += 1
        try:
            yield
        finally:
            self._under_way[uid] -= 1
            if not self._under_way[uid]:
                del self._under_way[uid]
