"""`make bench-see`: what it costs to see what jobs do.

    python -m benchmarks.bench_see

Each figure has a function, which measures nothing else. The output is a table of all figures. The last line is a JSON
object with the main figures. Names contain the units.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

from benchmarks.accounts import goodput
from benchmarks.logged_steps import log_overhead
from benchmarks.reports import report
from benchmarks.scrapes import metrics_render
from benchmarks.watched_site import status, watchers

Figures = dict[str, float]

MEASUREMENTS: tuple[Callable[[], Figures], ...] = (metrics_render, log_overhead, status, watchers, report, goodput)
REPORTED_FIGURES = (
    "metrics_render_ms",
    "log_overhead_percent",
    "status_ms",
    "watchers_cpu_percent",
    "report_s",
    "report_mb",
    "goodput_s",
)
"""The figures of the last line."""


def main() -> None:
    """See the module."""
    figures: Figures = {}
    for measure in MEASUREMENTS:
        found = measure()
        for name, value in found.items():
            print(f"{name:40} {value:12.2f}")
        sys.stdout.flush()
        figures |= found
    print(json.dumps({name: round(figures[name], 3) for name in REPORTED_FIGURES}))


if __name__ == "__main__":
    main()
