"""The process that writes numbers of a run into the user's TensorBoard or MLflow while it trains.

The agent starts it in the user's interpreter, where their library is, and gives it a line of JSON for each sample. No
rank and no agent waits for a library that hangs: what is more than this process can take is dropped. It ends with its
standard input.

The first line says to what: `{"tool", "to", "experiment", "gang", "job", "name", "params"}`. Then follow
`{"at": SECONDS, "numbers": [[name, step, ranks, least, median, greatest], ...]}`, and at the end of the job
`{"status": "FINISHED"}`.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from muster.daemon.agent.training.trackers import (
    Mlflow,
    NoTracker,
    Point,
    TensorBoard,
    Tracker,
    TrackerFailed,
    points_of,
)
from muster.daemon.host import clock

EVERY_S = 5.0
"""Seconds between two writes, and at first between two tries."""
LONGEST_S = 60.0
MOST_POINTS = 50_000
"""Points that wait while the library fails. Then the oldest go."""
MOST_LINES = 1000
"""Lines that wait while a write hangs: half an hour of them. Then none is read, and the agent drops what follows."""


def open_tracker(run: dict[str, Any]) -> Tracker:
    """The run in the tool that the first line names.

    Raises:
        NoTracker, TrackerFailed: see there.
    """
    if run["tool"] == "tensorboard":
        return TensorBoard(Path(run["to"]))
    if not run["to"] and not os.environ.get("MLFLOW_TRACKING_URI"):
        raise TrackerFailed("[record] live_to of job.toml, or MLFLOW_TRACKING_URI, must name MLflow's server or folder")
    same = {"muster.gang": run["gang"], "muster.live": "yes"}
    tags = {"slurm.job": str(run["job"])}
    return Mlflow(run["to"], run["experiment"], run["name"], clock.wall(), run["params"], tags, same)


OpenTracker = Callable[[dict[str, Any]], Tracker]


class LiveWriter:
    """Writes what is taken in. `say`: where it says what is wrong. `most_points`: of those that wait."""

    def __init__(
        self,
        run: dict[str, Any],
        say: Callable[[str], None],
        opened: OpenTracker = open_tracker,
        most_points: int = MOST_POINTS,
    ) -> None:
        self._run, self._say, self._open, self._most_points = run, say, opened, most_points
        self._tracker: Tracker | None = None
        self._waiting: list[Point] = []
        self._said = ""
        self.status = ""
        """With what status the run has ended; empty: it has not."""

    def take(self, line: str) -> None:
        """Take a line of the agent."""
        told = json.loads(line)
        self.status = told.get("status", self.status)
        for name, step, *values in told.get("numbers", ()):
            self._waiting += points_of(name, step, told["at"], *values)
        del self._waiting[: -self._most_points]

    def write(self) -> bool:
        """Write what waits. Returns whether nothing does then.

        Raises:
            NoTracker: this never works here.
        """
        try:
            self._tracker = self._tracker or self._open(self._run)
            self._tracker.write(self._waiting)
        except TrackerFailed as error:
            if str(error) != self._said:
                self._say(f"the numbers of this run are not written: {error}")
            self._said = str(error)
            return False
        self._waiting.clear()
        self._said = ""
        return True

    def close(self) -> None:
        """Write what waits, once, and say how the run has ended."""
        try:
            if self.write() and self._tracker:
                self._tracker.close(self.status)
        except TrackerFailed as error:
            self._say(f"the end of this run is not noted: {error}")


def serve(lines: Iterable[str], say: Callable[[str], None], opened: OpenTracker = open_tracker) -> None:
    """Write what `lines` say until they end. A thread reads them: a write may take long.

    Raises:
        NoTracker: the library is missing.
    """
    reading = iter(lines)
    writer = LiveWriter(json.loads(next(reading)), say, opened)
    taken: queue.Queue[str | None] = queue.Queue(MOST_LINES)
    threading.Thread(target=_read, args=(reading, taken), daemon=True).start()
    pause_s, due = EVERY_S, clock.monotonic()
    while (line := _next(taken, due - clock.monotonic())) is not None:
        if line:
            writer.take(line)
        if clock.monotonic() >= due:
            pause_s = EVERY_S if writer.write() else min(2 * pause_s, LONGEST_S)
            due = clock.monotonic() + pause_s
    writer.close()


def _read(lines: Iterator[str], taken: queue.Queue[str | None]) -> None:
    for line in lines:
        taken.put(line)
    taken.put(None)


def _next(taken: queue.Queue[str | None], within_s: float) -> str | None:
    """The next line; empty: none has come; None: there is none any more."""
    try:
        return taken.get(timeout=max(0.05, within_s))
    except queue.Empty:
        return ""


def main() -> None:
    """Entry point: the agent executes this in the user's interpreter."""
    os.nice(10)
    name = "the live numbers of this run"
    try:
        serve(sys.stdin, lambda words: print(f"{name}: {words}", file=sys.stderr, flush=True))
    except NoTracker as error:
        print(f'{name}: {error}: pip install "muster[{error.extra}]" there', file=sys.stderr, flush=True)
    except StopIteration:
        pass  # the agent has ended before it has said anything
