"""Runs a saved kernel log through the node daemon's parser and windows and the coordinator's policy.

Time is that of the log. Memory does not grow with the log. Each signal is judged as if the node were in service,
without the circuit breaker's limits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import BinaryIO

from muster.daemon.coordinator.policy.policy import Policy
from muster.daemon.node.kernel.driver_lines import DriverLines
from muster.daemon.node.kernel.kernel_errors import KernelErrors
from muster.daemon.node.kernel.kernel_record import KERNEL_FACILITY
from muster.daemon.node.sensors.kmsg import observation
from muster.daemon.node.sensors.sensor import Observation
from muster.daemon.node.signal_windows import SignalRule, SignalWindows
from muster.launcher.policy.log_lines import MAX_LINE_BYTES, LogLine, read_line

NEW_BOOT_S = 60.0
"""Seconds by which time steps back at a boot, at least. Records of several processors are out of order by far less."""


_UNLESS_EXPLAINED = "unfit, unless the loss of a peer explains it"


@dataclass(slots=True)
class Counts:
    """What the log held. `rows`: the signals for each row of the policy, by its key."""

    lines: int = 0
    too_long: int = 0
    without_time: int = 0
    of_programs: int = 0
    errors: int = 0
    boots: int = 1
    rows: Counter[str] = field(default_factory=Counter)


class Replay:
    """One log. Feed it with `lines`."""

    def __init__(self, policy: Policy) -> None:
        self.counts = Counts()
        self._policy = policy
        self._driver_lines = DriverLines()
        self._now, self._time = 0.0, "?"
        self._signals: list[Observation] = []
        self._boot()

    def lines(self, lines: Iterable[bytes | None]) -> Iterator[str]:
        """What follows from these lines, in words. None: a line that is too long."""
        for line in lines:
            self.counts.lines += 1
            if line is None:
                self.counts.too_long += 1
                continue
            self._take(read_line(line))
            for signal in self._signals:
                yield self._judged(signal)
            self._signals.clear()

    def summary(self) -> Iterator[str]:
        """The counts, in words."""
        counts = self.counts
        yield (
            f"{counts.lines} lines: {counts.errors} with an error, {counts.of_programs} of programs (ignored), "
            f"{counts.without_time} without a time, {counts.too_long} too long (ignored); {counts.boots} boots"
        )
        for key, count in sorted(counts.rows.items(), key=lambda item: (-item[1], item[0])):
            yield f"{count:8} {key}"
        for driver, count in self._driver_lines.counts.most_common():
            yield f"{count:8} not understood: trouble of {driver}; the newest: {self._driver_lines.newest[driver]}"

    def _boot(self) -> None:
        """A node daemon starts."""
        self._errors = KernelErrors(self._driver_lines)
        self._windows = SignalWindows(self._signals.append, wall=lambda: self._now)
        self._windows.use(SignalRule(**asdict(rule)) for rule in self._policy.rules())

    def _take(self, line: LogLine) -> None:
        if line.at is None:
            self.counts.without_time += 1
        elif line.at < self._now - NEW_BOOT_S:
            self.counts.boots += 1
            self._now, self._time = line.at, line.time
            self._boot()
        elif line.at >= self._now:
            self._now, self._time = line.at, line.time
        if line.record.facility != KERNEL_FACILITY:
            self.counts.of_programs += 1
        error, _ = self._errors.read(line.record, self._now)
        if error:
            self.counts.errors += 1
            self._windows.report(observation(error, self._now))

    def _judged(self, signal: Observation) -> str:
        decision = self._policy.decide(signal.kind, signal.code)
        row = self._policy.row(signal.kind, signal.code)
        self.counts.rows[row.key if row else "no row"] += 1
        response = f", {decision.response}" if decision.action == "degraded" else ""
        device = f" ({signal.device})" if signal.device else ""
        action = _UNLESS_EXPLAINED if decision.action == "unfit_unless_explained" else decision.action
        return f"{self._time}  {action}{response}: {decision.reason}{device}"


def bounded_lines(log: BinaryIO) -> Iterator[bytes | None]:
    """The lines of a file, without their ends and without empty ones. None: a line of more than MAX_LINE_BYTES."""
    while line := log.readline(MAX_LINE_BYTES + 1):
        if len(line) <= MAX_LINE_BYTES or line.endswith(b"\n"):
            if stripped := line.rstrip(b"\r\n"):
                yield stripped
            continue
        while not line.endswith(b"\n") and (line := log.readline(MAX_LINE_BYTES)):
            pass
        yield None
