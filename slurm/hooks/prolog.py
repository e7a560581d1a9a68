"""muster-prolog, for slurm.conf's Prolog: makes musterd free the memory that it keeps for other jobs.

A requeued job keeps its ranks' state in memory for its next run (ten minutes at most). The job that starts now may need
that memory. The exit status is always 0: a problem of musterd is no reason to drain the node.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from muster.daemon.host.kept_memory_client import SOCKET, send_request

CONNECT_TIMEOUT_S = 5.0
"""Seconds to retry while the socket exists but nobody answers: musterd is restarting."""
REPLY_TIMEOUT_S = 9.0
"""Seconds to wait for the reply. musterd answers sooner, even if it is still freeing memory. Slurm gives up a job that
has not started after BatchStartTimeout, 10 s by default.
"""


def main(environ: Mapping[str, str] = os.environ) -> int:
    """Entry point of `muster-prolog`."""
    job, uid = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_JOB_UID", "")
    if not (job.isdecimal() and uid.isdecimal()):
        print(
            f"muster-prolog: SLURM_JOB_ID={job!r} and SLURM_JOB_UID={uid!r} are not a job id and a user id. "
            "Only Slurm runs this program, as Prolog in slurm.conf",
            file=sys.stderr,
        )
        return 0
    trouble = free_kept_memory(int(job), int(uid), SOCKET, CONNECT_TIMEOUT_S)
    if trouble:
        print(f"muster-prolog: memory of requeued jobs may still be in use on this node: {trouble}", file=sys.stderr)
    return 0


def free_kept_memory(job: int, uid: int, path: str, retry_s: float) -> str:
    """Makes musterd free what it keeps for jobs other than `job` of user `uid`.

    If there is no socket, no musterd runs, and systemd keeps no memory for a stopped musterd.

    Returns:
        "" on success, else the reason why memory may still be in use.
    """
    request = {"free": {"slurm_job_id": job, "uid": uid}}
    try:
        answer, _ = send_request(path, request, timeout_s=REPLY_TIMEOUT_S, retry_s=retry_s)
        return str(answer.get("refused", ""))
    except FileNotFoundError:
        return ""
    except TimeoutError:
        return f"musterd took more than {REPLY_TIMEOUT_S:.0f} s"
    except OSError as error:
        return f"musterd does not answer at {path} ({error.strerror or error})"


if __name__ == "__main__":
    sys.exit(main())
