"""What is said of a rank that has failed, in the form of torchrun, which people and tools know."""

from __future__ import annotations

import json
import time

from muster.daemon.agent.ranks.rank_process import Outcome, signal_name
from muster.daemon.host import clock, rank_log_files

_MOST_BYTES = 1 << 20
_HOW = "in the output above; torch.distributed.elastic.multiprocessing.errors.record brings it here"
_BORDER, _SECTION = "=" * 60, "-" * 60


def recorded_error(run_dir: str, gang: str, outcome: Outcome) -> str:
    """The error that the script has written down (torch's @record); empty: it has written none."""
    path = rank_log_files.error_path(run_dir, gang, outcome.generation, outcome.rank)
    try:
        with rank_log_files.open_to_read(path) as file:
            found = json.loads(file.read(_MOST_BYTES))["message"]
        return found if isinstance(found, str) else str(found["extraInfo"]["py_callstack"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def describe(outcome: Outcome, node: str, error: str, file: str = "") -> str:
    """The rank's failure in several lines. `error`: what it has recorded, in `file`; empty: nothing."""
    killed = outcome.exit_code < 0
    name = f" ({signal_name(-outcome.exit_code)})" if killed else ""
    recorded = error.strip().replace("\n", "\n  ") or (
        f"Signal {-outcome.exit_code}{name} received by PID {outcome.pid}" if killed else _HOW
    )
    return "\n".join(
        (
            _BORDER,
            f"Rank {outcome.rank} FAILED in generation {outcome.generation}",
            _SECTION,
            "Root Cause (first observed failure):",
            "[0]:",
            f"  time      : {time.strftime('%Y-%m-%d_%H:%M:%S', time.localtime(clock.wall()))}",
            f"  host      : {node}",
            f"  rank      : {outcome.rank} (local_rank: {outcome.local_rank})",
            f"  exitcode  : {outcome.exit_code} (pid: {outcome.pid}) {name}",
            f"  error_file: {file or '<N/A>'}",
            f"  traceback : {recorded}",
            _BORDER,
        )
    )
