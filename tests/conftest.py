"""Says where a run of tests spends its time. Nothing here decides whether a test passes.

`--budget SECONDS` is what `make` gives each part of the run:

- a watchdog prints the slowest running test once the run exceeds the budget, and again each time that the run has
  become half as long again;
- the ten slowest tests are printed at the end, each with its fixtures.

With pytest-xdist both are done by the process that distributes the tests.

Python's garbage collector waits until the tests are collected, and never looks at what was made until then: it took
half of the processor time of the collection. At the end it looks once, not five times, at what the tests have left.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Generator

import pytest

import muster.daemon  # noqa: F401  # before gRPC, as in every daemon: see there

SLOWEST = 10


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--budget`."""
    parser.addoption("--budget", type=float, metavar="SECONDS", help="say which tests are slow; fails nothing")


def pytest_configure(config: pytest.Config) -> None:
    """Watch the run that has a budget; the workers of pytest-xdist have none."""
    budget = config.getoption("--budget")
    if budget is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Watchdog(config, budget), "watchdog")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, None, None]:
    """Let the garbage collector pass over what lives as long as the process: modules and tests."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Tell now of what could not be destroyed. pytest's own looks at the end find nothing more."""
    gc.collect()
    gc.freeze()


class Watchdog:
    """The time that each test takes, and has taken so far. `budget` is in seconds."""

    def __init__(self, config: pytest.Config, budget: float) -> None:
        self._config, self._budget = config, budget
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._running: dict[str, float] = {}
        """Test -> when it was started."""
        self._taken: Counter[str] = Counter()
        """Test -> seconds, of set-up, call and tear-down."""
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    @property
    def _passed(self) -> float:
        return time.monotonic() - self._began

    def pytest_sessionstart(self) -> None:
        self._thread.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        with self._lock:
            self._running[nodeid] = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._taken[report.nodeid] += report.duration

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        with self._lock:
            self._running.pop(nodeid, None)

    def pytest_sessionfinish(self) -> None:
        self._ended.set()
        self._thread.join()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._taken:
            return
        terminalreporter.ensure_newline()
        terminalreporter.section(f"slowest {SLOWEST} tests ({self._passed:.0f} s in all, budget {self._budget:g} s)")
        for nodeid, seconds in self._taken.most_common(SLOWEST):
            terminalreporter.write_line(f"{seconds:7.2f} s  {nodeid}")

    def _watch(self) -> None:
        limit = self._budget
        while not self._ended.wait(max(0.0, limit - self._passed)):
            self._say()
            limit = max(limit, self._passed) * 1.5

    def _say(self) -> None:
        now = time.monotonic()
        with self._lock:
            since = sorted((now - began, nodeid) for nodeid, began in self._running.items())
        slowest = f"running for {since[-1][0]:.1f} s: {since[-1][1]}" if since else "no test is running"
        words = f"{self._passed:.0f} s have passed, the budget is {self._budget:g} s; {slowest}"
        # The reporter writes to the terminal itself: the output of a running test is captured.
        reporter = self._config.pluginmanager.getplugin("terminalreporter")
        if reporter is not None:
            reporter.ensure_newline()
            reporter.write_line(f"watchdog: {words}", yellow=True)
