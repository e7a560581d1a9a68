"""muster-epilog, for slurm.conf's Epilog: lets no further job start on a node that has seen a fatal signal while the
coordinator is away.

Slurm drains a node whose Epilog fails, before another job starts there. A node that the coordinator has judged is the
coordinator's to drain: an epilog that failed there would drain a node again that an operator has just resumed.

musterd may keep memory of the job that has ended. If another job starts, that memory is freed. A site can have the
epilog wait until nobody needs the memory (`epilog_wait_s` of muster.toml, 0 by default): another job cannot start on
the node meanwhile, and a requeued job cannot start anywhere.

Exit status: 0, or 1 if the node is unfit on its own word. musterd does not answer: the site's choice.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping

from muster.slurm.hooks import node_verdict

MAX_WAIT_S = 600.0
"""Seconds. musterd keeps no memory for longer."""
_POLL_S = 0.25


def main(environ: Mapping[str, str] = os.environ) -> int:
    """Entry point of `muster-epilog`."""
    job = environ.get("SLURM_JOB_ID", "")
    return run(node_verdict.Hook.of(environ), int(job) if job.isdecimal() else 0)


def run(
    hook: node_verdict.Hook,
    job: int,
    now: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> int:
    """Wait for the memory of `job` as long as the site wants; return the exit status."""
    verdict = node_verdict.ask(hook, job)
    if verdict.memory_kept:
        end = now() + wait_s(hook)
        while verdict.memory_kept and now() < end:
            pause(_POLL_S)
            verdict = node_verdict.ask(hook, job)
    return verdict.report("muster-epilog", only_own_word=True)


def wait_s(hook: node_verdict.Hook) -> float:
    """Seconds for which the site lets an epilog wait."""
    value = node_verdict.setting(hook, "epilog_wait_s", 0.0)
    return min(float(value), MAX_WAIT_S) if isinstance(value, int | float) and value > 0 else 0.0


if __name__ == "__main__":
    sys.exit(main())
