"""How a run went, in one small file beside its logs: `RUN_DIR/logs/GANG/run/summary.json`. `muster runs` reads it.

The batch process writes it, because it sees the job's view all the time and is the user's own. Storage that hangs costs
it nothing: a thread of its own writes. The file is replaced as a whole.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from typing import Any, Protocol

from google.protobuf.json_format import MessageToDict

from muster.daemon.agent.batch.srun import ALL_LAUNCHED
from muster.daemon.host import clock
from muster.daemon.host.rank_log_files import hold_log_folder, log_folder, open_to_read
from muster.daemon.host.worker_threads import run_in_own_thread
from muster.v1.api_pb2 import BatchRef, GangView, TrainingView

_FOLDER, _FILE = "run", "summary.json"
_MOST_BYTES = 4 << 20
INTERVAL_S = 60.0
"""Seconds between two summaries of a run in which nothing happens."""
LAST_WRITE_S = 3.0
"""Seconds for which the end of the job waits for the last one."""
_log = logging.getLogger(__name__)


class SeesView(Protocol):
    """What asks the coordinator for the view of a job (batch_process.Coordinator)."""

    async def view(self, launch: BatchRef = ALL_LAUNCHED) -> Any:
        """The view, or why there is none."""
        ...


class Summarised:
    """Passes the views of `coordinator` on, and keeps a summary of them in `run_dir`."""

    def __init__(self, coordinator: SeesView, run_dir: str, gang: str) -> None:
        self._coordinator, self._run_dir, self._gang = coordinator, run_dir, gang
        self._training: TrainingView | None = None
        self._written: tuple[object, ...] = ()
        self._written_at = float("-inf")
        self._writing: asyncio.Task[None] | None = None

    async def view(self, launch: BatchRef = ALL_LAUNCHED) -> Any:
        """See SeesView."""
        view = await self._coordinator.view(launch)
        if isinstance(view, GangView):
            await self._note(view)
        return view

    async def _note(self, view: GangView) -> None:
        if view.HasField("training"):
            self._training = TrainingView()
            self._training.CopyFrom(view.training)
        seen = (view.phase, view.generation, view.final, len(view.recoveries))
        due = seen != self._written or clock.monotonic() - self._written_at >= INTERVAL_S
        if not due or (self._writing is not None and not self._writing.done() and not view.final):
            return
        self._written, self._written_at = seen, clock.monotonic()
        self._writing = asyncio.create_task(self._write(summary(view, self._training), self._writing))
        if view.final:
            await asyncio.wait([self._writing], timeout=LAST_WRITE_S)

    async def _write(self, content: dict[str, Any], before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])  # the older one may not replace the newer one
        try:
            await run_in_own_thread(lambda: write(self._run_dir, self._gang, content), "run summary")
        except OSError as error:
            _log.info("no summary for muster runs: %s", error)


def summary(view: GangView, training: TrainingView | None = None) -> dict[str, Any]:
    """What is kept of a view: no state of single ranks, but which node carried which. `training`: what the ranks said
    last, which the view of a job that has ended does not have."""
    kept = GangView()
    kept.CopyFrom(view)
    if training is not None:
        kept.training.CopyFrom(training)
    for field in ("ranks", "nodes", "exclusions", "checkpoint"):
        kept.ClearField(field)
    found: dict[str, Any] = MessageToDict(kept, preserving_proto_field_name=True)
    places: dict[str, list[int]] = {}
    for rank in view.ranks:
        places.setdefault(rank.node, []).append(rank.rank)
    leaves = {node.node: node.leaf for node in view.nodes if node.leaf}
    durable = view.checkpoint.durable_path
    return found | {"final": view.final, "ranks_by_node": places, "leaves": leaves, "durable_path": durable}


def write(run_dir: str, gang: str, content: dict[str, Any]) -> None:
    """Replace the summary of a gang. Blocks.

    Raises:
        OSError: it can't be written.
    """
    with hold_log_folder(run_dir, gang, _FOLDER) as folder:
        new = f".{_FILE}.part"
        with os.fdopen(folder.create(new), "w") as file:
            json.dump(content, file)
        folder.rename(new, _FILE)


def read(run_dir: str, gang: str) -> dict[str, Any]:
    """The summary of a gang; empty if there is none that can be read. Blocks."""
    try:
        with open_to_read(log_folder(run_dir, gang) / _FOLDER / _FILE) as file:
            found = json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
