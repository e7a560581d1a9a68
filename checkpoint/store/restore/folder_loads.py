"""How far the ranks of this node are with a durable checkpoint, which they read by themselves."""

from muster.daemon.host import clock
from muster.v1.agent_pb2 import RestoreProgress
from muster.v1.rank_pb2 import RankLoad


class FolderLoads:
    """The loads of one generation on this node, from the moment on at which its order came.

    Args:
        ranks: how many ranks run here.
    """

    def __init__(self, generation: int = 0, ranks: int = 0) -> None:
        self._generation, self._ranks = generation, ranks
        self._loads: dict[int, RankLoad] = {}
        self._began = clock.monotonic()
        self._ended: float | None = None

    def note(self, rank: int, load: RankLoad) -> None:
        """A rank says how far it is."""
        self._loads[rank] = load
        if self._done() == self._ranks:
            self._ended = self._ended or clock.monotonic()

    def status(self) -> RestoreProgress | None:
        """The progress as the agent reports it; None: no rank of this node loads a durable checkpoint."""
        if not self._loads:
            return None
        # A damaged checkpoint is left by one rank after the other.
        last = min(self._loads.values(), key=lambda load: (load.version.generation, load.version.step))
        passed_s = (clock.monotonic() if self._ended is None else self._ended) - self._began
        return RestoreProgress(
            generation=self._generation,
            ranks=self._ranks,
            ranks_done=self._done(),
            bytes=sum(load.bytes for load in self._loads.values()),
            loaded_bytes=sum(load.loaded for load in self._loads.values()),
            folder=last.folder,
            version=last.version,
            damage=last.damage,
            ms=round(passed_s * 1000),
        )

    def _done(self) -> int:
        return sum(load.done for load in self._loads.values())
