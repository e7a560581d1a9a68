"""How long `muster report` takes, and how large its page is, for a job of 4,096 ranks and 100,000 steps."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.journal.journal import Journal
from muster.daemon.host.metric_series import MOST_BINS
from muster.launcher.report.testing.made_up_job import GANG, MadeUpJob

NODES, RANKS_PER_NODE = 512, 8


def report() -> dict[str, float]:
    """The whole command, from a journal and the files of all nodes: the second run, when matplotlib knows its fonts."""
    with TemporaryDirectory(prefix="muster-report-") as name:
        state, page = Path(name, "state"), Path(name, "report.html")
        job = MadeUpJob(nodes=NODES, ranks_per_node=RANKS_PER_NODE, run_dir=name)
        job.write_series(bins=MOST_BINS - 1)
        with closing(Journal(state)) as journal:
            for record in job.records():
                journal.append([facts.decode(record.name, record.json)], record.at, "")
        words = ("report", "--journal", str(state), "--output", str(page), GANG)
        for _ in range(2):
            began = time.perf_counter()
            subprocess.run([sys.executable, "-m", "muster.launcher", *words], check=True, stdout=subprocess.DEVNULL)
        return {"report_s": time.perf_counter() - began, "report_mb": page.stat().st_size / 1e6}
