"""muster-prolog: for slurm.conf's Prolog. Frees what musterd keeps for other jobs before this one starts on the node.

A requeued job leaves its ranks' states in memory for its next run (ten minutes at most). This job may want that memory.
The exit status is always 0: what happens to musterd is no reason to take a node out of service.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping

from muster.daemon.memory_line import SOCKET, ask

PATIENCE_S = 5.0
"""A musterd that is being started again (its socket is there, and nobody answers) is waited for so long."""
FREED_S = 30.0
"""How long giving memory back may take: some gigabytes a second."""
_AGAIN_S = 0.1


def main(environ: Mapping[str, str] = os.environ) -> int:
    """The entry point `muster-prolog`."""
    job = environ.get("SLURM_JOB_ID", "")
    if not job.isdecimal():
        print("muster-prolog: SLURM_JOB_ID says no job: Slurm runs this, as slurm.conf's Prolog", file=sys.stderr)
        return 0
    trouble = free(int(job), SOCKET, PATIENCE_S)
    if trouble:
        print(f"muster-prolog: memory of requeued jobs may still stand on this node: {trouble}", file=sys.stderr)
    return 0


def free(job: int, path: str, patience_s: float) -> str:
    """Have musterd free what it keeps for other jobs than `job`; returns why it is not known to be done, in words.

    Where there is no socket there is no musterd, and systemd keeps nothing for one that was stopped.
    """
    end = time.monotonic() + patience_s
    while True:
        try:
            answer, _ = ask(path, {"free": {"slurm_job_id": job}}, timeout_s=FREED_S)
            return str(answer.get("refused", ""))
        except FileNotFoundError:
            return ""
        except TimeoutError:
            return f"musterd took more than {FREED_S:.0f} s"
        except OSError as error:
            if time.monotonic() >= end:
                return f"musterd does not answer at {path} ({error.strerror or error})"
        time.sleep(_AGAIN_S)


if __name__ == "__main__":
    sys.exit(main())
