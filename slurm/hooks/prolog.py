"""muster-prolog: for slurm.conf's Prolog. Frees what musterd keeps for other jobs before this one starts on the node.

A requeued job leaves its ranks' states in memory for its next run (ten minutes at most). This job may want that memory.
The exit status is always 0: what happens to musterd is no reason to take a node out of service.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from muster.daemon.host.kept_memory_client import SOCKET, ask

PATIENCE_S = 5.0
"""A musterd that is being started again (its socket is there, and nobody answers) is waited for so long."""
ANSWER_S = 9.0
"""musterd answers sooner, also where memory is still being given back: Slurm gives up a job that has not begun after
BatchStartTimeout, 10 s by default."""


def main(environ: Mapping[str, str] = os.environ) -> int:
    """The entry point `muster-prolog`."""
    job, uid = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_JOB_UID", "")
    if not (job.isdecimal() and uid.isdecimal()):
        print(
            f"muster-prolog: SLURM_JOB_ID is {job!r} and SLURM_JOB_UID {uid!r}, no job and its user: "
            "Slurm runs this, as slurm.conf's Prolog",
            file=sys.stderr,
        )
        return 0
    trouble = free(int(job), int(uid), SOCKET, PATIENCE_S)
    if trouble:
        print(f"muster-prolog: memory of requeued jobs may still stand on this node: {trouble}", file=sys.stderr)
    return 0


def free(job: int, uid: int, path: str, patience_s: float) -> str:
    """Have musterd free what it keeps for other jobs than `job` of user `uid`; returns why it is not known to be done,
    in words.

    Where there is no socket there is no musterd, and systemd keeps nothing for one that was stopped.
    """
    request = {"free": {"slurm_job_id": job, "uid": uid}}
    try:
        answer, _ = ask(path, request, timeout_s=ANSWER_S, patience_s=patience_s)
        return str(answer.get("refused", ""))
    except FileNotFoundError:
        return ""
    except TimeoutError:
        return f"musterd took more than {ANSWER_S:.0f} s"
    except OSError as error:
        return f"musterd does not answer at {path} ({error.strerror or error})"


if __name__ == "__main__":
    sys.exit(main())
